"""Creates one process group: checks, the inner backends that carry everything, and the C++ backend around them.

Inner backends are constructed as classes in Python, so that the extension needs no headers of NCCL or Gloo. Each device
type gets two: `pass` for forwarded calls, made now, and `wire` for echo's own exchange, made at the first quantized
call. They never share one, because Gloo matches calls by their order, and the two kinds are issued from different
threads.
"""

import contextlib
import hashlib
import time
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import alias, build, compatibility, log, options, passes, processes
from .agreement import Agreement
from .answers import on_thread
from .options import Options

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
    split_from: Any = None  # the NCCL group that torch wants the inner one split from, see _split_source
    shares_gpus: bool = False  # there are fewer GPUs than ranks, and the options permit that
    processes: Any = None  # of the ranks, as the extension watches them; None where it is not there
    own_store: Any = None  # of this group alone, also where ranks report failures


def create_group(dist_options: Any, pg_options: Any) -> Any:
    """torch's creator: returns the backend of a new group.

    Raises ValueError or TypeError for bad options, ImportError where the extension does not fit this torch,
    DistBackendError where ranks disagree or stay away. With ECHO_OFF=1 none of this is looked at.
    """
    place = Place(
        store=dist_options.store,
        rank=dist_options.group_rank,
        size=dist_options.group_size,
        timeout=dist_options.timeout,
        name=dist_options.group_id,
        global_ranks=list(dist_options.global_ranks_in_group),
    )
    place = replace(place, split_from=_split_source(place))
    try:
        return _create_checked(place, pg_options)
    except BaseException:
        if place.split_from is not None:
            # The ranks outside the new group are in this call already and would wait for ever.
            with contextlib.suppress(Exception):
                place.split_from.perform_nocolor_split(_bound_device())
        raise


def _create_checked(place: Place, pg_options: Any) -> Any:
    agreement = Agreement(place.store, place.rank, place.size, place.timeout, processes.watch(place))
    if options.is_off():
        agreement.withdraw("ECHO_OFF=1 is set here and not on all ranks")
        return _create_off(place, pg_options, agreement.store)
    try:
        chosen = to_options(pg_options)
        extension = build.extension()
        processes.require_descriptors(place.size)
        config = chosen.to_config()
        place = replace(place, shares_gpus=_shares_gpus(chosen, place.size))
        fingerprint = chosen.fingerprint(shares_gpus=place.shares_gpus)
    except Exception as error:
        agreement.withdraw(str(error))
        raise
    limit = timedelta(seconds=chosen.timeout) if isinstance(chosen.timeout, float) else place.timeout
    introductions = agreement.reach(fingerprint, limit)
    place = replace(place, processes=extension.Processes(place.rank, place.size, introductions))
    return _create(extension, place, config, chosen, agreement.store)


def to_options(pg_options: Any) -> Options:
    """What was given as `pg_options=`, as Options: None, Options, `options` of another echo group, or the NCCL options
    of a caller who does not know echo."""
    if type(pg_options).__name__ == "GroupOptions" and isinstance(pg_options, build.extension().GroupOptions):
        pg_options = pg_options.chosen
    if pg_options is None:
        return Options()
    if isinstance(pg_options, Options):
        inner = pg_options.inner_options
        if inner is not None and not ((nccl := _nccl_class()) and isinstance(inner, nccl.Options)):
            raise TypeError(f"inner_options must be ProcessGroupNCCL.Options or None, not {type(inner).__name__}")
        return pg_options
    if (nccl := _nccl_class()) and isinstance(pg_options, nccl.Options):
        return Options(inner_options=pg_options)
    raise TypeError(
        f"pg_options must be echo_pg.Options, ProcessGroupNCCL.Options or None, not {type(pg_options).__name__}"
    )


def inner_backends(
    place: Place, role: str, inner_options: Any, device_types: tuple[str, ...] = ("cpu", "cuda")
) -> dict[str, Any]:
    """One inner backend per device type that this process can serve; `role` ("pass" or "wire") keeps their store keys
    apart."""
    made = {}
    for device_type in device_types:
        if device_type == "cuda" and not place.shares_gpus:
            made[device_type] = _make_nccl(place, role, inner_options)
        else:
            made[device_type] = _make_gloo(place, role, device_type)
    return {device_type: backend for device_type, backend in made.items() if backend is not None}


def _create(extension: Any, place: Place, config: Any, pg_options: Any, own_store: Any) -> Any:
    inner_options = _inner_options(pg_options)
    place = replace(place, own_store=own_store)
    later = _later_cuda(place, inner_options)
    inner = inner_backends(place, "pass", inner_options, ("cpu",) if later else ("cpu", "cuda"))
    if not inner:
        raise RuntimeError("echo needs Gloo or NCCL inside, and this torch has neither")

    limited = replace(place, timeout=timedelta(seconds=config.timeout_s)) if config.timeout_s > 0 else place

    def make_wire(device_type: str) -> Any:
        return inner_backends(limited, "wire", inner_options, (device_type,))[device_type]

    def make_derived(store: Any, rank: int, size: int, ranks: list[int], given: Any) -> Any:
        return _create_checked(_derived_place(place, store, rank, size, ranks, given), _inherit(pg_options, given))

    compatibility.complete(extension.ProcessGroupEcho)
    log.connect(extension)
    if config.policy != "off":
        passes.install(extension)
    return extension.ProcessGroupEcho(
        own_store,
        place.rank,
        place.size,
        config,
        inner,
        later,
        make_wire,
        place.timeout,
        make_derived,
        pg_options,
        place.processes,
        alias.stands_for_nccl(),
    )


