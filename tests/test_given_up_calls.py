"""Forwarded CPU calls that somebody has given up, by Ctrl-C, a limit or abort(): what becomes of the call, its tensors,
its group and its process."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from held import held
from ranks import run_ranks
from test_backend import contribution
from test_interruption import first_of_two, patient_group, row, rows, seconds_to_ctrl_c


def short_group(seconds: float) -> Any:
    """Whose forwarded calls end after that time."""
    return dist.new_group(backend="echo", timeout=timedelta(seconds=seconds))


# ---- works that outlive their group ---------------------------------------------------------------------------------

LATER: dict[str, Callable[[int, Any], Any]] = {
    "quantized": lambda rank, group: dist.all_reduce(contribution(rank), group=group, async_op=True),
    "exact": lambda rank, group: dist.all_reduce(row().double(), group=group, async_op=True),
    "all_gather": lambda rank, group: dist.all_gather(rows(), row(), group=group, async_op=True),
    "reduce_scatter": lambda rank, group: dist.reduce_scatter(row(), rows(), group=group, async_op=True),
    "reduce_scatter_tensor": lambda rank, group: dist.reduce_scatter_tensor(
        row(), torch.ones(2000), group=group, async_op=True
    ),
    "message": lambda rank, group: (dist.isend if rank else dist.irecv)(row(), 1 - rank, group=group),
}


def shared_memory() -> int:
    return sum(count for name, count in held().items() if "/dev/shm" in name)


def run_held_works(rank: int, size: int) -> list[str]:
    """The calls whose Work keeps memory of its group past the end of that."""
    found, before = [], shared_memory()
    for name, call in LATER.items():
        group = patient_group("peer")
        dist.all_reduce(contribution(rank), group=group)
        assert shared_memory() > before
        work = call(rank, group)
        work.wait()
        dist.destroy_process_group(group)
        del group
        if shared_memory() > before:
            found.append(name)
        del work
    return found


def test_a_work_that_is_held_past_the_end_of_its_group_holds_no_memory_of_it() -> None:
    assert run_ranks(run_held_works, 2) == [[], []]


def run_late_failure(rank: int, size: int) -> tuple[float, str]:
    """A Work of a group that has ended fails as Gloo's does: nobody is left to be asked who is missing."""
    group = short_group(1.0)
    dist.all_reduce(row(), group=group)
    if rank == 1:
        time.sleep(3)
        return 0.0, ""
    work = dist.all_reduce(row(), group=group, async_op=True)
    dist.destroy_process_group(group)
    del group
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    return time.monotonic() - start, str(caught.value)


def test_an_exact_all_reduce_may_fail_after_the_end_of_its_group() -> None:
    seconds, text = run_ranks(run_late_failure, 2)[0]
    assert seconds < 2 and "rank 0 of 2: exact all_reduce number 1" in text, (seconds, text)


# ---- a peer that comes late -----------------------------------------------------------------------------------------


class Call:
    """One of rank 0 that waits for rank 1: `results` are what it fills, as `is_right` says."""

    def __init__(self, start: Callable[[list[torch.Tensor], Any], Any], outputs: int, right: float) -> None:
        self.start, self.outputs, self.right = start, outputs, right

    def is_right(self, results: list[torch.Tensor]) -> bool:
        return all(bool((result == self.right).all()) for result in results)


LATE: dict[str, Call] = {
    "exact": Call(lambda out, group: dist.all_reduce(out[0], group=group), 1, 2.0),
    "broadcast": Call(lambda out, group: dist.broadcast(out[0], 1, group=group), 1, 2.0),
    "all_gather": Call(lambda out, group: dist.all_gather(out, row(), group=group), 2, 1.0),
    "reduce_scatter": Call(lambda out, group: dist.reduce_scatter(out[0], rows(), group=group), 1, 2.0),
    "reduce_scatter_tensor": Call(
        lambda out, group: dist.reduce_scatter_tensor(out[0], torch.ones(2000), group=group), 1, 2.0
    ),
    "recv": Call(lambda out, group: dist.recv(out[0], 1, group=group), 1, 2.0),
    "recv from any": Call(lambda out, group: dist.recv(out[0], None, group=group), 1, 2.0),
}
# Whose copy to the output is a matter of the wait that was given up.
COPIED = ("reduce_scatter_tensor",)


