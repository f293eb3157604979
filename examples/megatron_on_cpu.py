"""Megatron-core asks CUDA by name for a few things; here the CPU answers, so that Megatron runs where there is no GPU.

For trying out and for tests: slow, but the same program and the same collectives. Nothing in it has to do with echo.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and say that they are CUDA tensors where their type is asked."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def install() -> None:
    """Let the CPU answer in this process; call it once, on the thread that trains, before a model is made."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args: torch.cpu.current_stream()
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _CpuForCuda().__enter__()