def _later_cuda(place: Place, inner_options: Any) -> Callable[[str], Any] | None:
    """What makes the inner group of CUDA tensors at its first use; None if it is to be made now. NCCL's starts CUDA's
    driver and meets no other rank, so it waits until the program has shown that it uses CUDA."""
    import torch
    import torch.distributed as dist

    shown = place.shares_gpus or alias.stands_for_nccl() or inner_options is not None
    shown = shown or _bound_device() or torch.cuda.is_initialized()
    if shown or not _may_have_gpus() or _nccl_class() is None or not dist.is_gloo_available():
        return None
    return lambda device_type: _make_nccl(place, "pass", inner_options)


def _may_have_gpus() -> bool:
    """Whether NVIDIA's driver is on this machine, without asking it: where it is not, what torch would use for
    CUDA tensors is not promised to anyone."""
    return any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg"))


def _derived_place(parent: Place, store: Any, rank: int, size: int, ranks: list[int], given: Any) -> Place:
    """Where a group lives that comes from `parent` by split or shrink, with the members `ranks` of it, or by merge."""
    import torch.distributed as dist

    # torch 2.9 gives groups of other members the same name, and so the same store.
    members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return Place(
        store=dist.PrefixStore(f"derived/{members}", store),
        rank=rank,
        size=size,
        timeout=given._timeout if given is not None else parent.timeout,
        name=given.group_name if given is not None else f"{parent.name}:shrunk",
        global_ranks=[parent.global_ranks[member] if parent.global_ranks else member for member in ranks],
    )


def _inherit(parent: Any, given: Any) -> Any:
    """The `pg_options` of a derived group, from those of its parent and the options that torch hands over: a copy of
    what the parent's `options` are, or what the caller gave."""
    if isinstance(given, build.extension().GroupOptions):
        return given.chosen
    if (nccl := _nccl_class()) and isinstance(given, nccl.Options):
        return replace(parent, inner_options=given) if isinstance(parent, Options) else given
    return parent


def _inner_options(pg_options: Any) -> Any:
    """The NCCL options among what was given as `pg_options=`, None if there are none."""
    inner = getattr(pg_options, "inner_options", pg_options)
    return inner if (nccl := _nccl_class()) and isinstance(inner, nccl.Options) else None


def _create_off(place: Place, pg_options: Any, own_store: Any) -> Any:
    """The exact group of ECHO_OFF=1: echo with nothing quantized, or plainly the inner backend where the extension does
    not load. Options are not looked at, so that not even a wrong one is an error."""
    try:
        extension = build.extension()
    except ImportError as error:
        warnings.warn(f"ECHO_OFF=1: using the inner backend alone, because {error}", stacklevel=2)
        inner = inner_backends(place, "pass", _inner_options(pg_options))
        return inner.get("cuda") or inner["cpu"]
    config = extension.Config()
    config.policy = "off"
    place = replace(place, processes=extension.Processes(place.rank, place.size, []))
    return _create(extension, place, config, pg_options, own_store)


def _nccl_class() -> Any:
    import torch.distributed as dist

    return getattr(dist.distributed_c10d, "ProcessGroupNCCL", None) if dist.is_nccl_available() else None


def _shares_gpus(chosen: Options, size: int) -> bool:
    """Whether Gloo must serve CUDA tensors too: NCCL refuses two ranks on one GPU."""
    import torch

    return chosen.allow_shared_gpu and 0 < torch.cuda.device_count() < size


def _make_gloo(place: Place, role: str, device_type: str) -> Any:
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

    store = place.store
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


def _make_nccl(place: Place, role: str, inner_options: Any) -> Any:
    import torch
    import torch.distributed as dist

    nccl = _nccl_class()
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
    backend = nccl(dist.PrefixStore(f"{role}/cuda", place.store), place.rank, place.size, chosen)
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


def _bound_device() -> Any:
    """The device that the default group is bound to (`device_id=` of init_process_group), None if there is none."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_group().bound_device_id if dist.is_initialized() else None


def _split_source(place: Place) -> Any:
    """The NCCL group that ranks outside a new group are splitting at this moment, without a part of their own: torch
    has them do so if the default group is NCCL's and bound to a device, whatever the new group's backend. None if not.
    """
    import torch.distributed as dist

    if not place.global_ranks or not _bound_device():
        return None
    source = dist.distributed_c10d._get_split_source(dist.distributed_c10d._get_default_group())
    return source if (nccl := _nccl_class()) and isinstance(source, nccl) else None