def come_late(name: str, group: Any) -> None:
    """Rank 1's part."""
    twos = row() * 2
    if name.startswith("recv"):
        dist.send(twos, 0, group=group)
    elif name == "broadcast":
        dist.broadcast(twos, 1, group=group)
    else:
        LATE[name].start(rows()[: LATE[name].outputs], group)


def run_late_peer(rank: int, size: int, names: list[str], profiled: bool) -> list[tuple[str, str]]:
    """What was not as it should be. In one group: each call must leave it usable to the next."""
    group, found = patient_group("peer"), []
    dist.all_reduce(row(), group=group)
    for name in names:
        call = LATE[name]
        if rank == 1:
            dist.barrier()
            come_late(name, group)
        else:
            results = [torch.ones(1000) for _ in range(call.outputs)]
            tensors = [weakref.ref(result) for result in results]
            with torch.profiler.profile() if profiled else contextlib.nullcontext():
                seconds = seconds_to_ctrl_c(lambda call=call, results=results: call.start(results, group))
            if seconds > 1:
                found.append((name, f"{seconds} s to Ctrl-C"))
            dist.barrier()  # of the default group: now the peer comes
            deadline = time.monotonic() + 5
            while name not in COPIED and not call.is_right(results) and time.monotonic() < deadline:
                time.sleep(0.01)
            if name not in COPIED and not call.is_right(results):
                found.append((name, "the call has not taken place"))
            del results
            while any(tensor() is not None for tensor in tensors) and time.monotonic() < deadline:
                gc.collect()
                dist.send(row(), 1, group=group)
                time.sleep(0.1)
            if any(tensor() is not None for tensor in tensors):
                found.append((name, "the tensors are kept"))
            dist.send(row() * 3, 1, group=group)
        if rank == 1:
            last = row()
            while last[0] != 3:
                dist.recv(last, 0, group=group)
        after = row()
        dist.all_reduce(after, group=group)
        if not bool((after == 2).all()):
            found.append((name, "a wrong result afterwards"))
    return found


def test_a_peer_that_comes_after_ctrl_c_finds_the_call_and_later_calls_let_its_tensors_go() -> None:
    assert run_ranks(run_late_peer, 2, list(LATE), False) == [[], []]


def test_ctrl_c_ends_a_message_under_the_profiler_which_a_late_peer_still_finds() -> None:
    assert run_ranks(run_late_peer, 2, ["recv", "recv from any"], True) == [[], []]


def run_profiled_beyond_the_limit(rank: int, size: int, sends: bool) -> float:
    """Nothing that was given up waits on until the limit, at which Gloo would break all connections of the group."""
    group = short_group(2.0)
    large = torch.full((10_000_000,), float(rank))
    dist.all_reduce(row(), group=group)
    if rank == 0:
        with torch.profiler.profile():
            assert seconds_to_ctrl_c(lambda: (dist.send if sends else dist.recv)(large, 1, group=group)) < 1
        time.sleep(2.5)
    dist.barrier()
    if rank == 1:
        (dist.recv if sends else dist.send)(large, 0, group=group)
    dist.barrier()
    after = row()
    dist.all_reduce(after, group=group)
    return after[0].item() + large[0].item()


@pytest.mark.parametrize("sends", [False, True])
def test_a_profiled_message_that_was_interrupted_breaks_nothing_at_its_limit(sends: bool) -> None:
    assert run_ranks(run_profiled_beyond_the_limit, 2, sends) == ([2.0, 2.0] if sends else [3.0, 3.0])


def give_up(name: str, group: Any) -> Any:
    """A Work that is still under way after a call was given up: the next one's, to which nobody comes, or its own."""
    if name == "recv":
        work = dist.irecv(row(), 1, group=group)
        assert seconds_to_ctrl_c(work.wait) < 1
        return work
    assert seconds_to_ctrl_c(lambda: LATE[name].start(rows()[: LATE[name].outputs], group)) < 1
    return dist.all_reduce(row(), group=group, async_op=True)


