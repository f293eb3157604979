"""A process that ends while its connections stay: a child that it had forked, as DataLoader's workers are, holds them.
Gloo then hears of nothing before its time-out; echo's calls, and those that it forwards, watch the process itself."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_backend import contribution, is_close

TIMEOUT = 60.0  # seconds, of the groups: nothing here may take anywhere near that long
AT_MOST = 5.0


def end_and_leave_a_child(done: Path) -> None:
    """The child lives until the file is there."""
    if os.fork() == 0:
        deadline = time.monotonic() + TIMEOUT
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    os._exit(3)


def run_survivors(rank: int, size: int, kind: str, folder: str) -> tuple[str, float, float]:
    """The error, after how long it came, and how long the end of the failed group took."""
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric="wire", diagnostics=kind == "diagnostics")
    group = dist.new_group(backend="echo", timeout=timedelta(seconds=TIMEOUT), pg_options=options)

    def call() -> None:
        tensor = contribution(rank)
        dist.all_reduce(tensor.double() if kind == "forwarded" else tensor, group=group)

    call()
    if rank == size - 1:
        end_and_leave_a_child(Path(folder, "done"))
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    failed = time.monotonic()
    text = str(caught.value)
    del caught  # holds the call's Work
    dist.destroy_process_group(group)
    ended = time.monotonic()
    survivors: Any = dist.new_group(range(size - 1), backend="echo", pg_options=options, use_local_synchronization=True)
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=survivors)
    assert is_close(tensor, size - 1)
    Path(folder, f"done.{rank}").touch()
    if all(Path(folder, f"done.{other}").exists() for other in range(size - 1)):
        Path(folder, "done").touch()
    return text, failed - start, ended - failed


@pytest.mark.parametrize("kind", ["forwarded", "quantized", "diagnostics"])
def test_a_process_that_ended_is_noticed_though_its_connections_stay(kind: str, tmp_path: Path) -> None:
    outcomes = run_ranks(run_survivors, 3, kind, str(tmp_path), check=False, timeout=45)
    (tmp_path / "done").touch()
    for rank, outcome in enumerate(outcomes[:2]):
        assert isinstance(outcome, tuple), outcome
        text, seconds, ending = outcome
        assert f"rank {rank} of 3" in text and "the process of rank 2 has exited" in text, text
        assert seconds < AT_MOST and ending < AT_MOST, (seconds, ending, text)
