"""The inner backends of a group: Gloo's and NCCL's, made so that an error comes where a rank fails or stays away.

They are constructed as classes in Python, so that the extension needs no headers of NCCL or Gloo. Each device type gets
two: `pass` for forwarded calls, made with the group, and `wire` for echo's own exchange, made at the first quantized
call. They never share one, because Gloo matches calls by their order, and the two kinds are issued from different
threads.
"""

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from . import build, compatibility
from .answers import on_thread

_ASK_PERIOD = 1.0  # seconds between two questions to the store whether another rank has failed meanwhile
_LOOK_PERIOD = 0.2  # seconds between two looks at the processes while an inner backend connects
_CONNECT_GRACE = timedelta(seconds=0.5)  # beyond the time-out, in which Gloo may say itself what it waits for


@dataclass(frozen=True)
class Place:
    """Where a group lives, as torch tells it to the creator."""

    store: Any
    rank: int
    size: int
    timeout: timedelta
    name: str
    global_ranks: list[int]  # empty for the default group
    split_from: Any = None  # the NCCL group that torch wants the inner one split from, see creation
    shares_gpus: bool = False  # there are fewer GPUs than ranks, and the options permit that
    processes: Any = None  # of the ranks, as the extension watches them; None where it is not there
    own_store: Any = None  # of this group alone, also where ranks report failures

    @property
    def meeting_place(self) -> Any:
        """The store for an inner backend: where this group follows one of the same name on the same store, its ranks
        must not find the addresses of that one."""
        return self.store if self.own_store is None else self.own_store


def make(
    place: Place, role: str, inner_options: Any, device_types: tuple[str, ...] = ("cpu", "cuda")
) -> dict[str, Any]:
    """One inner backend per device type that this process can serve; `role` ("pass" or "wire") keeps their store keys
    apart."""
    made = {}
    for device_type in device_types:
        if device_type == "cuda" and not place.shares_gpus:
            made[device_type] = make_nccl(place, role, inner_options)
        else:
            made[device_type] = make_gloo(place, role, device_type)
    return {device_type: backend for device_type, backend in made.items() if backend is not None}


def nccl_class() -> Any:
    """ProcessGroupNCCL, or None where this torch has none."""
    import torch.distributed as dist

    return getattr(dist.distributed_c10d, "ProcessGroupNCCL", None) if dist.is_nccl_available() else None


def make_gloo(place: Place, role: str, device_type: str) -> Any:
    """None where this torch has no Gloo; DistBackendError that says why the ranks did not connect."""
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return None

    def connect() -> Any:
        store = _watched(place, f"{role}/{device_type}")
        return dist.ProcessGroupGloo(store, place.rank, place.size, timeout=place.timeout)

    gloo = None
    deadline = time.monotonic() + (place.timeout + _CONNECT_GRACE).total_seconds()
    try:
        watched = place.processes is not None and place.size > 1
        gloo = _while_all_live(connect, place, deadline) if watched else connect()
        _meet(gloo, place, deadline)
    except Exception as error:
        if gloo is not None:
            gloo.abort()  # closes its connections, so that ranks that wait for this one hear of it
        raise dist.DistBackendError(_why_not_connected(place, role, error)) from error
    gloo.options.global_ranks_in_group = place.global_ranks
    gloo.options.group_name = _inner_name(place, role)
    _start_sequence_numbers(gloo)
    return gloo


def _while_all_live(connect: Callable[[], Any], place: Place, deadline: float) -> Any:
    """What `connect` returns or raises; DistBackendError as soon as a process of the group has ended or a rank has
    reported a failure that ends the group, or after the deadline.

    Gloo waits for connections to and from a process that has ended, or moves no more, up to five times its time-out,
    and nothing ends that. So it does so on a thread, which is left behind then, with its sockets, until it gives up.
    """
    from torch.distributed import DistBackendError

    outcome = on_thread("echo-connect", connect)
    next_question = time.monotonic() + _ASK_PERIOD
    while True:
        # Asked in this order: the last thing that a process did may have been to connect.
        exited = place.processes.exited()
        if wait([outcome], _LOOK_PERIOD).done:
            return outcome.result()
        if exited:
            raise DistBackendError(exited)
        now = time.monotonic()
        if now > deadline:
            raise _timed_out(place)
        if now > next_question:
            report = build.extension().first_report(place.own_store, place.rank, place.size, place.processes)
            # A group at work may have survived a forwarded call that failed, whose report stays.
            if report is not None and not report.group_survives:
                raise DistBackendError(str(report))
            next_question = now + _ASK_PERIOD


def _meet(gloo: Any, place: Place, deadline: float) -> None:
    """Return once all ranks are connected to all others.

    Gloo is done with a rank when that rank's own connections stand. Were it to leave then, its end would break into
    the connecting of others: Gloo takes a connection that was made and closed again meanwhile for a failure. Processes
    are not watched here, since one that has met the others may end; one that ends before that breaks its connections.
    """
    if gloo.size() > 1:
        outcome = on_thread("echo-meet", lambda: gloo.barrier().wait())  # on a thread: Ctrl-C ends the wait
        if not wait([outcome], max(deadline - time.monotonic(), 0)).done:
            raise _timed_out(place)
        outcome.result()


def _timed_out(place: Place) -> Exception:
    from torch.distributed import DistBackendError

    return DistBackendError(f"timed out after {place.timeout.total_seconds():g} s")


def _watched(place: Place, prefix: str) -> Any:
    """The group's store for an inner backend, with waits that end when a process of the group does."""
    import torch.distributed as dist

    store = place.meeting_place
    if place.processes is not None:
        store = build.extension().watched_store(store, place.processes, place.timeout)
    return dist.PrefixStore(prefix, store)


def _why_not_connected(place: Place, role: str, error: Exception) -> str:
    problem = (
        f"rank {place.rank} of {place.size}: group {place.name!r} cannot be created: "
        f"waiting for the connections of all ranks ({role}, Gloo): {error}"
    )
    if place.processes is None or role == "wire":  # the call that wants it asks the others itself
        return problem
    return problem + build.extension().fault_reports(place.own_store, place.rank, place.size, place.processes, problem)


def make_nccl(place: Place, role: str, inner_options: Any) -> Any:
    """With a copy of `inner_options`, where given; None where this torch has no NCCL or sees no GPU."""
    import torch
    import torch.distributed as dist

    nccl = nccl_class()
    if nccl is None or torch.cuda.device_count() == 0:
        return None
    if inner_options is None:
        chosen = nccl.Options()
        chosen.is_high_priority_stream = False
    else:
        chosen = compatibility.copy_nccl_options(inner_options)
    chosen._timeout = place.timeout
    chosen.global_ranks_in_group = place.global_ranks
    chosen.group_name = _inner_name(place, role)
    if role == "pass" and place.split_from is not None:
        chosen.split_from = place.split_from
        chosen.split_color = dist.distributed_c10d._process_group_color(place.global_ranks)
    backend = nccl(dist.PrefixStore(f"{role}/cuda", place.meeting_place), place.rank, place.size, chosen)
    _start_sequence_numbers(backend)
    return backend


def _start_sequence_numbers(backend: Any) -> None:
    """What torch does after it has made a Gloo or NCCL group. From 2.14 on they start by themselves, and the call is a
    warning."""
    import torch

    if torch.__version__ < (2, 14):
        backend._set_sequence_number_for_group()


def _inner_name(place: Place, role: str) -> str:
    return place.name if role == "pass" else f"{place.name}.{role}"
