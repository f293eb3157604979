"""Lets "nccl" or "gloo" mean echo, for programs whose backend name cannot be changed: ECHO_REPLACE and `python -m
echo_pg run`.

torch's own names are handled by fixed branches that no plugin can take over, so the two functions that accept a name
are wrapped. echo's inner groups are constructed as classes and never come through here.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .registration import NAME

_replaced: set[str] = set()
_originals: dict[str, Callable[..., Any]] = {}


def install(names: Iterable[str]) -> None:
    """From now on each of `names` ("nccl", "gloo") given to init_process_group or new_group means echo. Adds to earlier
    calls."""
    from torch.distributed import distributed_c10d as c10d

    _replaced.update(names)
    if not _replaced or _originals:
        return
    for function in ("init_process_group", "new_group"):
        original = getattr(c10d, function)
        _originals[function] = original
        _rebind(function, original, _translating(original))


def uninstall() -> None:
    """Undo `install`, for tests."""
    from torch.distributed import distributed_c10d as c10d

    for function, original in _originals.items():
        _rebind(function, getattr(c10d, function), original)
    _originals.clear()
    _replaced.clear()


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
        return original(*call.args, **call.kwargs)

    return wrapper


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


def _rebind(function: str, old: Any, new: Any) -> None:
    """Exchange the function wherever a module holds it by name: torch imports it into several of its own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(function) is old:
            setattr(module, function, new)
