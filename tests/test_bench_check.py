"""What `bench allreduce` does before it times: the bound on the error, the check of every kind of row, the look-ahead.

Wrong results are made on purpose, so that a check that lets everything pass is noticed.
"""

from __future__ import annotations

import data
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import echo_pg
from echo_pg.bench import bound, cases, collectives, measure, two_collective
from echo_pg.bench.collectives import Collective, DeepSpeed, Echo

KIB = 1 << 10


class ToyQuantizer:
    """DeepSpeed's four functions in plain torch, 8 bits only: what the two collectives call, and in which shapes."""

    Symmetric = 0

    def swizzle_quant(self, x, groups, bits, kind, pipeline, nodes, devices):
        rows = x.float().view(groups, -1)
        scales = rows.abs().amax(1, keepdim=True) / 127
        return [(rows / scales).round().to(torch.int8).view(-1), scales]

    def quantized_reduction(self, codes, scales, groups_in, groups_out, bits, kind, devices):
        copies = self.dequantize(codes, scales, groups_in, bits, kind).view(devices, -1)
        return self.swizzle_quant(copies.float().sum(0), groups_out, bits, kind, 1, 1, devices)

    def dequantize(self, codes, scales, groups, bits, kind):
        return (codes.view(groups, -1).float() * scales.view(groups, 1)).half().view(-1)


def reduce_in_two_collectives(rank, size):
    numel = 3 * size * two_collective.GROUP_ELEMS
    assert two_collective.fits(numel, size) and not two_collective.fits(numel + 1, size)
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).half() for r in range(size)]
    row = cases.Row("two8", "", kind="two_collective", changes={"bits": 8})
    made = DeepSpeed(row, dist.group.WORLD, ToyQuantizer())
    result = made.buffer(tensors[rank].bfloat16()).copy_(tensors[rank])
    made.all_reduce(result)
    exact = torch.stack(tensors).double().sum(0)
    return result.view(torch.int16), bound.relative_error(result, exact), made.wire_bytes(result)


def test_two_collectives_add_up_and_agree():
    (first, error, sent), *others = run_ranks(reduce_in_two_collectives, 4)
    assert all(torch.equal(first, other[0]) for other in others)
    # Half a step of max / 127, max below 5 deviations: of each of four contributions and of their sum, twice as wide.
    assert 0 < error < (4 * 5 + 2 * 5) / 254 / 2
    assert sent == 2 * 3 * (3 * 2048 + 3 * 4)  # in both collectives to three peers: 3 groups and their scales


# ---- the check
@pytest.mark.parametrize("kind", ("activations", "positive", "negative", "constant", "nearly_one_sided", "gradients"))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("rotation", ("none", "hadamard"))
def test_half_a_step_bounds_the_codec_and_is_reached(kind, bits, rotation):
    """Of one rounding: within the limit; and where elements are spread over their range, no limit far above it."""
    options = echo_pg.Options(bits=bits, feedback=False, rotation=rotation)
    config = options.to_config()
    (x,) = data.contributions(kind, 1, 40 * 128 + 17)
    y = torch.empty_like(x)
    codec = echo_pg.build.extension().testing
    codec.decode(codec.encode(x, config), y, config)
    seen = bound.extremes(x, options.group_size, options.run_elems)
    limit = bound.half_step(seen.width, seen.magnitude, bits) + bound.SLACK * seen.magnitude
    worst = bound.worst_ratio(y, x, limit, options)
    assert worst <= 1
    if kind == "activations":
        assert worst > 0.8
        assert bound.worst_ratio(y + 2 * limit.max(), x, limit, options) > 1


class Tampered(Echo):
    """An echo row whose result is changed after the call."""

    def __init__(self, spoil):
        super().__init__(cases.Row("tampered", "tampered"), "bfloat16", cases.PLAIN4)
        self.spoil = spoil

    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        self.spoil(tensor)


def check_tampered(rank, size):
    row = cases.Row("gloo", "Gloo", kind="inner")
    bench = measure.Rank(measure.Settings("cpu", (64 * KIB,), (row,), 0, 1))
    x = bench._contribution(5000, torch.bfloat16)

    def one_rank(tensor):
        tensor[4999] += rank * 0.01 * tensor[4999].abs()

    def all_ranks(tensor):
        tensor[4999] += 3.0  # deviations of a contribution; a step is about a third of one

    class Silent(Collective):
        def counters(self):
            return {"calls_quantized": 0, "forwarded": {}, "wire_bytes": 0}

    found = []
    for made in (Tampered(one_rank), Tampered(all_ranks), Silent(row, bench.inner)):
        try:
            bench._check_all([made], [torch.empty_like(x)], x, lambda _: None)
            found.append("nothing")
        except measure.CheckFailed as error:
            found.append(str(error))
    return found


def test_a_wrong_result_ends_the_run_on_all_ranks():
    for different, off, uncounted in run_ranks(check_tampered, 2):
        assert "tampered: ranks hold different bytes" in different
        assert "tampered: the result is off by" in off
        assert "neither quantized nor forwarded" in uncounted


def measure_compensated(rank, size):
    collectives.MATMUL_SIZE = 64
    names = ("matmul", "unfused4", "unfused4+mm", "group+mm", "local2-tensor", "local1-rot+mm")
    rows = tuple(row for row in cases.CUDA_ROWS if row.name in names)
    bench = measure.Rank(measure.Settings("cpu", (64 * KIB,), rows, 1, 3))
    found = []
    bench.measure("bfloat16", lambda _: None, lambda _: None, lambda _, measured: found.extend(measured))
    return [(one.row.name, one.error_share, one.wire_bytes, len(one.seconds)) for one in found]


def test_rows_of_gpus_pass_their_check():
    of_rank_0, of_rank_1 = run_ranks(measure_compensated, 2)
    assert of_rank_0 == of_rank_1 and len(of_rank_0) == 6
    for name, share, sent, iterations in of_rank_0:
        assert iterations == 3
        assert (share, sent) == (0, 0) if name == "matmul" else 0.1 < share <= 1 and 17_000 < sent < 18_000, name


def sums_by_look_ahead(rank, size):
    options = echo_pg.Options(policy="all", min_bytes=0, fabric="peer")
    found = []
    for tiles in (0, 1):
        group = dist.new_group(backend="echo", pg_options=options)
        backend = echo_pg.report._echo_of(group)
        backend._set_look_ahead(tiles)
        with pytest.raises(ValueError, match="look-ahead is 2"):
            backend._set_look_ahead(2)
        for site in range(2):
            tensors = data.contributions("activations", size, 700_001, torch.bfloat16, site=site)
            dist.all_reduce(tensors[rank], group=group)
            found.append(tensors[rank])
    return [tensor.view(torch.int16) for tensor in found]


def test_look_ahead_changes_no_byte():
    for without_1, without_2, with_1, with_2 in run_ranks(sums_by_look_ahead, 2):
        assert torch.equal(without_1, with_1) and torch.equal(without_2, with_2)
