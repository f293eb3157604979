"""Signals that tell forward, backward and recomputation apart: hooks on every module call, and wrappers around
autograd's entry and around modules compiled in place.

The extension keeps what they say per thread: how many modules are entered, the role of the innermost, and whether an
outermost backward run is under way. Python only finds out the roles. Installed when the first group that may quantize
is made; costs 2 to 4 microseconds per module call.
"""

import contextlib
import functools
import sys
import weakref
from typing import Any

PLAIN, EMBEDDING, OUTPUT, OPAQUE, RESIDUAL, ALTERNATING = range(6)

_OUTPUT_CLASSES = ("lmhead", "lm_head", "outputlayer")
_OUTPUT_ATTRIBUTES = frozenset({"lm_head", "output_layer", "embed_out"})
# Modules whose inner calls fire no hooks, so that roles inside are unknown.
_SCRIPT_CLASSES = frozenset({"ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule"})
_OPAQUE_CLASSES = _SCRIPT_CLASSES | {"OptimizedModule"}
# DeepSpeed's injected kernels: each rank adds its share of the residual, then the sum is taken over all of it.
_RESIDUAL_CLASSES = frozenset({"DeepSpeedMLP"})
# DeepSpeed Domino: two halves of a batch run side by side and sum in turn, equal shapes in the same places.
_ALTERNATING_CLASSES = frozenset({"DominoModule"})

_handles: list[Any] = []
_original_backward: Any = None
_original_compile: Any = None
_role_of_class: dict[type, int] = {}
# By id, because that is the fastest look-up per module call; the weak reference removes the entry with its module.
_output_layers: dict[int, Any] = {}
_scanned_roots: dict[int, Any] = {}
_harmless_compiled: dict[int, Any] = {}  # compiled modules inside which every sum is that of a plain layer
_judged_compiled: dict[int, Any] = {}


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
        if role == OPAQUE:
            role = _role_of_compiled(module)
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
    _wrap_compile(extension)
    extension.set_hooks_installed(True)


def uninstall(extension: Any) -> None:
    """Undo `install`. Call it outside of any module call or backward run, which would otherwise stay open."""
    global _original_backward, _original_compile
    if not _handles:
        return
    for handle in _handles:
        handle.remove()
    _handles.clear()
    import torch

    _rebind_backward(torch.autograd.graph._engine_run_backward, _original_backward)
    torch.nn.Module.compile = _original_compile
    _original_backward = _original_compile = None
    for table in (_output_layers, _scanned_roots, _harmless_compiled, _judged_compiled):
        table.clear()
    extension.set_hooks_installed(False)


def role_of(module: Any) -> int:
    """The role under which calls from inside `module` are booked."""
    if id(module) in _output_layers:
        return OUTPUT
    role = _classify(type(module))
    return _role_of_compiled(module) if role == OPAQUE else role


def _classify(module_class: type) -> int:
    """The role that a class alone tells, remembered for the next call."""
    from torch import nn

    name = module_class.__name__
    names = {base.__name__ for base in module_class.__mro__}
    if names & _OPAQUE_CLASSES:
        role = OPAQUE
    elif names & _RESIDUAL_CLASSES:
        role = RESIDUAL
    elif names & _ALTERNATING_CLASSES:
        role = ALTERNATING
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


def _role_of_compiled(module: Any) -> int:
    """PLAIN if nothing inside could sum for an embedding or an output layer, else OPAQUE; found out once per module."""
    if id(module) not in _judged_compiled:
        _remember(_judged_compiled, module)
        # Scripted modules have lost the classes of what is inside.
        if not any(base.__name__ in _SCRIPT_CLASSES for base in type(module).__mro__):
            _scan(module)
            inside = (part for part in module.modules() if part is not module)
            if not any(role_of(part) != PLAIN and _may_sum(part) for part in inside):
                _remember(_harmless_compiled, module)
    return PLAIN if id(module) in _harmless_compiled else OPAQUE


def _may_sum(module: Any) -> bool:
    """False for a layer of torch's own that holds all of its parameters itself: it has nothing to sum over ranks."""
    from torch import nn

    whole = type(module) in (nn.Embedding, nn.Linear) and all(
        type(parameter) is nn.Parameter for parameter in module.parameters()
    )
    return not whole or bool(module._forward_hooks or module._forward_pre_hooks)


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


def _wrap_compile(extension: Any) -> None:
    """A module compiled in place runs its hooks in the graph, where ours do nothing: its calls are noted around it."""
    global _original_compile
    import torch

    original = _original_compile = torch.nn.Module.compile
    enter, leave, is_compiling = extension.module_enter, extension.module_exit, torch.compiler.is_compiling

    @functools.wraps(original)
    def compile_in_place(module: Any, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        compiled = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return compiled(*args, **kwargs)
            enter(role_of(module) or _role_of_compiled(module))
            try:
                return compiled(*args, **kwargs)
            finally:
                leave()

        module._compiled_call_impl = call

    torch.nn.Module.compile = compile_in_place


def _rebind_backward(old: Any, new: Any) -> None:
    """Exchange the entry wherever a module imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("_engine_run_backward") is old:
            module._engine_run_backward = new  # type: ignore[attr-defined]
