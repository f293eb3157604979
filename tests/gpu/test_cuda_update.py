"""residual="group" with the update of the state on a stream of its own: against the same steps as separate torch
operations, with a maximum absolute difference of 0, whatever the caller does with the tensor after the call.

The steps are taken in fp32, the sum by an echo group without feedback, which hands over fp32: what is added up,
quantized and delivered is then what the one call has in its registers. The state of a site shows in the next one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_peer import peer_group, use_gpu
from torch import Tensor

ETA, A, BETA1, BETA2 = 0.75, 0.35, 0.7, 0.3
NUMEL = (1 << 23) + 3 * 128 + 40  # above kDeferredUpdateBytes, with tasks that are not full and a partial group
SMALLER = (1 << 23) + 128
SITES = 4


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cuda")


class Separate:
    """One lane of the compensator in separate operations."""

    def __init__(self, size: int, averages: int, rotation: str) -> None:
        self.group = peer_group(feedback=False, rotation=rotation, dtypes=("float32",))
        self.size, self.averages = size, averages
        a = A if averages == 2 else 0.0
        self.k1, self.k2, self.k3 = (
            scalar(k) for k in (1 - BETA1, ETA * a * (BETA1 - BETA2), ETA * (a * (1 - BETA1) + (1 - a) * (1 - BETA2)))
        )
        self.beta1, self.beta2 = scalar(BETA1), scalar(BETA2)
        self.start()

    def start(self) -> None:
        self.c: Tensor | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        compensated = x.float() if self.c is None else x.float() + self.c.float()
        total = compensated.clone()
        dist.all_reduce(total, group=self.group)
        result = total.bfloat16()
        u = compensated - result.float() * scalar(1 / self.size)
        if self.c is None:
            self.c, self.m1 = (self.k3 * u).bfloat16(), (self.k1 * u).bfloat16()
            return result
        c, m1 = self.c.float(), self.m1.float()
        before = self.beta2 * c + self.k2 * m1 if self.averages == 2 else self.beta2 * c
        self.c = (before + self.k3 * u).bfloat16()
        self.m1 = (self.beta1 * m1 + self.k1 * u).bfloat16()
        return result


def fused_group(averages: int, rotation: str = "none", **options: Any) -> Any:
    return peer_group(
        residual="group",
        state_dtype="tensor",
        rotation=rotation,
        eta=ETA,
        a=A if averages == 2 else 0.0,
        beta1=BETA1,
        beta2=BETA2,
        **options,
    )


def inputs(rank: int, sites: int, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 + rank)
    return [torch.randn(numel, generator=generator, device="cuda").bfloat16() for _ in range(sites)]


def largest_difference(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).abs().max())


def kept_bytes(numel: int) -> int:
    groups = -(-numel // 128)
    up = lambda size: -(-size // 16) * 16  # noqa: E731
    return up(2 * numel) + up(groups * (64 + 4))


def assert_deferred(group: Any, numel: int) -> None:
    import echo_pg

    held = echo_pg.stats(group)["workspace_bytes"]
    small = fused_group(2)
    dist.all_reduce(torch.ones(5000, dtype=torch.bfloat16, device="cuda"), group=small)
    assert held - echo_pg.stats(small)["workspace_bytes"] == kept_bytes(numel)


# ---- what the caller does with the tensor ---------------------------------------------------------------------------


def run_caller(rank: int, size: int, then: str, averages: int) -> float:
    """Two passes; the result is copied, and the tensor then written to or freed, with nothing waited for."""
    import echo_pg

    use_gpu(rank)
    group, separate = fused_group(averages), Separate(size, averages, "none")
    worst, given = 0.0, inputs(rank, SITES)
    for _ in range(2):
        echo_pg.new_pass("forward", group)
        separate.start()
        results = []
        for x in given:
            tensor = x.clone()
            dist.all_reduce(tensor, group=group)
            results.append(tensor.clone())
            if then == "overwrites":
                tensor.fill_(float("nan"))
            else:
                del tensor
                torch.full((NUMEL,), 7.0, dtype=torch.bfloat16, device="cuda")
        for x, result in zip(given, results, strict=True):
            worst = max(worst, largest_difference(result, separate.all_reduce(x)))
    assert_deferred(group, NUMEL)
    return worst


@pytest.mark.parametrize("then", ["overwrites", "frees"])
@pytest.mark.parametrize("averages", [1, 2])
def test_what_the_caller_does_next_does_not_matter(then: str, averages: int) -> None:
    assert run_ranks(run_caller, 2, then, averages, timeout=200) == [0.0, 0.0]


# ---- streams --------------------------------------------------------------------------------------------------------


def run_on_streams(rank: int, size: int) -> float:
    """Sites of one lane on two streams by turns, some asynchronous, of two sizes that take turns in keeping."""
    import echo_pg

    use_gpu(rank)
    group = fused_group(2)
    separate = {numel: Separate(size, 2, "none") for numel in (NUMEL, SMALLER)}
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    given = [x for pair in zip(inputs(rank, SITES, SMALLER), inputs(rank, SITES), strict=True) for x in pair]
    torch.cuda.synchronize()
    echo_pg.new_pass("forward", group)
    results = []
    for site, x in enumerate(given):
        with torch.cuda.stream(streams[site % 2]):
            tensor = x.clone()
            work = dist.all_reduce(tensor, group=group, async_op=site % 3 == 1)
            if work is not None:
                work.wait()
            results.append(tensor.clone())
            tensor.zero_()
    torch.cuda.synchronize()
    pairs = zip(given, results, strict=True)
    return max(largest_difference(result, separate[x.numel()].all_reduce(x)) for x, result in pairs)


def test_sites_on_two_streams() -> None:
    assert run_ranks(run_on_streams, 2, timeout=200) == [0.0, 0.0]


def run_in_flight(rank: int, size: int) -> float:
    """Two calls under way at a time: lanes with states of their own."""
    import echo_pg

    use_gpu(rank)
    group = fused_group(2)
    separate = [Separate(size, 2, "none") for _ in range(2)]
    given = inputs(rank, 2 * SITES)
    echo_pg.new_pass("forward", group)
    worst = 0.0
    for site in range(SITES):
        tensors = [x.clone() for x in given[2 * site : 2 * site + 2]]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        results = [tensor.clone() for tensor in tensors]
        del tensors, works
        for lane in range(2):
            expected = separate[lane].all_reduce(given[2 * site + lane])
            worst = max(worst, largest_difference(results[lane], expected))
    return worst


def test_two_calls_in_flight() -> None:
    assert run_ranks(run_in_flight, 2, timeout=200) == [0.0, 0.0]


# ---- graphs ---------------------------------------------------------------------------------------------------------


def run_graph(rank: int, size: int) -> float:
    """Passes before, in and between replays of a graph whose recording begins while an update may still run."""
    import echo_pg

    use_gpu(rank)
    group, separate = fused_group(2), Separate(size, 2, "none")
    static = inputs(rank, SITES)
    stream = torch.cuda.Stream()
    worst = 0.0

    def one_pass(tensors: list[Tensor]) -> None:
        echo_pg.new_pass("forward", group)
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)

    def check(given: list[Tensor], results: list[Tensor]) -> None:
        nonlocal worst
        separate.start()
        for x, result in zip(given, results, strict=True):
            worst = max(worst, largest_difference(result, separate.all_reduce(x)))

    given = [x.clone() for x in static]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        one_pass(static)
        check_later = [x.clone() for x in static]
        graph.capture_begin()
        one_pass(static)
        graph.capture_end()
        check(given, check_later)
        for turn in range(6):
            given = [x * (turn + 1) for x in given]
            if turn % 3 == 2:
                results = [x.clone() for x in given]
                one_pass(results)
            else:
                for tensor, x in zip(static, given, strict=True):
                    tensor.copy_(x)
                graph.replay()
                results = [x.clone() for x in static]
            check(given, results)
    return worst


def test_a_graph_between_eager_passes() -> None:
    assert run_ranks(run_graph, 2, timeout=200) == [0.0, 0.0]


# ---- little memory --------------------------------------------------------------------------------------------------


def run_without_room(rank: int, size: int) -> float:
    """Where there is no memory to keep anything, the call updates the state itself, and the peer does not notice."""
    import echo_pg

    use_gpu(rank)
    group, separate = fused_group(2), Separate(size, 2, "none")
    given = inputs(rank, SITES)
    results = [x.clone() for x in given]
    echo_pg.new_pass("forward", group)
    dist.all_reduce(results[0], group=group)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    if rank == 0:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    for tensor in results[1:]:
        dist.all_reduce(tensor, group=group)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    held = echo_pg.stats(group)["workspace_bytes"]
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, held)
    assert everywhere[1] - everywhere[0] == kept_bytes(NUMEL)
    return max(largest_difference(y, separate.all_reduce(x)) for x, y in zip(given, results, strict=True))


def test_a_rank_without_room_updates_in_its_call() -> None:
    assert run_ranks(run_without_room, 2, timeout=200) == [0.0, 0.0]
