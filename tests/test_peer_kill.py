"""Ranks on peer memory that are killed at a chosen point of the protocol, of group creation or of destruction.

Whatever the point, each survivor has only right results, then an error that names the dead rank within seconds and not
at the time-out; nothing is left in shared memory, and a new group of the survivors works. `--kills N` sets how many.
"""

from __future__ import annotations

import gc
import os
import random
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from held import held
from ranks import RankError, run_ranks
from test_backend import contribution

NOTICED = 5.0  # seconds after which survivors must know, however long the time-out
TIMEOUT = 60.0
CALLS = 3
# With groups of 1024 and 8 bits, four tiles and more for each of three ranks.
NUMEL = 600_000
STEPS = ("created", "mapped", "begun", "pushed", "reduced", "gather seen", "ended", "closing")


class Kill(NamedTuple):
    size: int
    rank: int
    step: str
    call: int
    tile: int


def choose_kill(number: int) -> Kill:
    """Every step in turn, with two ranks and three in turn; the rest by chance, the same in each run."""
    chance = random.Random(number)
    size = 2 + number // len(STEPS) % 2
    step = STEPS[number % len(STEPS)]
    in_call = step in ("begun", "pushed", "reduced", "gather seen", "ended")
    in_tile = step in ("pushed", "reduced", "gather seen")
    return Kill(size, chance.randrange(size), step, chance.randrange(CALLS) * in_call, chance.randrange(4) * in_tile)


def new_group(fabric: str, ranks: list[int] | None = None) -> Any:
    import echo_pg

    options = echo_pg.Options(
        policy="all", min_bytes=0, fabric=fabric, group_size=1024, bits=8, workspace_bytes=4 << 20, timeout=TIMEOUT
    )
    return dist.new_group(
        ranks,
        backend="echo",
        pg_options=options,
        timeout=timedelta(seconds=TIMEOUT),
        use_local_synchronization=ranks is not None,
    )


def results(group: Any, rank: int) -> list[torch.Tensor]:
    tensors = [contribution(rank, NUMEL, seed=call) for call in range(CALLS)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


def error_of(tensor: torch.Tensor, group: Any) -> str:
    """The error of an all-reduce, empty if there is none."""
    try:
        dist.all_reduce(tensor, group=group)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def run_kill(rank: int, size: int, kill: Kill) -> None:
    from echo_pg import build

    exact = new_group("wire")
    expected = results(exact, rank)
    dist.destroy_process_group(exact)
    del exact
    before = held()
    group = new_group("peer")
    if rank == kill.rank:
        build.extension().testing.fail_at(
            group._get_backend(torch.device("cpu")), kill.step, call=kill.call, tile=kill.tile
        )
        results(group, rank)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        raise AssertionError(f"nothing reached {kill}")

    text = ""
    for call in range(CALLS + 1):
        tensor = contribution(rank, NUMEL, seed=call)
        start = time.monotonic()
        text = error_of(tensor, group)
        seconds = time.monotonic() - start
        if text:
            break
        assert torch.equal(tensor.view(torch.int16), expected[call].view(torch.int16)), call
    assert f"the process of rank {kill.rank} has exited" in text and seconds < NOTICED, (text, seconds)
    if kill.step in ("created", "mapped"):
        assert torch.equal(tensor, contribution(rank, NUMEL)), "no exchange began"
    else:
        assert tensor.isnan().all()

    start = time.monotonic()
    assert "does not resume" in error_of(contribution(rank), group) and time.monotonic() - start < 1
    dist.destroy_process_group(group)
    del group
    assert not (grown := held() - before), grown  # smaller by the sockets of the dead rank
    survivors = [other for other in range(size) if other != kill.rank]
    group = new_group("auto", survivors)
    again = results(group, rank)
    if len(survivors) == 1:
        assert all(torch.equal(x, contribution(rank, NUMEL, seed=call)) for call, x in enumerate(again))
    else:
        for call, tensor in enumerate(again):
            exact_sum = sum(contribution(other, NUMEL, seed=call).float() for other in survivors)
            # Two quantizations to 255 levels of groups that span less than 12, and feedback of as much.
            assert (tensor.float() - exact_sum).abs().max() < 4 * 3 * 12 / 255
    dist.destroy_process_group(group)


def name_of(kill: Kill) -> str:
    return f"{kill.step.replace(' ', '_')}-call{kill.call}-tile{kill.tile}-rank{kill.rank}of{kill.size}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill" in metafunc.fixturenames:
        kills = [choose_kill(number) for number in range(metafunc.config.getoption("--kills"))]
        metafunc.parametrize("kill", kills, ids=name_of)


def test_a_killed_rank(kill: Kill) -> None:
    files = set(os.listdir("/dev/shm"))
    outcomes = run_ranks(run_kill, kill.size, kill, check=False, timeout=40)
    dead = outcomes.pop(kill.rank)
    assert isinstance(dead, RankError) and "exit code -9" in str(dead), dead
    assert outcomes == [None] * (kill.size - 1), "\n".join(map(str, outcomes))
    assert set(os.listdir("/dev/shm")) <= files


def run_late(rank: int, size: int) -> None:
    group = new_group("peer")
    results(group, rank)
    if rank == 2:
        os.kill(os.getpid(), 9)
    if rank == 1:
        time.sleep(2 * NOTICED)
    start = time.monotonic()
    text = error_of(contribution(rank), group)
    assert "the process of rank 2 has exited" in text and time.monotonic() - start < NOTICED, text


def test_a_dead_rank_is_noticed_while_another_is_late() -> None:
    outcomes = run_ranks(run_late, 3, check=False)
    assert outcomes[:2] == [None, None] and isinstance(outcomes[2], RankError), outcomes


def run_early_end(rank: int, size: int) -> None:
    """Rank 1 ends before its group's first call: nobody has its slab yet."""
    group = new_group("peer")
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    text = error_of(contribution(rank), group)
    assert "the process of rank 1 has exited" in text and time.monotonic() - start < NOTICED, text


def test_a_rank_that_ends_before_the_first_call() -> None:
    outcomes = run_ranks(run_early_end, 3, check=False)
    assert outcomes[0] is outcomes[2] is None and isinstance(outcomes[1], RankError), outcomes
