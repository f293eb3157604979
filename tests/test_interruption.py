"""Ctrl-C, forks, interpreters that end and processes made by torch.multiprocessing: the way a rank leaves or comes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from ranks import run_ranks
from test_backend import contribution, is_close

FABRICS = ("peer", "wire")
TIMEOUT = 60.0  # of the groups: nothing here may take anywhere near that long


def patient_group(fabric: str) -> Any:
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
    return dist.new_group(backend="echo", timeout=timedelta(seconds=TIMEOUT), pg_options=options)


def seconds_to_ctrl_c(wait: Callable[[], Any]) -> float:
    """How long after Ctrl-C a call that waits for a peer raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, press)
    timer.start()
    try:
        wait()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        timer.join()
    raise AssertionError("the call came back by itself")


def call_functional(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """As DTensor and compiled code do: the wait is an operator of its own."""
    return funcol.wait_tensor(funcol.all_reduce(tensor, "sum", group))


def call_async(tensor: torch.Tensor, group: Any) -> None:
    dist.all_reduce(tensor, group=group, async_op=True).wait()


def run_ctrl_c(
    rank: int, size: int, fabric: str, first_call: bool, call: Callable[..., Any]
) -> float | tuple[str, float]:
    """Rank 0 is interrupted while it waits for rank 1, which then comes to the call."""
    group = patient_group(fabric)
    if not first_call:
        call(contribution(rank), group=group)  # what is loaded at its first use must not be what Ctrl-C meets
    if rank == 0:
        seconds = seconds_to_ctrl_c(lambda: call(contribution(rank), group=group))
        with pytest.raises(dist.DistBackendError, match=r"does not resume.*interrupted by a signal"):
            dist.all_reduce(contribution(rank), group=group)
        start = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - start < 3, "the end of an interrupted group waits for nobody"
        return seconds
    time.sleep(2)
    if first_call:
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(contribution(rank), group=group)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("fabric", "first_call", "call"),
    [
        *((fabric, first, dist.all_reduce) for fabric in FABRICS for first in (False, True)),
        ("peer", False, call_async),
        ("peer", False, call_functional),
    ],
)
def test_ctrl_c_ends_a_call_within_a_second_and_tells_the_peers(
    fabric: str, first_call: bool, call: Callable[..., Any]
) -> None:
    seconds, (text, waited) = run_ranks(run_ctrl_c, 2, fabric, first_call, call)
    assert seconds < 1, seconds
    assert first_call or (text and waited < 5), (text, waited)
    if fabric == "peer" and not first_call:
        assert "rank 0" in text, text


def run_ctrl_c_forwarded(rank: int, size: int) -> tuple[float, float]:
    """As above in a call that is not quantized. Gloo waits on; the group's end waits for it no more."""
    group = patient_group("peer")
    exact = torch.ones(1000, dtype=torch.float64)
    dist.all_reduce(exact, group=group)
    if rank == 1:
        time.sleep(4)
        return 0.0, 0.0
    seconds = seconds_to_ctrl_c(lambda: dist.all_reduce(exact, group=group))
    start = time.monotonic()
    dist.destroy_process_group(group)
    return seconds, time.monotonic() - start


def test_ctrl_c_ends_a_forwarded_all_reduce_within_a_second() -> None:
    seconds, ending = run_ranks(run_ctrl_c_forwarded, 2)[0]
    assert seconds < 1 and ending < 1, (seconds, ending)


def row() -> torch.Tensor:
    return torch.ones(1000)


def rows() -> list[torch.Tensor]:
    return [row(), row()]


def receive_in_a_batch(group: Any) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, row(), 1, group)]):
        work.wait()


