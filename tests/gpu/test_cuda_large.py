"""A tensor of more than 4 Gi elements on CUDA devices: right in the places where 31 or 32 bits of an index end, at the
ends of the tensor and of the ranks' segments, and zero wherever every rank gave zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from test_cuda_peer import GPUS, use_gpu
from torch import Tensor

GROUP = 128  # elements, as shipped
SPOT = 32 * GROUP  # elements looked at in each place, whole groups of one owner
NUMEL = (1 << 32) + (1 << 20) + 77
MARKS = (1 << 31, 1 << 32)
SITES = 2  # the second one with the state that the first one left
GIB = 1 << 30


def places(numel: int, marks: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first element, owner) of what is looked at, of two ranks."""
    groups = -(-numel // GROUP)
    boundary = -(-groups // 2) * GROUP
    starts = [0, *(mark - SPOT // 2 for mark in marks), boundary - SPOT, boundary, (groups - 32) * GROUP]
    found = [(start, 0 if start < boundary else 1) for start in starts]
    assert all(start + SPOT <= boundary for start, owner in found if owner == 0), "a place has one owner"
    assert all(
        second - first >= SPOT for (first, _), (second, _) in zip(sorted(found), sorted(found)[1:], strict=False)
    )
    return found


def content(rank: int, index: int, site: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * site + 100 * rank + index)
    return torch.randn(numel, generator=generator).bfloat16()


def run_large(rank: int, size: int, numel: int, marks: tuple[int, ...], options: dict[str, Any]) -> list[list[Tensor]]:
    """What is delivered in the places, by site. On a CPU where there is no GPU, for tensors that fit one."""
    import echo_pg

    if GPUS:
        use_gpu(rank)
    chosen = echo_pg.Options(
        policy="all", min_bytes=0, fabric="peer", timeout=240.0, allow_shared_gpu=GPUS > 0, **options
    )
    group = dist.new_group(backend="echo", pg_options=chosen)
    tensor = torch.zeros(numel, dtype=torch.bfloat16, device="cuda" if GPUS else "cpu")
    found = []
    for site in range(SITES):
        tensor.zero_()
        spots = [tensor[start : start + SPOT] for start, _ in places(numel, marks)]
        for index, spot in enumerate(spots):
            spot.copy_(content(rank, index, site, len(spot)))
        dist.all_reduce(tensor, group=group)
        found.append([spot.cpu().clone() for spot in spots])
        nonzero = sum(int(torch.count_nonzero(part)) for part in tensor.split(1 << 28))
        assert nonzero == sum(int(torch.count_nonzero(spot)) for spot in spots), "a number where all gave zeros"
    stats = echo_pg.stats(group)
    assert (stats["bytes_quantized"], stats["fault"]) == (2 * SITES * numel, "")
    return found


def expected(index: int, owner: int, numel: int, options: dict[str, Any]) -> list[Tensor]:
    """By site, of a place: the reference's result where the place is one rank's segment, zeros the other's."""
    group = RefGroup(2, **options)
    results = []
    for site in range(SITES):
        given = [content(rank, index, site, numel) for rank in range(2)]
        zeros = torch.zeros(SPOT).bfloat16()
        both = [torch.cat((x, zeros) if owner == 0 else (zeros, x)) for x in given]
        output = group.all_reduce(both).output
        results.append(output[:numel] if owner == 0 else output[SPOT:])
    return results


def check_large(numel: int, marks: tuple[int, ...], options: dict[str, Any]) -> None:
    outcomes = run_ranks(run_large, 2, numel, marks, options, timeout=280, group_timeout=240)
    for index, (start, owner) in enumerate(places(numel, marks)):
        right = expected(index, owner, min(SPOT, numel - start), options)
        for rank, found in enumerate(outcomes):
            for site in range(SITES):
                same = torch.equal(found[site][index].view(torch.int16), right[site].view(torch.int16))
                assert same, f"element {start} on, owner {owner}, site {site}, on rank {rank}"


# As shipped, with one average in int8; with the sum's errors, whose averages an update after the call brings up to
# date; and without any state.
OPTIONS = {"shipped": {}, "group": {"residual": "group", "state_dtype": "int8"}, "plain": {"feedback": False}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_more_than_4_gi_elements_are_summed_like_any_others(options: dict[str, Any]) -> None:
    # A tensor and, with feedback, its state and what a call keeps for the update.
    needed = (24 if options.get("feedback", True) else 9) * GIB * (1 if GPUS > 1 else 2)
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB on a GPU, {free >> 30} are free")
    check_large(NUMEL, MARKS, options)
