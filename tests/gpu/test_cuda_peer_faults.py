"""Peer memory of CUDA devices when ranks are late, gone, in another call, or out of memory: an error that names the
rank, never a hang, never a wrong number, and a process that goes on using its GPU."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from test_cuda_peer import contribution, needs_two_gpus, peer_group, use_gpu
from test_faults import error_of

TIMEOUT = 4.0  # seconds, of the groups under test
NUMEL = 100_000


def good_call(rank: int, size: int, group: Any) -> None:
    tensor = contribution(rank, size, NUMEL, 0, 0).cuda()
    dist.all_reduce(tensor, group=group)
    assert not tensor.isnan().any()


def failing_call(group: Any, numel: int = NUMEL) -> tuple[str, float]:
    """A call that cannot succeed: its result is NaN. Returns the error of the next call, and after how long."""
    start = time.monotonic()
    tensor = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(tensor, group=group, async_op=True)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    assert tensor.isnan().all(), "never a number that is no sum"
    text, _ = error_of(lambda: dist.all_reduce(tensor, group=group))
    check_that_the_process_goes_on(group)
    return text, seconds


def check_that_the_process_goes_on(group: Any) -> None:
    import echo_pg

    assert (torch.ones(1, device="cuda") + 1).item() == 2
    assert echo_pg.stats(group)["fault"]
    start = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - start < 2, "the end of a failed group must not wait"


def run_late(rank: int, size: int) -> tuple[str, float]:
    use_gpu(rank)
    group = peer_group(TIMEOUT)
    good_call(rank, size, group)
    if rank == 1:
        time.sleep(2.5 * TIMEOUT)
    return failing_call(group)


def test_a_rank_that_is_late() -> None:
    (text, seconds), (other_text, _) = run_ranks(run_late, 2, timeout=100)
    assert "rank 1" in text and TIMEOUT - 1 < seconds < 2 * TIMEOUT, (text, seconds)
    assert "does not resume" in other_text, "a rank that comes late learns that the others have given up"


def run_killed(rank: int, size: int) -> tuple[str, float]:
    use_gpu(rank)
    group = peer_group(120)
    good_call(rank, size, group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failing_call(group)


def test_a_rank_that_is_killed() -> None:
    results = run_ranks(run_killed, 2, timeout=100, check=False)
    assert isinstance(results[1], RankError) and "-9" in str(results[1])
    assert not isinstance(results[0], RankError), results[0]
    text, seconds = results[0]
    assert "rank 1" in text and "exited" in text and seconds < 5, (text, seconds)


def run_replay_alone(rank: int, size: int) -> tuple[str, float]:
    import echo_pg

    use_gpu(rank)
    group = peer_group(120, rotation="none")  # then equal elements are on the grid
    good_call(rank, size, group)
    echo_pg.new_pass("forward", group)  # the errors of the call above shall not come back
    tensor = torch.zeros(NUMEL, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=group)
    tensor.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (tensor.float() - size).abs().max() < 0.1
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    assert tensor.isnan().all()
    graph.replay()  # returns at once
    torch.cuda.synchronize()
    text, _ = error_of(lambda: dist.all_reduce(tensor, group=group))
    check_that_the_process_goes_on(group)
    return text, seconds


def test_a_replay_that_meets_a_dead_peer() -> None:
    outcome = run_ranks(run_replay_alone, 2, timeout=100, check=False)[0]
    assert not isinstance(outcome, RankError), outcome
    text, seconds = outcome
    assert "rank 1" in text and seconds < 5, (text, seconds)


def run_mismatch(rank: int, size: int) -> tuple[str, float]:
    use_gpu(rank)
    group = peer_group(20)
    good_call(rank, size, group)
    return failing_call(group, numel=3000 if rank == 0 else 2000)


def test_ranks_in_different_calls() -> None:
    for text, seconds in run_ranks(run_mismatch, 2, timeout=100):
        assert "3000" in text and "2000" in text and seconds < 5, (text, seconds)


def run_abort(rank: int, size: int) -> tuple[str, float]:
    """Rank 1 aborts while no call of it is under way; rank 0, whose kernel waits, learns it from the notice board."""
    use_gpu(rank)
    group = peer_group(120)
    good_call(rank, size, group)
    if rank == 0:
        return failing_call(group)
    time.sleep(1)
    start = time.monotonic()
    group._get_backend(torch.device("cuda")).abort()
    assert time.monotonic() - start < 2
    time.sleep(3)
    return "", 0.0


def test_an_abort_reaches_ranks_that_wait() -> None:
    text, seconds = run_ranks(run_abort, 2, timeout=100)[0]
    assert "rank 1: the group was aborted" in text and seconds < 4, (text, seconds)


def fill_memory(leave_bytes: int) -> list[torch.Tensor]:
    """Until at most leave_bytes + 10 MiB are free; torch asks CUDA for no smaller pieces as they are."""
    kept = []
    for chunk in (1 << 30, 10 << 20):
        while torch.cuda.mem_get_info()[0] > leave_bytes + chunk:
            kept.append(torch.empty(chunk, dtype=torch.uint8, device="cuda"))
    return kept


def run_no_room_for_state(rank: int, size: int) -> tuple[str, float]:
    use_gpu(rank)
    group = peer_group(60, state_dtype="float32")
    good_call(rank, size, group)
    tensor = torch.zeros(100_000_000, dtype=torch.bfloat16, device="cuda")
    if rank == 0:
        kept = fill_memory(64 << 20)
        text, seconds = error_of(lambda: dist.all_reduce(tensor, group=group))
        time.sleep(3)  # the other rank must hear of it while this process lives
        del kept
        return text, seconds
    return failing_call(group, numel=100_000_000)


@needs_two_gpus
def test_memory_for_the_state_that_only_one_rank_lacks() -> None:
    (text, _), (other, seconds) = run_ranks(run_no_room_for_state, 2, timeout=200)
    assert "int8" in text and "feedback=False" in text and " bytes on cuda:0" in text and "is free" in text, text
    assert "rank 0" in other and "int8" in other and seconds < 15, (other, seconds)


def run_no_room_for_slab(rank: int, size: int) -> str:
    use_gpu(rank)
    group = peer_group(60)
    kept = fill_memory(4 << 20) if rank == 0 else []
    tensor = contribution(rank, size, 3000, 0, 0).cuda()
    text, _ = error_of(lambda: dist.all_reduce(tensor, group=group))
    del kept
    torch.cuda.empty_cache()
    good_call(rank, size, peer_group(60))
    return text


@needs_two_gpus
def test_no_room_for_peer_memory() -> None:
    for text in run_ranks(run_no_room_for_slab, 2, timeout=200):
        assert "fabric='peer' was asked for" in text and "rank 0: cudaMalloc of" in text and "are free" in text, text


def run_same_gpu(rank: int, size: int) -> str:
    torch.cuda.set_device(0)
    group = peer_group(60, allow_shared_gpu=False)
    tensor = contribution(rank, size, 3000, 0, 0).cuda()
    return error_of(lambda: dist.all_reduce(tensor, group=group))[0]


def test_ranks_on_one_gpu_are_refused() -> None:
    for text in run_ranks(run_same_gpu, 2, timeout=100):
        assert "ranks 0 and 1 use one GPU" in text and "allow_shared_gpu" in text, text


def run_many_groups(rank: int, size: int, rounds: int) -> list[int]:
    use_gpu(rank)
    free = []
    for _ in range(rounds):
        group = peer_group(60)
        good_call(rank, size, group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        torch.cuda.empty_cache()
        dist.barrier()  # ranks may share the GPU, and one's slab is gone before it comes here
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
    return free


def test_groups_that_come_and_go_leave_no_memory_behind() -> None:
    for free in run_ranks(run_many_groups, 2, 20, timeout=200):
        assert free[2] == free[-1], [before - after for before, after in itertools.pairwise(free)]
