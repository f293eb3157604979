"""What torch asks of a backend in Python alone, by attributes that `Backend` does not bind or by functions that know only
its own backends."""

import copy
import functools
from typing import Any


def complete(echo_class: Any) -> None:
    """Give ProcessGroupEcho those attributes, and torch the knowledge that its groups are not split by splitting a
    communicator. May be called any number of times."""
    if "options" in vars(echo_class):
        return
    echo_class.options = property(_options, doc="A copy of the inner NCCL group's options, or a GroupOptions.")
    echo_class.perform_nocolor_split = _perform_nocolor_split
    echo_class._set_default_timeout = lambda self, timeout: self.set_timeout(timeout)
    _never_a_split_source(echo_class)


def copy_nccl_options(given: Any) -> Any:
    """An independent copy: one object may be handed to several groups, and each writes into its own."""
    try:
        return copy.deepcopy(given)
    except TypeError:  # torch 2.9
        copied = type(given)(is_high_priority_stream=given.is_high_priority_stream)
        copied.config = given.config
        return copied


def _options(group: Any) -> Any:
    try:
        inner = group._inner("cuda")
    except ValueError:
        return group._options()
    return copy_nccl_options(inner.options) if inner.name() == "nccl" else group._options()


def _perform_nocolor_split(group: Any, device: Any) -> None:
    """What torch has ranks do that are not in a new group, so that NCCL can split its communicator among all ranks.
    Groups derived from echo's have communicators of their own, so there is nothing to take part in."""


def _never_a_split_source(echo_class: Any) -> None:
    """Keep torch from splitting new groups of other backends off an echo default group: for `new_group(backend="nccl")`
    it would hand ProcessGroupEcho to NCCL as the group to split."""
    from torch.distributed import distributed_c10d as c10d

    original = getattr(c10d, "_get_split_source", None)
    if original is None:
        return

    @functools.wraps(original)
    def _get_split_source(group: Any) -> Any:
        source = original(group)
        return None if isinstance(source, echo_class) else source

    c10d._get_split_source = _get_split_source
