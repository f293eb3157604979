"""Thousands of calls of changing shapes, dtypes, directions and ways to wait, over one group that stays while groups of
other options come and go: what a rank holds stays flat. How long the host is in a call is reported, not judged."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_peer import GPUS, peer_group, use_gpu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "soak"))

import schedule
import soak

PASSES = 24  # different ones, each repeated over and over
WINDOWS = 24  # of equal length; after each a rank looks at what it holds
BURST = 50  # calls that are timed; far fewer launches than a stream takes before it holds up the host


@dataclass(frozen=True)
class Site:
    numel: int
    dtype: torch.dtype
    in_flight: bool  # waited for after the next call is made


def passes(largest_log2: int) -> list[list[Site]]:
    """The same on all ranks. The smaller half of a site's numbers lies below min_bytes, and is forwarded."""
    chance = random.Random(0)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    return [
        [
            Site(int(2 ** chance.uniform(4, largest_log2)), chance.choice(dtypes), chance.random() < 0.3)
            for _ in range(chance.randrange(1, 13))
        ]
        for _ in range(PASSES)
    ]


class NoPool:
    """What is left out of account: nothing."""

    def held_bytes(self) -> int:
        return 0

    def held_device_bytes(self) -> int:
        return 0


def run_pass(sites: list[Site], group: Any, source: torch.Tensor) -> None:
    flight: list[Any] = []
    for site in sites:
        tensor = source[: site.numel].to(site.dtype, copy=True)
        work = dist.all_reduce(tensor, group=group, async_op=site.in_flight)
        for earlier in flight:
            earlier.wait()
        flight = [work] if site.in_flight else []
    for work in flight:
        work.wait()


def come_and_go(options: dict[str, Any], source: torch.Tensor) -> None:
    other = peer_group(**options)
    run_pass([Site(3000, torch.bfloat16, False), Site(5001, torch.bfloat16, True)], other, source)
    dist.destroy_process_group(other)


def time_calls(group: Any) -> list[float]:
    """Seconds of the host in each call of a burst. Zeros add up to zeros, however often."""
    tensor = torch.zeros(1 << 16, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    seconds = []
    for _ in range(BURST):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return seconds


def run_flat(rank: int, size: int, calls: int, largest_log2: int) -> dict[str, Any]:
    import echo_pg

    use_gpu(rank)
    group = peer_group(min_bytes=4096)
    plan = passes(largest_log2)
    source = torch.randn(1 << largest_log2, generator=torch.Generator().manual_seed(rank)).cuda()
    made = turn = 0
    history: list[tuple[int, dict[str, int]]] = []
    states, host = [], []
    for window in range(WINDOWS):
        while made < calls * (window + 1) / WINDOWS or turn < PASSES:
            # Each direction has its states: both see every pass once before anything is compared.
            for direction in ("forward", "backward") if turn < PASSES else (("forward", "backward")[turn % 2],):
                echo_pg.new_pass(direction, group)
                run_pass(plan[turn % PASSES], group, source)
                made += len(plan[turn % PASSES])
            turn += 1
        come_and_go(dict(schedule.PALETTE[window % len(schedule.PALETTE)]), source)
        echo_pg.new_pass("forward", group)
        host += time_calls(group)
        # The pass after one that outgrew its storage has it in one piece, as large as the largest pass needs.
        for direction in ("forward", "backward"):
            echo_pg.new_pass(direction, group)
            run_pass(plan[0], group, source)
        made += BURST + 2 * len(plan[0])
        held = soak.settled_footprint(NoPool(), history[-1][1] if history else None)
        history.append((made, held | soak.device_footprint(size, NoPool())))
        states.append(echo_pg.stats(group)["state_bytes"])
    counted = echo_pg.stats(group)
    dist.destroy_process_group(group)
    return {
        "history": history,
        "states": states,
        "host_us": statistics.median(host) * 1e6,
        "quantized": counted["calls_quantized"],
        "forwarded": counted["calls_forwarded"],
        "fault": counted["fault"],
        "made": made,
    }


def test_what_a_rank_holds_stays_flat(record_property: Callable[[str, object], None]) -> None:
    # Ranks that take turns on a GPU need milliseconds per call, and per tile.
    calls, largest_log2 = (10_000, 21) if GPUS > 1 else (1000, 16)
    for rank, found in enumerate(run_ranks(run_flat, 2, calls, largest_log2, timeout=280)):
        record_property(f"host_us_per_call_of_rank_{rank}", round(found["host_us"], 1))
        assert found["fault"] == "" and found["made"] >= calls
        assert found["quantized"] + found["forwarded"] == found["made"], "every call is counted once"
        assert min(found["quantized"], found["forwarded"]) > calls // 10
        assert soak.growth(found["history"]) == [], found["history"]
        assert set(found["states"][1:]) == {found["states"][0]} and found["states"][0] > 0, found["states"]
        assert found["host_us"] < 10_000, "a call that is not waited for returns long before a time-out"