# What rank 0 of two cannot finish without rank 1.
FORWARDED: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda group: dist.broadcast(row(), 1, group=group),
    "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced(rows(), group=group),
    "reduce": lambda group: dist.reduce(row(), 0, group=group),
    "all_gather": lambda group: dist.all_gather(rows(), row(), group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(torch.ones(2000), row(), group=group),
    "all_gather_object": lambda group: dist.all_gather_object([None, None], "text", group=group),
    "all_gather, later": lambda group: dist.all_gather(rows(), row(), group=group, async_op=True).wait(),
    "gather": lambda group: dist.gather(row(), rows(), 0, group=group),
    "scatter": lambda group: dist.scatter(row(), None, 1, group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(row(), rows(), group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(row(), torch.ones(2000), group=group),
    "all_to_all": lambda group: dist.all_to_all(rows(), rows(), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.ones(2000), torch.ones(2000), group=group),
    "send": lambda group: dist.send(torch.ones(10_000_000), 1, group=group),
    "recv": lambda group: dist.recv(row(), 1, group=group),
    "recv from any": lambda group: dist.recv(row(), None, group=group),
    "irecv in a batch": receive_in_a_batch,
    "barrier": lambda group: dist.barrier(group),
    "monitored_barrier": lambda group: dist.monitored_barrier(group, timedelta(seconds=TIMEOUT)),
    "functional": lambda group: funcol.wait_tensor(funcol.all_gather_tensor(row(), 0, group)),
}


def run_ctrl_c_in_turn(rank: int, size: int, names: list[str], fresh: bool) -> list[tuple[str, float, float]]:
    """Rank 0 is interrupted in one operation after the other, each in a group of its own or all in one."""
    if "functional" in names:
        importlib.import_module("torch._dynamo")  # as such calls do; who is interrupted meanwhile may abort
    shared = None if fresh else patient_group("peer")
    exact = torch.ones(1000, dtype=torch.float64)
    seconds = []
    for name in names:
        group = patient_group("peer") if fresh else shared
        if fresh:
            dist.all_reduce(exact, group=group)
        if rank == 0:
            waited = seconds_to_ctrl_c(lambda group=group, name=name: FORWARDED[name](group))
            start = time.monotonic()
            if fresh:
                dist.destroy_process_group(group)
            seconds.append((name, waited, time.monotonic() - start))
        dist.barrier()  # of the default group, which is Gloo's own
        if rank == 1 and fresh:
            dist.destroy_process_group(group)
    if rank == 0 and not fresh:
        start = time.monotonic()
        dist.destroy_process_group(shared)
        seconds.append(("the end", 0.0, time.monotonic() - start))
    return seconds


@pytest.mark.parametrize("name", FORWARDED)
def test_ctrl_c_ends_a_forwarded_call_within_a_second(name: str) -> None:
    for _, waited, ending in run_ranks(run_ctrl_c_in_turn, 2, [name], True)[0]:
        assert waited < 1 and ending < 1, (waited, ending)


@pytest.mark.parametrize("fresh", [True, False])
def test_ctrl_c_ends_one_forwarded_call_after_the_other(fresh: bool) -> None:
    seconds = run_ranks(run_ctrl_c_in_turn, 2, list(FORWARDED), fresh)[0]
    assert all(waited < 1 and ending < 1 for _, waited, ending in seconds), seconds


def run_ctrl_c_at_creation(rank: int, size: int) -> float:
    if rank == 1:
        time.sleep(2)
        return 0.0
    return seconds_to_ctrl_c(lambda: patient_group("peer"))


def test_ctrl_c_ends_the_making_of_a_group_within_a_second() -> None:
    assert run_ranks(run_ctrl_c_at_creation, 2)[0] < 1


def run_handler(rank: int, size: int) -> int:
    """A handler that raises nothing runs while a call waits, may ask for statistics, and the call goes on."""
    import echo_pg

    seen: list[int] = []
    group = patient_group("peer")
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(echo_pg.stats(group)["size"]))
    for _ in range(2):  # the first call waits for the vote, the second for a tile
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            time.sleep(0.8)
        tensor = contribution(rank)
        start = time.monotonic()
        dist.all_reduce(tensor, group=group)
        assert is_close(tensor, size) and (rank == 1 or time.monotonic() - start > 0.4)
    return len(seen)


def test_other_signals_are_handled_while_a_call_waits() -> None:
    assert run_ranks(run_handler, 2)[0] == 2


PROGRAM = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist, echo_pg
rank = int(os.environ["RANK"])
signal.alarm(50)
store = dist.FileStore(os.environ["MEET"], 2)
limit = datetime.timedelta(seconds=60)
dist.init_process_group("echo", store=store, rank=rank, world_size=2, timeout=limit)
options = [echo_pg.Options(policy="all", min_bytes=0, fabric=fabric) for fabric in ("peer", "wire")]
groups = [dist.new_group(backend="echo", pg_options=option, timeout=limit) for option in options]
x = torch.ones(100_000).bfloat16()
for group in groups:
    dist.all_reduce(x, group=group)
if rank == 1:
    time.sleep(float(os.environ["STAY"]))
    os._exit(0)
"""

FORK = """
work = dist.all_reduce(x, group=groups[0], async_op=True)
child = os.fork()
if child == 0:
    signal.alarm(20)
    uses = [lambda: dist.all_reduce(x, group=groups[0]), lambda: dist.all_reduce(x, group=groups[1]),
            lambda: dist.barrier(groups[0]), lambda: dist.broadcast(x, 0, group=groups[1]),
            lambda: echo_pg.stats(groups[0]), lambda: echo_pg.all_reduce(x, groups[0]), work.wait]
    for use in uses:
        try:
            use()
            print("no error", flush=True)
        except dist.DistBackendError as error:
            print("clear" if "was forked from process" in str(error) else error, flush=True)
    slabs = [line for line in open("/proc/self/maps") if "/dev/shm" in line]
    print("slabs", len(slabs), flush=True)
    dist.destroy_process_group(groups[0])
    sys.exit(0)
print("child ended with", os.waitpid(child, 0)[1], flush=True)
os._exit(0)
"""

LEAVE = """
works = [dist.all_reduce(x, group=group, async_op=True) for group in groups]
print("leaving", flush=True)
"""

LEAVE_A_THREAD = """
import threading
for group in groups:
    threading.Thread(target=dist.all_reduce, args=(x.clone(),), kwargs={"group": group}, daemon=True).start()
time.sleep(0.5)
print("leaving", flush=True)
"""


def first_of_two(program: str, folder: Path, stay: float) -> tuple[str, int, float]:
    """What rank 0 of two printed, how it ended, and how long after its last line. Rank 1 stays without taking part."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    variables |= {"MEET": str(folder / "meet"), "STAY": str(stay), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"ECHO_LOG": "off"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env=variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    output, last = "", time.monotonic()
    try:
        for line in ranks[0].stdout or ():
            output, last = output + line, time.monotonic()
        code = ranks[0].wait(timeout=60)
        return output, code, time.monotonic() - last
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_forked_process_cannot_use_the_groups_of_its_parent(tmp_path: Path) -> None:
    output, code, _ = first_of_two(FORK, tmp_path, 30)
    assert output.splitlines() == ["clear"] * 7 + ["slabs 0", "child ended with 0"] and code == 0, output


@pytest.mark.parametrize("program", [LEAVE, LEAVE_A_THREAD], ids=["async", "threads"])
def test_an_interpreter_ends_with_work_in_flight(program: str, tmp_path: Path) -> None:
    """Its peer never comes to the two calls, one over each fabric, and its groups would wait a minute for it. Threads
    that wait for them must not meet the interpreter that has ended."""
    output, code, seconds = first_of_two(program, tmp_path, 40)
    assert output == "leaving\n" and code == 0, (output, code)
    assert seconds < 10, seconds


def run_worker(rank: int, size: int, meet: str, shared: list[torch.Tensor]) -> None:
    import echo_pg

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    options = echo_pg.Options(policy="all", min_bytes=0)
    store = dist.FileStore(meet, size)
    dist.init_process_group("echo", store=store, rank=rank, world_size=size, pg_options=options)
    dist.all_reduce(shared[rank])
    assert echo_pg.stats(dist.group.WORLD)["fabric"] == "peer"
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_of_torch_multiprocessing_and_tensors_that_they_share(method: str, tmp_path: Path) -> None:
    shared = [contribution(rank).share_memory_() for rank in range(2)]
    arguments = (2, str(tmp_path / "meet"), shared)
    mp.start_processes(run_worker, args=arguments, nprocs=2, start_method=method)
    assert all(is_close(tensor, 2) for tensor in shared)
    assert torch.equal(shared[0], shared[1])
