"""Creates one process group: checks, the inner backends that carry everything, and the C++ backend around them."""

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import alias, build, compatibility, inner_backends, log, options, passes, processes
from .agreement import Agreement
from .inner_backends import Place
from .options import Options


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
        if inner is not None and not ((nccl := inner_backends.nccl_class()) and isinstance(inner, nccl.Options)):
            raise TypeError(f"inner_options must be ProcessGroupNCCL.Options or None, not {type(inner).__name__}")
        return pg_options
    if (nccl := inner_backends.nccl_class()) and isinstance(pg_options, nccl.Options):
        return Options(inner_options=pg_options)
    raise TypeError(
        f"pg_options must be echo_pg.Options, ProcessGroupNCCL.Options or None, not {type(pg_options).__name__}"
    )


def _create(extension: Any, place: Place, config: Any, pg_options: Any, own_store: Any) -> Any:
    inner_options = _inner_options(pg_options)
    place = replace(place, own_store=own_store)
    later = _later_cuda(place, inner_options)
    inner = inner_backends.make(place, "pass", inner_options, ("cpu",) if later else ("cpu", "cuda"))
    if not inner:
        raise RuntimeError("echo needs Gloo or NCCL inside, and this torch has neither")

    limited = replace(place, timeout=timedelta(seconds=config.timeout_s)) if config.timeout_s > 0 else place

    def make_wire(device_type: str) -> Any:
        return inner_backends.make(limited, "wire", inner_options, (device_type,))[device_type]

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
    if shown or not _may_have_gpus() or inner_backends.nccl_class() is None or not dist.is_gloo_available():
        return None
    return lambda device_type: inner_backends.make_nccl(place, "pass", inner_options)


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
    if (nccl := inner_backends.nccl_class()) and isinstance(given, nccl.Options):
        return replace(parent, inner_options=given) if isinstance(parent, Options) else given
    return parent


def _inner_options(pg_options: Any) -> Any:
    """The NCCL options among what was given as `pg_options=`, None if there are none."""
    inner = getattr(pg_options, "inner_options", pg_options)
    return inner if (nccl := inner_backends.nccl_class()) and isinstance(inner, nccl.Options) else None


def _create_off(place: Place, pg_options: Any, own_store: Any) -> Any:
    """The exact group of ECHO_OFF=1: echo with nothing quantized, or plainly the inner backend where the extension does
    not load. Options are not looked at, so that not even a wrong one is an error."""
    try:
        extension = build.extension()
    except ImportError as error:
        warnings.warn(f"ECHO_OFF=1: using the inner backend alone, because {error}", stacklevel=2)
        inner = inner_backends.make(place, "pass", _inner_options(pg_options))
        return inner.get("cuda") or inner["cpu"]
    config = extension.Config()
    config.policy = "off"
    place = replace(place, processes=extension.Processes(place.rank, place.size, []))
    return _create(extension, place, config, pg_options, own_store)


def _shares_gpus(chosen: Options, size: int) -> bool:
    """Whether Gloo must serve CUDA tensors too: NCCL refuses two ranks on one GPU."""
    import torch

    return chosen.allow_shared_gpu and 0 < torch.cuda.device_count() < size


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
    return source if (nccl := inner_backends.nccl_class()) and isinstance(source, nccl) else None
