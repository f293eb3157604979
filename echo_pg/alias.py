"""Lets "nccl" or "gloo" mean echo, for programs whose backend name cannot be changed: ECHO_REPLACE and `python -m
echo_pg run`.

torch's own names are handled by fixed branches that no plugin can take over, so the two functions that accept a name
are wrapped, and those that tell it: programs and torch itself choose their ways by what get_backend() says, and what
is called "nccl" keeps its objects and barriers on the GPU. echo's inner groups are constructed as classes and never
come through here.
"""

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .registration import NAME

_replaced: set[str] = set()
_asked: dict[str, str] = {}  # by name of an echo group: the backend that the program asked for
_asking: contextvars.ContextVar[str | None] = contextvars.ContextVar("_asking", default=None)  # by the call under way
_originals: dict[str, Callable[..., Any]] = {}


def install(names: Iterable[str]) -> None:
    """From now on each of `names` ("nccl", "gloo") given to init_process_group or new_group means echo, and get_backend
    says the name that was given. Adds to earlier calls."""
    from torch.distributed import distributed_c10d as c10d

    _replaced.update(names)
    if not _replaced or _originals:
        return
    for function, make in (
        ("init_process_group", _translating),
        ("new_group", _translating),
        ("get_backend", _naming),
        ("_get_object_coll_device", _placing),
    ):
        original = getattr(c10d, function)
        _originals[function] = original
        rebind(function, original, make(original))


def uninstall() -> None:
    """Undo `install`, for tests."""
    from torch.distributed import distributed_c10d as c10d

    for function, original in _originals.items():
        rebind(function, getattr(c10d, function), original)
    _originals.clear()
    _replaced.clear()
    _asked.clear()


def translate(backend: str) -> str:
    """The backend string with the replaced names exchanged: "nccl" -> "echo", "cpu:gloo,cuda:nccl" ->
    "cpu:gloo,cuda:echo"."""
    if ":" not in backend:
        return NAME if backend.lower() in _replaced else backend
    pairs = [pair.split(":") for pair in backend.lower().split(",")]
    mapped = [[*pair[:-1], NAME if pair[-1] in _replaced else pair[-1]] for pair in pairs]
    if all(pair[-1] == NAME for pair in mapped):
        # The plain name makes the same one instance, and torch up to 2.13 gives only plain names a default backend.
        return NAME
    return ",".join(":".join(pair) for pair in mapped)


def _translating(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments.get("backend")
        if asked is None and original.__name__ == "init_process_group":
            asked = _default_name(call.arguments.get("device_id"))
        if asked is not None and (means := translate(str(asked))) != str(asked).lower():
            call.arguments["backend"] = means
            _keep_default_timeout(call.arguments, str(asked))
        token = _asking.set(None if asked is None else str(asked).lower())
        try:
            made = original(*call.args, **call.kwargs)
        finally:
            _asking.reset(token)
        group = _default_group() if original.__name__ == "init_process_group" else made
        if asked is not None and hasattr(group, "group_name"):
            _asked[group.group_name] = str(asked).lower()
        return made

    return wrapper


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        name = original(group)
        if name != NAME:
            return name
        return _backend_name(_asked_for(group) or name)

    return get_backend


def _placing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_object_coll_device(group: Any = None) -> str:
        import torch

        found = original(group)
        # torch asks for all groups, and echo's alone have both devices.
        stands_for_nccl = found == "cpu" and _originals["get_backend"](group) == NAME and _asked_for(group) == "nccl"
        return "cuda" if stands_for_nccl and torch.cuda.is_available() else str(found)

    return _get_object_coll_device


def stands_for_nccl() -> bool:
    """Whether the echo group that is being made was called "nccl"."""
    return (_asking.get() or _asked_for(None)) == "nccl"


def _asked_for(group: Any) -> str | None:
    """The name under which the program asked for an echo group. Groups that nobody named, as those of a mesh, have the
    default group's backend."""
    default = _default_group()
    names = [g.group_name for g in (group or default, default) if g is not None]
    return next((_asked[known] for known in names if known in _asked), None)


def _backend_name(asked: str) -> str:
    """As torch writes it: some of its own code compares names by identity."""
    from torch.distributed import Backend

    return asked if ":" in asked else Backend(asked)


def _default_group() -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d.GroupMember.WORLD


def _default_name(device_id: Any) -> str | None:
    """The backend that torch would pick for init_process_group() without a name."""
    import torch

    device_type = getattr(device_id, "type", None) or torch._C._get_accelerator().type
    return torch.distributed.Backend.default_device_backend_map.get(device_type)


def _keep_default_timeout(arguments: dict[str, Any], name: str) -> None:
    """NCCL's default time-out is shorter than other backends'; a program that relies on it keeps it."""
    from torch.distributed import distributed_c10d as c10d

    if arguments.get("timeout") is None:
        arguments["timeout"] = c10d._get_default_timeout(c10d.Backend(name.lower()))


def rebind(function: str, old: Any, new: Any) -> None:
    """Exchange a function of torch.distributed wherever a module holds it by name: torch imports it into several of its
    own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(function) is old:
            setattr(module, function, new)
