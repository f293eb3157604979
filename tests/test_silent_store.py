"""A rendezvous store whose server is stopped, not ended: its connections stay open and nothing is answered any more.
torch's own client waits for it without a limit; echo's ranks must not."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_backend import contribution, is_close

TIMEOUT = 2.0  # seconds, of the groups
AT_MOST = TIMEOUT + 5

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Process and port of a store's server that has a process for itself."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def stop(pid: int, rank: int) -> None:
    """Returns on every rank once rank 0 has stopped the server."""
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)


def run_silence(rank: int, size: int, pid: int, port: int, place: str, moment: str, fabric: str) -> tuple[str, float]:
    """What was said after the server was stopped at that moment, and how long the call took that ended so."""
    import echo_pg

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    limit, options = timedelta(seconds=TIMEOUT), echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)

    def make() -> Any:
        dist.init_process_group("echo", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options)

    def call() -> None:
        tensor = contribution(rank)
        dist.all_reduce(tensor)
        assert is_close(tensor, size)

    meeting = dist.FileStore(place, size)  # where nobody waits for the store that is stopped

    def meet(where: str) -> None:
        meeting.set(f"{where}/{rank}", "")
        meeting.wait([f"{where}/{peer}" for peer in range(size)])

    meet("connected")
    if moment == "waiting":
        if rank == 1:  # stops the server while rank 0 waits for it in creation
            time.sleep(0.5)
            stop(pid, 0)
    elif moment == "first call":
        make()
        meet("made")
        stop(pid, rank)
    elif moment == "creation":
        stop(pid, rank)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        call() if moment == "first call" else make()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("moment", "fabric"),
    [("creation", "peer"), ("waiting", "peer"), ("first call", "peer"), ("first call", "wire")],
)
def test_a_silent_store_is_an_error_in_time(moment: str, fabric: str, tmp_path: Path) -> None:
    with server() as (pid, port):
        outcomes = run_ranks(run_silence, 2, pid, port, str(tmp_path / "meet"), moment, fabric, backend=None)
    for text, seconds in outcomes:
        assert "the store does not answer" in text or "the store no longer answers" in text, text
        assert seconds < AT_MOST, (seconds, text)


def run_end_of_store(rank: int, size: int, folder: str, waiting: bool, fabric: str) -> tuple[str, float] | None:
    """Rank 0 keeps the store and ends before the first call, or while rank 1 waits for it there."""
    import echo_pg

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(folder, "port").write_text(str(store.port))
    meeting = dist.FileStore(f"{folder}/meet", size)
    meeting.set(f"port/{rank}", "")
    meeting.wait(["port/0"])
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()), is_master=False)
    options, limit = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric), timedelta(seconds=60)
    dist.init_process_group("echo", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options)
    meeting.set(f"made/{rank}", "")
    meeting.wait(["made/0", "made/1"])
    if rank == 0:
        # A process closes what it has open in order, connections first here; with this it counts as ended later.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(min(hard - 200, 50_000)):
            os.eventfd(0)
        meeting.set("ready", "")
        time.sleep(1.0 if waiting else 0.0)
        os._exit(3)
    meeting.wait(["ready"])
    time.sleep(0.0 if waiting else 0.02)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(contribution(rank))
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("fabric", ["peer", "wire"])
def test_a_store_that_ended_with_its_rank_names_the_rank(fabric: str, waiting: bool, tmp_path: Path) -> None:
    outcomes = run_ranks(run_end_of_store, 2, str(tmp_path), waiting, fabric, backend=None, check=False, timeout=40)
    text, seconds = outcomes[1]
    assert "the process of rank 0 has exited" in text and "did not come" not in text, text
    assert "rank 1 of 2: quantized all_reduce number 0" in text and seconds < 5, (seconds, text)
