"""What torch asks of a backend in Python alone: attributes that `Backend` does not bind, and functions that know
torch's own backends by class or by name and would leave an echo group out."""

import copy
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import alias, build, report


def complete(echo_class: Any) -> None:
    """Give ProcessGroupEcho those attributes and make those functions serve its groups. May be called any number of
    times."""
    if "options" in vars(echo_class):
        return
    echo_class.options = property(_options, doc="A copy of the inner NCCL group's options, or a GroupOptions.")
    echo_class.perform_nocolor_split = _perform_nocolor_split
    for name in ("register_mem_pool", "deregister_mem_pool"):
        setattr(echo_class, name, _of_inner_nccl(name))
    echo_class._set_default_timeout = lambda self, timeout: self.set_timeout(timeout)
    for make in (_get_split_source, _set_pg_timeout, _add_ephemeral_timeout_for_all_pgs, monitored_barrier):
        _extend(make)


def copy_nccl_options(given: Any) -> Any:
    """An independent copy: one object may be handed to several groups, and each writes into its own."""
    try:
        return copy.deepcopy(given)
    except TypeError:  # torch 2.9
        copied = type(given)(is_high_priority_stream=given.is_high_priority_stream)
        copied.config = given.config
        return copied


def _options(group: Any) -> Any:
    inner = _inner_nccl(group)
    return group._options() if inner is None else copy_nccl_options(inner.options)


def _inner_nccl(group: Any) -> Any:
    try:
        inner = group._inner("cuda")
    except ValueError:
        return None
    return inner if inner.name() == "nccl" else None


def _of_inner_nccl(name: str) -> property:
    """The method `name` of the inner NCCL group, which `Backend` lacks: Megatron registers its buffers with it."""

    def method(group: Any) -> Any:
        inner = _inner_nccl(group)
        if inner is None:
            raise AttributeError(f"'ProcessGroupEcho' object has no attribute {name!r}: no inner group of it is NCCL")
        return getattr(inner, name)

    return property(method, doc=f"The inner NCCL group's {name}; AttributeError over other backends.")


def _perform_nocolor_split(group: Any, device: Any) -> None:
    """What torch has ranks do that are not in a new group, so that NCCL can split its communicator among all ranks.
    Groups derived from echo's have communicators of their own, so there is nothing to take part in."""


def _extend(make: Callable[[Any], Any]) -> None:
    """Exchange the function of torch.distributed that has the name of `make` for what `make` makes of it."""
    from torch.distributed import distributed_c10d as c10d

    original = getattr(c10d, make.__name__, None)
    if original is not None:
        alias.rebind(make.__name__, original, functools.wraps(original)(make(original)))


def _default_group() -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_group()


def _get_split_source(original: Any) -> Any:
    """No new group is split off an echo default group: for `new_group(backend="nccl")` torch would hand NCCL the
    ProcessGroupEcho to split."""

    def extended(group: Any) -> Any:
        source = original(group)
        return None if isinstance(source, build.extension().ProcessGroupEcho) else source

    return extended


def _set_pg_timeout(original: Any) -> Any:
    def extended(timeout: timedelta, group: Any = None) -> None:
        echo = report.echo_in(group or _default_group())
        if echo is None:
            original(timeout, group)
        else:
            echo.set_timeout(timeout)

    return extended


def _add_ephemeral_timeout_for_all_pgs(original: Any) -> Any:
    def extended(timeout: timedelta) -> None:
        original(timeout)
        for echo in report.live_groups():
            if inner := _inner_nccl(echo):
                inner._add_ephemeral_timeout(timeout)

    return extended


def monitored_barrier(original: Any) -> Any:
    """torch up to 2.13 refuses every name but "gloo"."""

    def extended(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        from torch.distributed import distributed_c10d as c10d

        chosen = group or _default_group()
        if report.echo_in(chosen) is None:
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.Backend(c10d.get_backend(group)))
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        c10d._check_valid_timeout(limit)
        return chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    return extended
