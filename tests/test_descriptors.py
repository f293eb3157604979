"""A process that may open no more files: an error that says so, on every rank and long before the time-out."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_backend import contribution, is_close

TIMEOUT = 60.0  # seconds, of the groups: nothing here may take anywhere near that long
EXHAUSTED = "Too many open files"


def leave_room_for(descriptors: int) -> tuple[int, int]:
    """Lower the limit so that this process may open as many more; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Numbers are given out from below, so the limit is on the highest: fill the gaps.
    while (lowest := os.dup(0)) < len(os.listdir("/proc/self/fd")) - 2:
        pass
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + descriptors, before[1]))
    return before


def make_group(fabric: str = "auto") -> Any:
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
    return dist.new_group(backend="echo", timeout=timedelta(seconds=TIMEOUT), pg_options=options)


def run_exhausted(rank: int, size: int, port: int, moment: str, fabric: str, room: int) -> tuple[str, float]:
    """Rank 1 runs out of descriptors. What each rank is told, and after how long."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    group = make_group(fabric) if moment == "first call" else None
    dist.barrier()
    before = leave_room_for(room) if rank == 1 else None
    start = time.monotonic()
    with pytest.raises((dist.DistBackendError, OSError)) as caught:
        if group is None:
            make_group(fabric)
        else:
            dist.all_reduce(contribution(rank), group=group)
    seconds = time.monotonic() - start
    if before:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    text = str(caught.value)
    del caught
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=make_group(fabric))
    assert is_close(tensor, size)
    return text, seconds


@pytest.mark.parametrize(
    ("moment", "fabric", "room"),
    [("creation", "auto", 2), ("first call", "auto", 0), ("first call", "wire", 0), ("first call", "wire", 2)],
)
def test_no_descriptors_left_is_said_on_every_rank(moment: str, fabric: str, room: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (text, seconds) in enumerate(
        run_ranks(run_exhausted, 2, server.port, moment, fabric, room, backend=None, timeout=100)
    ):
        assert EXHAUSTED in text and seconds < 10, (rank, seconds, text)
        if moment == "creation":
            assert "file descriptors" in text and "ulimit -n" in text, text
        if rank == 0:
            assert "rank 1" in text, text
