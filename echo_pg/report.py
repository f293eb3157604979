"""The calls a user makes beside torch.distributed's own: what would be quantized and why, what was, and how to say
otherwise."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import build
from .options import Options

DIRECTIONS = ("forward", "backward", "recompute")
# What stats() has even where no echo group exists.
_COUNTERS = ("calls_quantized", "bytes_quantized", "calls_forwarded", "bytes_forwarded", "wire_bytes", "state_bytes")


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: true if the call would be quantized."""

    quantized: bool
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.quantized

    def __str__(self) -> str:
        call = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{'quantized' if self.quantized else 'exact'}: {self.reason}" + (f"\n  for {call}" if call else "")


def explain(
    tensor: Any = None,
    *,
    numel: int | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    group: Any = None,
    options: Options | None = None,
    **facts: Any,
) -> Explanation:
    """Whether an all-reduce would be quantized, and why; decided by the function that decides real calls, without
    communicating.

    Args:
        tensor: a tensor as it would be reduced, any shape; or give `numel` or `shape`, and `dtype` (torch.dtype or
            name, default bfloat16).
        group: an echo group: its options, size and description count. Without one, `options` (default: `Options()`) and
            two ranks.
        facts: the situation, where it differs from a call inside a plain module's forward: op="SUM", device="cpu",
            context="forward" | "backward" | "recompute" | "none", role=0 (1 embedding, 2 output layer), group_size,
            group_desc, coalesced, exact, device_supported (default: by this build), and others that the error for an
            unknown name lists.

    Returns the answer with the facts it rests on, among them `min_bytes`, the size in bytes that applies on the device.
    With a tensor and a group and nothing else, the answer is for a call made here and now, in the module and pass that
    are running.

    Raises ValueError for a group that is no echo group, or for unknown facts.
    """
    extension = build.extension()
    pg = _echo_of(group) if group is not None else None
    if tensor is not None and pg is not None and not facts:
        quantized, reason = pg._explain(tensor)
        found = _facts_of_tensor(tensor)
        return Explanation(quantized, reason, found | _limit(pg._config, found["device"]))
    known = _facts_of_tensor(tensor) if tensor is not None else _facts_of_size(numel, shape, dtype)
    if pg is not None:
        known |= {"group_size": pg.size(), "group_desc": pg._desc()}
    known |= facts
    config = pg._config if pg is not None else (options or Options()).to_config()
    quantized, reason = extension.decide(config, known)
    return Explanation(quantized, reason, known | _limit(config, known.get("device", "cpu")))


def stats(group: Any = None) -> dict[str, Any]:
    """What was quantized and forwarded so far, on this rank: of `group`, or summed over all echo groups that exist.

    Returns calls_quantized, bytes_quantized (of tensors), calls_forwarded, bytes_forwarded, forwarded (reason -> calls
    and bytes), wire_bytes (sent by this rank, padding included), state_bytes, passes and sites (quantized calls of the
    pass under way or just over) by direction; for one group also rank, size, min_bytes (bytes from which on tensors are
    quantized, by device type: "auto" as the number it means there), fabric ("peer", "wire" or "none" before the first
    quantized call), fabric_reason (why not peer, where that was tried), fault and, with
    `Options(diagnostics=True)`, the norms of the error [6.1]. A call recorded into a CUDA graph counts once, its
    replays do not.

    Raises ValueError for a group that is no echo group.
    """
    if group is not None:
        return dict(_echo_of(group)._stats())
    total: dict[str, Any] = dict.fromkeys(_COUNTERS, 0) | {"forwarded": {}}
    total |= {name: dict.fromkeys(DIRECTIONS, 0) for name in ("passes", "sites")}
    groups = live_groups()
    of_one_group = ("rank", "size", "min_bytes", "diagnostics")
    for pg in groups:
        _add(total, {name: value for name, value in pg._stats().items() if name not in of_one_group})
    return total | {"groups": len(groups)}


def new_pass(direction: str, group: Any = None) -> None:
    """Say that a pass starts with the next call, where no module call or autograd run shows it; same on all ranks [5].

    Args:
        direction: "forward", "backward" or "recompute"; later calls count as this direction.
        group: an echo group; None: all of the process.
    """
    _check_direction(direction)
    if group is None:
        build.extension().new_pass(direction)
    else:
        _echo_of(group)._new_pass(direction)


def state_dict(group: Any = None) -> dict[str, int | None]:
    """What the group holds from one pass to the next, to be saved with a training state; call it between passes.

    That is one number, {"version": 1, "forward_sites": sites of the last forward pass or None}, which `early_sites` as
    a fraction refers to; with other options it changes nothing. Feedback states start anew with every pass, so nothing
    else has to be saved for a resumed run to give the same bytes.

    Args:
        group: an echo group; None: the default group. Equal on all of its ranks.

    Raises ValueError for a group that is no echo group.
    """
    return {"version": 1, "forward_sites": _echo_of(group)._last_forward_sites()}


