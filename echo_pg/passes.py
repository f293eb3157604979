"""Signals that tell forward, backward and recomputation apart: hooks on every module call, and a wrapper around
autograd's entry.

The extension keeps what they say per thread: how many modules are entered, the role of the innermost, and whether an
outermost backward run is under way. Python only finds out the roles. Installed when the first group that may quantize
is made; costs 2 to 4 microseconds per module call.
"""

import contextlib
import functools
import sys
import weakref
from typing import Any

PLAIN, EMBEDDING, OUTPUT, OPAQUE = 0, 1, 2, 3

_OUTPUT_CLASSES = ("lmhead", "lm_head", "outputlayer")
_OUTPUT_ATTRIBUTES = frozenset({"lm_head", "output_layer", "embed_out"})
# Modules whose inner calls fire no hooks, so that roles inside are unknown.
_OPAQUE_CLASSES = frozenset({"OptimizedModule", "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule"})

_handles: list[Any] = []
_original_backward: Any = None
_role_of_class: dict[type, int] = {}
# By id, because that is the fastest look-up per module call; the weak reference removes the entry with its module.
_output_layers: dict[int, Any] = {}
_scanned_roots: dict[int, Any] = {}


def install(extension: Any) -> None:
    """Hook all modules and autograd of this process into `extension`; later calls do nothing."""
    if _handles:
        return
    import torch
    from torch.nn.modules import module as modules

    enter_module, exit_module, is_compiling = extension.module_enter, extension.module_exit, torch.compiler.is_compiling

    def on_enter(module: Any, _: Any) -> None:
        if is_compiling():  # the graph must not contain us; calls inside are attributed to the compiled module
            return
        role = _role_of_class.get(type(module))
        if role is None:
            role = _classify(type(module))
        if id(module) in _output_layers:
            role = OUTPUT
        if enter_module(role) == 1 and id(module) not in _scanned_roots:
            _scan(module)

    def on_exit(module: Any, _args: Any, _result: Any) -> None:
        if not is_compiling():
            exit_module()

    _handles.append(modules.register_module_forward_pre_hook(on_enter))
    _handles.append(modules.register_module_forward_hook(on_exit, always_call=True))
    _wrap_backward(extension)
    extension.set_hooks_installed(True)


def uninstall(extension: Any) -> None:
    """Undo `install`. Call it outside of any module call or backward run, which would otherwise stay open."""
    global _original_backward
    if not _handles:
        return
    for handle in _handles:
        handle.remove()
    _handles.clear()
    import torch

    _rebind_backward(torch.autograd.graph._engine_run_backward, _original_backward)
    _original_backward = None
    _output_layers.clear()
    _scanned_roots.clear()
    extension.set_hooks_installed(False)


def role_of(module: Any) -> int:
    """The role under which calls from inside `module` are booked."""
    return OUTPUT if id(module) in _output_layers else _classify(type(module))


def _classify(module_class: type) -> int:
    """The role that a class alone tells, remembered for the next call."""
    from torch import nn

    name = module_class.__name__
    if any(base.__name__ in _OPAQUE_CLASSES for base in module_class.__mro__):
        role = OPAQUE
    elif issubclass(module_class, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in name:
        role = EMBEDDING
    else:
        role = OUTPUT if any(part in name.lower() for part in _OUTPUT_CLASSES) else PLAIN
    _role_of_class[module_class] = role
    return role


def _scan(root: Any) -> None:
    """Find the output layers below an outermost module: by attribute name, or by asking the model. Parts of an output
    layer belong to it."""
    _remember(_scanned_roots, root)
    found = [module for name, module in root.named_modules() if name.rpartition(".")[2] in _OUTPUT_ATTRIBUTES]
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if callable(ask):
            with contextlib.suppress(Exception):  # models without such a layer answer with None or an error
                found.append(ask())
    for layer in found:
        for part in layer.modules() if layer is not None else ():
            _remember(_output_layers, part)


def _remember(table: dict[int, Any], module: Any) -> None:
    key = id(module)
    table[key] = weakref.ref(module, lambda _: table.pop(key, None))


def _wrap_backward(extension: Any) -> None:
    global _original_backward
    import torch

    original = _original_backward = torch.autograd.graph._engine_run_backward
    enter, leave, is_compiling = extension.backward_enter, extension.backward_exit, torch.compiler.is_compiling

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        enter()
        try:
            return original(*args, **kwargs)
        finally:
            leave()

    _rebind_backward(original, run_backward)


def _rebind_backward(old: Any, new: Any) -> None:
    """Exchange the entry wherever a module imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("_engine_run_backward") is old:
            module._engine_run_backward = new  # type: ignore[attr-defined]
