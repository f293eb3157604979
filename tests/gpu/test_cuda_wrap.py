"""Counters of groups over peer memory of CUDA devices past the end of what tickets hold of them: calls and replays of a
graph recorded before, byte for byte those of a group that counts from 0. tests/cpp/cuda_peer_test.cu does the same
without torch, also emulated on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_peer import peer_group, use_gpu
from torch import Tensor

TICKET_END = 1 << 32
SIZES = (3_000_000, 40_000, 3_000_000, 1000)
PASSES = 12
CALLS_BEFORE = 5  # of a group, until its calls reach the end: not at the start of a pass


def one_pass(group: Any, tensors: list[Tensor]) -> None:
    import echo_pg

    echo_pg.new_pass("forward", group)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def run_wrap(rank: int, size: int, replayed: bool, tiles_before: int, options: dict[str, Any]) -> int:
    """How many elements differ from those of a twin."""
    import echo_pg
    from echo_pg import build

    testing = build.extension().testing
    use_gpu(rank)
    # Little room, hence many tiles for a lane in a call.
    wraps, twin = (peer_group(workspace_bytes=4 << 20, **options) for _ in range(2))
    device = torch.device("cuda", torch.cuda.current_device())
    static = [torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for numel in SIZES]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for group in (wraps, twin):
            one_pass(group, [tensor.clone() for tensor in static])
    graph = torch.cuda.CUDAGraph()
    if replayed:
        with torch.cuda.graph(graph, stream=stream):
            one_pass(wraps, static)
    torch.cuda.synchronize()
    dist.barrier()  # no call is under way
    backend = wraps._get_backend(device)
    testing.count_from(backend, device, TICKET_END - tiles_before, TICKET_END - CALLS_BEFORE)
    assert testing.counters(backend, device) == (TICKET_END - tiles_before, TICKET_END - CALLS_BEFORE)
    dist.barrier()
    generator = torch.Generator("cuda").manual_seed(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.stream(stream):
        for turn in range(PASSES):
            given = [torch.randn(numel, generator=generator, device="cuda").bfloat16() for numel in SIZES]
            expected = [tensor.clone() for tensor in given]
            one_pass(twin, expected)
            if replayed and turn % 4 != 3:
                for tensor, values in zip(static, given, strict=True):
                    tensor.copy_(values)
                graph.replay()
                actual = static
            else:
                actual = [tensor.clone() for tensor in given]
                one_pass(wraps, actual)
            for x, y in zip(actual, expected, strict=True):
                wrong += (x.view(torch.int16) != y.view(torch.int16)).sum()
    torch.cuda.synchronize()
    tiles, calls = testing.counters(backend, device)
    assert tiles > TICKET_END and calls == TICKET_END - CALLS_BEFORE + PASSES * len(SIZES), (tiles, calls)
    assert testing.counters(twin._get_backend(device), device)[1] == (PASSES + 1) * len(SIZES)
    assert echo_pg.stats(wraps)["fault"] == echo_pg.stats(twin)["fault"] == ""
    return int(wrong.item())


# The end falls into the first call, in the middle of its tiles, or into a later one; with an exchange of max|x|, which
# waits for the tickets that calls have of their own, and without.
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("tiles_before", [1, 3, 21])
def test_counters_may_wrap(replayed: bool, tiles_before: int) -> None:
    for options in ({}, {"rescale": "on"}):
        assert run_ranks(run_wrap, 2, replayed, tiles_before, options, timeout=200) == [0, 0], options