def load_state_dict(state: Mapping[str, Any], group: Any = None) -> None:
    """Take up what `state_dict` gave, before the group's first quantized call; the same state on all ranks.

    Raises ValueError for anything that is no such state, for a group that is no echo group, and once the group has
    quantized.
    """
    if not isinstance(state, Mapping) or set(state) != {"version", "forward_sites"} or state["version"] != 1:
        raise ValueError(f"{state!r} is no state of an echo group, {{'version': 1, 'forward_sites': ...}}")
    sites = state["forward_sites"]
    if sites is not None and (not isinstance(sites, int) or isinstance(sites, bool) or not 0 <= sites < 1 << 62):
        raise ValueError(f"forward_sites={sites!r} must be None or a count of at least 0")
    pg = _echo_of(group)
    if sites is not None:
        pg._resume_after(sites)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Within this block no call of this process is quantized. Must enclose the same calls on all ranks. Nests."""
    extension = build.extension()
    extension.exact_enter()
    try:
        yield
    finally:
        extension.exact_exit()


def all_reduce(tensor: Any, group: Any = None, direction: str = "forward", async_op: bool = False) -> Any:
    """Sum `tensor` over the group in place, quantized whatever the policy says: for engines that choose their calls
    themselves [4.1]. Within `exact()`, and in a group made with ECHO_OFF=1, the sum is exact.

    Args:
        tensor: dense float32, bfloat16 or float16 tensor of any shape and numel >= 1, on a device of the group.
        group: an echo group; None: the default group.
        direction: the pass that it belongs to, "forward", "backward" or "recompute"; announce its start with
            `new_pass`.
        async_op: return a Work to wait for; otherwise wait here.

    Raises ValueError for unsupported tensors or a group that is no echo group, DistBackendError where a rank fails or
    is late.
    """
    _check_direction(direction)
    work = _echo_of(group)._all_reduce(tensor, async_op, direction)
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} must be one of {', '.join(map(repr, DIRECTIONS))}")


def _facts_of_tensor(tensor: Any) -> dict[str, Any]:
    import torch

    sparse = tensor.layout != torch.strided
    return (
        {
            "numel": tensor.numel(),
            "ndim": tensor.dim(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.type,
        }
        | _row(tensor.shape)
        | ({"sparse": True} if sparse else {})
    )


def _facts_of_size(numel: int | None, shape: Sequence[int] | None, dtype: Any) -> dict[str, Any]:
    if (numel is None) == (shape is None):
        raise ValueError("explain needs a tensor, or one of numel= and shape=")
    count = numel if shape is None else math.prod(shape)
    dims = 2 if shape is None else len(shape)
    facts = {"numel": count, "ndim": dims, "dtype": str(dtype or "bfloat16").removeprefix("torch.")}
    return facts | _row(shape or ())


def _limit(config: Any, device_type: str) -> dict[str, int]:
    """The size that was asked for on such a device, where there is one."""
    found = getattr(config, f"min_bytes_{device_type}", None)
    return {} if found is None else {"min_bytes": found}


def _row(shape: Sequence[int]) -> dict[str, int]:
    """The length of the last dimension, where there is one."""
    return {"row_elems": shape[-1]} if len(shape) else {}


def _add(total: dict[str, Any], values: dict[str, Any]) -> None:
    """Sum numbers, merge dictionaries, and leave out what cannot be summed."""
    for name, value in values.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[name] = total.get(name, 0) + value


def echo_in(group: Any) -> Any:
    """The echo backend of a c10d group, or None. Under TORCH_DISTRIBUTED_DEBUG=DETAIL it sits inside a checking
    wrapper."""
    echo_class = build.extension().ProcessGroupEcho
    for device in getattr(group, "_device_types", ()):  # a rank outside of it holds a number instead
        backend = group._get_backend(device)
        while hasattr(backend, "wrapped_pg"):
            backend = backend.wrapped_pg
        if isinstance(backend, echo_class):
            return backend
    return None


def _echo_of(group: Any) -> Any:
    import torch.distributed as dist

    pg = dist.group.WORLD if group is None else group
    if pg is None:
        raise ValueError("there is no default process group; call init_process_group first")
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError(f"{group!r} is no process group that this rank is a member of")
    found = echo_in(pg)
    if found is None:
        raise ValueError(f"the group uses the backend {dist.get_backend(pg)!r}, not 'echo'")
    return found


def live_groups() -> list[Any]:
    """The echo backends of all groups that torch.distributed knows now, each once."""
    from torch.distributed import distributed_c10d as c10d

    found = [echo_in(pg) for pg in c10d._world.pg_map if isinstance(pg, c10d.ProcessGroup)]
    return [pg for pg in found if pg is not None]
