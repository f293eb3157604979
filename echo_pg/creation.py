"""Creates one process group: checks, the inner backends that carry everything, and the C++ backend around them.

Inner backends are constructed as classes in Python, so that the extension needs no headers of NCCL or Gloo. Each device
type gets two: `pass` for forwarded calls, made now, and `wire` for echo's own exchange, made at the first quantized
call. They never share one, because Gloo matches calls by their order, and the two kinds are issued from different
threads.
"""

import copy
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from . import build, log, options, passes
from .agreement import Agreement
from .options import Options


@dataclass(frozen=True)
class Place:
    """Where a group lives, as torch tells it to the creator."""

    store: Any
    rank: int
    size: int
    timeout: timedelta
    name: str
    global_ranks: list[int]  # empty for the default group


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
    agreement = Agreement(place.store, place.rank, place.size)
    if options.is_off():
        agreement.withdraw("ECHO_OFF=1 is set here and not on all ranks")
        return _create_off(place, pg_options, agreement.store)
    try:
        chosen = to_options(pg_options)
        extension = build.extension()
        config = chosen.to_config()
        fingerprint = chosen.fingerprint()
    except Exception as error:
        agreement.withdraw(str(error))
        raise
    limit = timedelta(seconds=chosen.timeout) if isinstance(chosen.timeout, float) else place.timeout
    agreement.reach(fingerprint, limit)
    return _create(extension, place, config, chosen.inner_options, agreement.store)


def to_options(pg_options: Any) -> Options:
    """What was given as `pg_options=`, as Options: None, Options, or the NCCL options of a caller who does not know
    echo."""
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
    makers = {"cpu": _make_gloo, "cuda": _make_nccl}
    made = {device_type: makers[device_type](place, role, inner_options) for device_type in device_types}
    return {device_type: backend for device_type, backend in made.items() if backend is not None}


def _create(extension: Any, place: Place, config: Any, inner_options: Any, own_store: Any) -> Any:
    inner = inner_backends(place, "pass", inner_options)
    if not inner:
        raise RuntimeError("echo needs Gloo or NCCL inside, and this torch has neither")

    limited = replace(place, timeout=timedelta(seconds=config.timeout_s)) if config.timeout_s > 0 else place

    def make_wire(device_type: str) -> Any:
        return inner_backends(limited, "wire", inner_options, (device_type,))[device_type]

    _complete_class(extension.ProcessGroupEcho)
    log.connect(extension)
    if config.policy != "off":
        passes.install(extension)
    return extension.ProcessGroupEcho(own_store, place.rank, place.size, config, inner, make_wire, place.timeout)


def _create_off(place: Place, pg_options: Any, own_store: Any) -> Any:
    """The exact group of ECHO_OFF=1: echo with nothing quantized, or plainly the inner backend where the extension does
    not load. Options are not looked at, so that not even a wrong one is an error."""
    inner_options = getattr(pg_options, "inner_options", pg_options)
    if not ((nccl := _nccl_class()) and isinstance(inner_options, nccl.Options)):
        inner_options = None
    try:
        extension = build.extension()
    except ImportError as error:
        warnings.warn(f"ECHO_OFF=1: using the inner backend alone, because {error}", stacklevel=2)
        inner = inner_backends(place, "pass", inner_options)
        return inner.get("cuda") or inner["cpu"]
    config = extension.Config()
    config.policy = "off"
    return _create(extension, place, config, inner_options, own_store)


def _nccl_class() -> Any:
    import torch.distributed as dist

    return getattr(dist.distributed_c10d, "ProcessGroupNCCL", None) if dist.is_nccl_available() else None


def _make_gloo(place: Place, role: str, _: Any) -> Any:
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return None
    store = dist.PrefixStore(f"{role}/cpu", place.store)
    gloo = dist.ProcessGroupGloo(store, place.rank, place.size, timeout=place.timeout)
    gloo.options.global_ranks_in_group = place.global_ranks
    gloo.options.group_name = _inner_name(place, role)
    gloo._set_sequence_number_for_group()
    return gloo


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
        # The caller may hand the same object to several groups.
        chosen = copy.deepcopy(inner_options)
    chosen._timeout = place.timeout
    chosen.global_ranks_in_group = place.global_ranks
    chosen.group_name = _inner_name(place, role)
    backend = nccl(dist.PrefixStore(f"{role}/cuda", place.store), place.rank, place.size, chosen)
    backend._set_sequence_number_for_group()
    return backend


def _inner_name(place: Place, role: str) -> str:
    return place.name if role == "pass" else f"{place.name}.{role}"


def _complete_class(echo_class: Any) -> None:
    """Give the C++ class the attributes that torch looks for in Python and that `Backend` does not bind."""
    if "options" in vars(echo_class):
        return

    def inner_of(self: Any) -> Any:
        for device_type in ("cuda", "cpu"):
            try:
                return self._inner(device_type)
            except (KeyError, ValueError):
                continue
        raise RuntimeError("this group has no inner backend")

    def perform_nocolor_split(self: Any, device: Any) -> None:
        inner_of(self).perform_nocolor_split(device)

    echo_class.options = property(lambda self: inner_of(self).options, doc="Options of the inner backend.")
    echo_class.perform_nocolor_split = perform_nocolor_split
    echo_class._set_default_timeout = lambda self, timeout: self.set_timeout(timeout)
