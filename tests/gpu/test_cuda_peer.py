"""CUDA tensors over peer memory: against the reference byte for byte, on streams, and recorded into graphs.

Ranks beyond the number of GPUs share them: kernels that wait for each other then take turns, which is slow and correct.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import covering
import data
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from test_allreduce import check_row, digest, run_rows
from torch import Tensor

GPUS = torch.cuda.device_count()
OWN_GPU = [size for size in covering.FACTORS["size"] if size <= GPUS]
SHARED_GPU = [size for size in covering.FACTORS["size"] if size > GPUS]
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def use_gpu(rank: int) -> None:
    torch.cuda.set_device(rank % GPUS)


def peer_group(timeout: float = 60, **options: Any) -> Any:
    import echo_pg

    settings: dict[str, Any] = {"policy": "all", "min_bytes": 0, "fabric": "peer", "allow_shared_gpu": True} | options
    return dist.new_group(backend="echo", timeout=timedelta(seconds=timeout), pg_options=echo_pg.Options(**settings))


def contribution(rank: int, size: int, numel: int, seed: int, site: int) -> Tensor:
    return data.contributions("activations", size, numel, torch.bfloat16, seed=seed, site=site)[rank]


@pytest.mark.parametrize("size", OWN_GPU)
def test_every_pair_of_options_equals_the_reference(size: int) -> None:
    # Rows made for more ranks than there are GPUs run here too, over as many as there are.
    rows = [row | {"size": size} for row in covering.pairwise() if row["size"] == size or row["size"] not in OWN_GPU]
    check_rows(size, rows)


@pytest.mark.parametrize("size", SHARED_GPU)
def test_ranks_that_share_gpus_equal_the_reference(size: int) -> None:
    rows = [row for row in covering.pairwise() if row["size"] == size]
    check_rows(size, rows[:: max(1, len(rows) // 6)])


def check_rows(size: int, rows: list[dict[str, Any]]) -> None:
    outcomes = run_ranks(run_rows, size, rows, "peer", "cuda", timeout=280, group_timeout=60)
    for index, row in enumerate(rows):
        check_row(row, [outcome[index] for outcome in outcomes], "peer")


def run_large(rank: int, size: int, numel: int, sites: int) -> list[str]:
    """Little room, hence many tiles per lane: every slot of the rings is used again and again."""
    use_gpu(rank)
    group = peer_group(workspace_bytes=4 << 20)
    found = []
    for site in range(sites):
        tensor = contribution(rank, size, numel, 0, site).cuda()
        dist.all_reduce(tensor, group=group)
        found.append(digest(tensor.cpu()))
    return found


def test_tensors_of_many_tiles() -> None:
    size, numel, sites = 2, 5_000_003, 3
    outcomes = run_ranks(run_large, size, numel, sites, timeout=200)
    group = RefGroup(size)
    for site in range(sites):
        given = data.contributions("activations", size, numel, torch.bfloat16, site=site)
        expected = digest(group.all_reduce(given).output)
        assert [outcome[site] for outcome in outcomes] == [expected] * size, site


def run_hidden_devices(rank: int, size: int) -> str:
    """Each rank sees its own GPU only, as launchers arrange it: only trying tells that they reach each other."""
    import echo_pg

    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    group = peer_group()
    tensor = contribution(rank, size, 5000, 0, 0).cuda()
    dist.all_reduce(tensor, group=group)
    assert echo_pg.stats(group)["fabric"] == "peer"
    return digest(tensor.cpu())


@needs_two_gpus
def test_ranks_that_see_one_gpu_each() -> None:
    given = data.contributions("activations", 2, 5000, torch.bfloat16)
    expected = digest(RefGroup(2).all_reduce(given).output)
    assert run_ranks(run_hidden_devices, 2, timeout=100) == [expected] * 2


# ---- streams --------------------------------------------------------------------------------------------------------

STEPS = 5


def run_streams(rank: int, size: int, numel: int) -> list[str]:
    """Two groups on three streams and their own, with tensors that are freed while the call still runs."""
    use_gpu(rank)
    one, two = peer_group(), peer_group()
    side = torch.cuda.Stream()
    found = []
    for step in range(STEPS):
        a, b, c, d, e = (contribution(rank, size, numel, seed, step).cuda() for seed in range(5))
        side.wait_stream(torch.cuda.current_stream())
        dist.all_reduce(a, group=one)
        with torch.cuda.stream(side):
            dist.all_reduce(b, group=two)
        third = dist.all_reduce(c, group=one, async_op=True)
        fourth = dist.all_reduce(d, group=two, async_op=True)
        with torch.cuda.stream(side):
            third.wait()
            c_seen = c.clone()
        fourth.wait()
        torch.cuda.current_stream().wait_stream(side)
        # The memory of `e` may serve others only once the call is done, or its errors would be fed back wrongly.
        dist.all_reduce(e, group=one, async_op=True)
        del e
        others = [torch.full((numel,), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        found += [digest(x.cpu()) for x in (a, b, c_seen, d)]
        assert all(bool((x == 7.0).all()) for x in others)
    return found


def test_streams_and_groups() -> None:
    size, numel = 2, 1_000_001
    outcomes = run_ranks(run_streams, size, numel, timeout=200)
    one, two = RefGroup(size), RefGroup(size)
    index = 0
    for step in range(STEPS):
        for seed, group in ((0, one), (1, two), (2, one), (3, two), (4, one)):
            given = data.contributions("activations", size, numel, torch.bfloat16, seed=seed, site=step)
            # A call that is waited for, or whose Work is gone, frees its lane.
            expected = group.all_reduce(given).output
            if seed == 4:
                continue
            assert [outcome[index] for outcome in outcomes] == [digest(expected)] * size, (step, seed)
            index += 1


def run_works(rank: int, size: int) -> None:
    import echo_pg

    use_gpu(rank)
    group = peer_group()
    tensor = contribution(rank, size, 5000, 0, 0).cuda()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.wait(timedelta(seconds=30)) and work.is_completed() and work.is_success()
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    once = tensor.clone()
    doubled = dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()
    assert torch.equal(doubled, tensor * 2) and not torch.equal(once, tensor)
    if rank == 1:
        torch.cuda._sleep(4_000_000_000)  # two seconds or so
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with pytest.raises(dist.DistBackendError, match="it goes on"):
        work.wait(timedelta(seconds=0.2))
    work.wait()
    assert not tensor.isnan().any()
    stats = echo_pg.stats(group)
    assert (stats["calls_quantized"], stats["fabric"], stats["fault"]) == (3, "peer", "")


def test_works() -> None:
    run_ranks(run_works, 2, timeout=100)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def run_graph(rank: int, size: int, replays: int, direct: bool) -> tuple[int, str]:
    """Replays of a recorded pass, mixed with eager ones, against a twin group that never heard of graphs; `direct`: by
    echo_pg.all_reduce, as engines call it, which asks no policy."""
    import echo_pg

    use_gpu(rank)
    recorded, twin = (peer_group(policy="off" if direct else "all") for _ in range(2))
    reduce = echo_pg.all_reduce if direct else dist.all_reduce
    sizes = (40_000, 40_000, 1000, 333_333, 40_000)
    static = [torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for numel in sizes]

    def one_pass(group: Any, tensors: list[Tensor]) -> None:
        echo_pg.new_pass("forward", group)
        for site, tensor in enumerate(tensors):
            work = reduce(tensor, group=group, async_op=site % 2 == 1)
            if work is not None:
                work.wait()

    stream = torch.cuda.Stream()
    generator = torch.Generator("cuda").manual_seed(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        one_pass(recorded, static)
        one_pass(twin, [tensor.clone() for tensor in static])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one_pass(recorded, static)
    with torch.cuda.stream(stream):
        for turn in range(replays):
            given = [torch.randn(numel, generator=generator, device="cuda").bfloat16() for numel in sizes]
            expected = [tensor.clone() for tensor in given]
            one_pass(twin, expected)
            if turn % 7 == 3:
                actual = [tensor.clone() for tensor in given]
                one_pass(recorded, actual)
            else:
                for tensor, values in zip(static, given, strict=True):
                    tensor.copy_(values)
                graph.replay()
                actual = static
            for x, y in zip(actual, expected, strict=True):
                wrong += (x.view(torch.int16) != y.view(torch.int16)).sum()
        found = int(wrong.item()), digest(torch.cat(static).cpu())
    assert echo_pg.stats(recorded)["fault"] == ""
    dist.destroy_process_group(recorded)
    others = torch.full((4_000_000,), 7, dtype=torch.uint8, device="cuda")  # where the group's memory might have been
    graph.replay()
    torch.cuda.synchronize()
    assert bool((others == 7).all()), "a replay after the end of its group touches no memory but its own"
    return found


@pytest.mark.parametrize("direct", [False, True])
def test_a_recorded_pass_replayed_many_times(direct: bool) -> None:
    replays = 1000 if GPUS > 1 else 100  # ranks that take turns on a GPU need milliseconds per call
    first, second = run_ranks(run_graph, 2, replays, direct, timeout=200)
    assert first[0] == second[0] == 0, "elements that differ from the eager twin"
    assert first[1] == second[1]


def run_unprepared(rank: int, size: int) -> list[str]:
    """What a recording cannot hold is refused, and both the recording and the group go on."""
    use_gpu(rank)
    group = peer_group(rotation="none")  # then equal elements are on the grid
    said = []
    for numel in (3000, 30_000_000):  # the first call of the group; a state for which no memory is there
        tensor = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
        other = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other += 1
            try:
                dist.all_reduce(tensor, group=group)
            except RuntimeError as error:
                said.append(str(error))
        graph.replay()
        assert other.tolist() == [1.0] * 4
        dist.all_reduce(tensor, group=group)
        assert (tensor.float() - size).abs().max() < 0.1
    return said


def test_recording_without_a_warm_up_is_refused() -> None:
    for said in run_ranks(run_unprepared, 2, timeout=100):
        assert len(said) == 2 and all("warm-up pass" in text for text in said), said
        assert "first quantized all_reduce" in said[0] and "state" in said[1]
