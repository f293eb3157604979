"""The backend against the reference, byte for byte, through the public surface alone: all_reduce over real processes.

Rows of a pairwise covering array, each a group of its own with a pass of 60 sites with feedback and a second, shorter
pass. Ranks report a digest of every result; rank 0 also reports the results, so that the first difference can be named.
"""

from __future__ import annotations

import hashlib
from typing import Any

import covering
import data
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from torch import Tensor

SITES = (60, 7)  # of the first and of the second pass
# Each row meets them all; "broken" comes last, since its NaN hide what follows in the same elements.
KINDS = [kind for kind in data.KINDS if kind not in ("broken", "huge")]


def kind_of(site: int, sites: int) -> str:
    if site >= sites - 2:
        return "huge" if site == sites - 2 else "broken"
    return "activations" if site % 2 == 0 else KINDS[site // 2 % len(KINDS)]


def inputs(row: dict[str, Any], pass_index: int, site: int) -> list[Tensor]:
    dtype = getattr(torch, row["dtype"])
    kind = kind_of(site, SITES[pass_index])
    return data.contributions(kind, row["size"], covering.numel_of(row), dtype, seed=pass_index, site=site)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def run_row(
    rank: int, size: int, row: dict[str, Any], fabric: str, device: str
) -> tuple[list[str], list[Tensor], dict[str, Any]]:
    import echo_pg

    options = echo_pg.Options(
        policy="all",
        min_bytes=0,
        dtypes=("float32", "bfloat16", "float16"),
        fabric=fabric,
        allow_shared_gpu=device == "cuda",
        **covering.options_of(row),
    )
    group = dist.new_group(list(range(size)), backend="echo", pg_options=options)
    digests, results = [], []
    for pass_index, sites in enumerate(SITES):
        with torch.no_grad():
            echo_pg.new_pass(row["direction"], group)
            for site in range(sites):
                tensor = inputs(row, pass_index, site)[rank].to(device)
                dist.all_reduce(tensor, group=group)
                tensor = tensor.cpu()
                digests.append(digest(tensor))
                if rank == 0:
                    results.append(tensor)
    stats = echo_pg.stats(group)
    dist.destroy_process_group(group)
    return digests, results, stats


def run_rows(rank: int, size: int, rows: list[dict[str, Any]], fabric: str, device: str = "cpu") -> list[Any]:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return [run_row(rank, size, row, fabric, device) for row in rows]


def first_difference(actual: Tensor, expected: Tensor) -> str:
    a, e = (t.contiguous().view(-1).view(torch.uint8).view(t.numel(), -1) for t in (actual, expected))
    element = int((a != e).any(1).nonzero()[0])
    byte = int((a[element] != e[element]).nonzero()[0])
    return f"element {element} byte {byte}: got {actual.view(-1)[element]}, expected {expected.view(-1)[element]}"


def check_row(row: dict[str, Any], outcomes: list[Any], fabric: str) -> None:
    group = RefGroup(row["size"], **covering.options_of(row))
    _, results, stats = outcomes[0]
    for rank, outcome in enumerate(outcomes):
        assert outcome[0] == outcomes[0][0], f"rank {rank} holds other bytes than rank 0: {row}"
    index = 0
    for pass_index, sites in enumerate(SITES):
        group.new_pass(row["direction"])
        for site in range(sites):
            expected = group.all_reduce(inputs(row, pass_index, site), row["direction"], no_grad=True).output
            if digest(expected) != outcomes[0][0][index]:
                pytest.fail(f"pass {pass_index} site {site}, {first_difference(results[index], expected)}, {row}")
            index += 1
    assert stats["calls_quantized"] == sum(SITES), f"{stats['forwarded']}: {row}"
    assert (stats["fabric"], stats["fabric_reason"]) == (fabric, "")


@pytest.mark.parametrize("fabric", ("wire", "peer"))
@pytest.mark.parametrize("size", covering.FACTORS["size"])
def test_every_pair_of_options_equals_the_reference(size: int, fabric: str) -> None:
    rows = [row for row in covering.pairwise() if row["size"] == size]
    assert rows
    outcomes = run_ranks(run_rows, size, rows, fabric, timeout=280)
    for index, row in enumerate(rows):
        check_row(row, [outcome[index] for outcome in outcomes], fabric)


def run_shapes(rank: int, size: int) -> list[tuple[str, list[int], Tensor]]:
    """Tensors that are not a flat, aligned, contiguous piece of memory; the result must land in them all the same."""
    import echo_pg

    group = dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0))
    base = data.contributions("activations", size, 4096, torch.bfloat16)[rank]
    found = []
    for name, view in views(base).items():
        echo_pg.new_pass("forward", group)
        dist.all_reduce(view, group=group)
        found.append((name, list(view.shape), view.clone()))
    return found


def views(base: Tensor) -> dict[str, Tensor]:
    storage = torch.zeros(4096 + 8, dtype=base.dtype)
    unaligned = storage[1:4097]
    unaligned.copy_(base)
    return {
        "scalar": base[0].clone(),
        "four dimensions": base.clone().view(2, 4, 8, 64),
        "transposed": base.clone().view(64, 64).t(),
        "strided": base.clone().view(64, 64)[::2, ::3],
        "unaligned": unaligned,
        "channels last": base.clone().view(2, 8, 16, 16).to(memory_format=torch.channels_last),
    }


def test_any_shape_stride_and_alignment() -> None:
    size = 3
    outcomes = run_ranks(run_shapes, size, timeout=120)
    inputs_by_rank = [views(x) for x in data.contributions("activations", size, 4096, torch.bfloat16)]
    for index, (name, shape, _) in enumerate(outcomes[0]):
        expected = RefGroup(size).all_reduce([views_of[name].reshape(-1) for views_of in inputs_by_rank]).output
        for outcome in outcomes:
            actual = outcome[index][2]
            assert list(actual.shape) == shape == list(inputs_by_rank[0][name].shape)
            assert digest(actual.reshape(-1)) == digest(expected), name