def run_end(rank: int, size: int, name: str) -> float:
    """How long the end of a group takes after a call was given up that has taken place."""
    group = patient_group("peer")
    dist.all_reduce(row(), group=group)
    held_work = give_up(name, group) if rank == 0 else None
    dist.barrier()
    if rank == 1 and name != "recv":
        come_late(name, group)
    dist.barrier()
    if rank == 1:  # which keeps its connections meanwhile
        dist.barrier()
        return 0.0
    time.sleep(0.5)
    start = time.monotonic()
    dist.destroy_process_group(group)
    del group
    seconds = time.monotonic() - start
    dist.barrier()
    del held_work
    return seconds


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "recv"])
def test_the_end_of_a_group_waits_for_nothing_once_a_call_was_given_up(name: str) -> None:
    assert run_ranks(run_end, 2, name)[0] < 1


# ---- limits and abort() ---------------------------------------------------------------------------------------------


def run_limit(rank: int, size: int) -> dict[str, tuple[float, str]]:
    """Longer than the slices in which a wait looks at signals."""
    found = {}
    for name in ("recv", "all_gather", "exact"):
        group = patient_group("peer")
        dist.all_reduce(row(), group=group)
        if rank == 0:
            calls: dict[str, Callable[[], Any]] = {
                "recv": lambda group=group: dist.irecv(row(), 1, group=group),
                "all_gather": lambda group=group: dist.all_gather(rows(), row(), group=group, async_op=True),
                "exact": lambda group=group: dist.all_reduce(row(), group=group, async_op=True),
            }
            work = calls[name]()
            start = time.monotonic()
            try:
                work.wait(timedelta(seconds=1.3))
                found[name] = (0.0, "no error")
            except RuntimeError as error:
                found[name] = (time.monotonic() - start, str(error))
            if name != "recv":  # whose time-out has closed the connections, as Gloo does it
                dist.barrier()
                assert work.wait(timedelta(seconds=10))
                continue
        dist.barrier()
        if rank == 1 and name == "all_gather":
            dist.all_gather(rows(), row(), group=group)
        if rank == 1 and name == "exact":
            dist.all_reduce(row(), group=group)
    return found


def test_a_limit_longer_than_a_slice_is_kept_and_named() -> None:
    found = run_ranks(run_limit, 2)[0]
    assert found.keys() == {"recv", "all_gather", "exact"}
    for name, (seconds, text) in found.items():
        assert 1.3 <= seconds < 2.2, (name, seconds, text)
        assert "Timed out waiting 1300ms" in text if name == "recv" else "timed out" in text.lower(), (name, text)


def run_abort(rank: int, size: int, profiled: bool) -> list[tuple[str, str]]:
    """abort(), which only C++ programs have, ends one wait for a message and nothing else, as with plain Gloo."""
    from echo_pg import build

    abort, found = build.extension().testing.abort_work, []
    for name, group in (("echo", patient_group("peer")), ("gloo", dist.group.WORLD)):
        tensor = row()
        if rank == 0:
            with torch.profiler.profile() if profiled else contextlib.nullcontext():
                work = dist.irecv(tensor, 1, group=group)
                timer = threading.Timer(0.7, abort, [work])
                timer.start()
                start = time.monotonic()
                received = work.wait()
                seconds = time.monotonic() - start
                timer.join()
            if received or not 0.6 < seconds < 1.5 or not work.is_completed():
                found.append((name, f"the wait returned {received} after {seconds} s"))
            abort(work)
            if work.wait():
                found.append((name, "an abort before the wait was lost"))
        dist.barrier()
        if rank == 1:
            dist.send(tensor * 2, 0, group=group)
        elif not work.wait() or not bool((tensor == 2).all()):
            found.append((name, "the message was lost"))
        dist.all_reduce(tensor, group=group)
        if not bool((tensor == 3).all()):
            found.append((name, "a wrong result afterwards"))
    return found


@pytest.mark.parametrize("profiled", [False, True])
def test_abort_ends_a_wait_for_a_message_as_with_gloo(profiled: bool) -> None:
    assert run_ranks(run_abort, 2, profiled) == [[], []]


# ---- the end of the process -----------------------------------------------------------------------------------------

LEAVE_AFTER_CTRL_C = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
def press():
    print("leaving", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.5, press).start()
try:
    dist.reduce_scatter(torch.ones(1000), [torch.ones(1000), torch.ones(1000)], group=groups[0])
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_process_may_end_right_after_ctrl_c_in_a_call_that_waits_on_a_thread(tmp_path: Path) -> None:
    output, code, seconds = first_of_two(LEAVE_AFTER_CTRL_C, tmp_path, 40)
    assert output == "leaving\n" and code == 7, (output, code)
    assert seconds < 5, seconds
