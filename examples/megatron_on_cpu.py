"""Megatron-core asks CUDA by name for a few things; here the CPU answers, so that Megatron runs where there is no GPU.

For trying out and for tests: slow, but the same program and the same collectives. Nothing in it has to do with echo.
Each answer is needed by Megatron-core 0.19.2: without it that stops with "Torch not compiled with CUDA enabled", unless
a comment says otherwise.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, and say that they are CUDA tensors where their type is asked."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # The optimizer makes its loss scale, for one, on "cuda".
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        # Pipeline stages that share the embedding's weights add them up as weight.data.cuda().
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        # The optimizer refuses weights whose type() is not "torch.cuda.BFloat16Tensor" or the like.
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def install() -> None:
    """Let the CPU answer in this process; call it once, on the thread that trains, before a model is made."""
    from megatron.core.tensor_parallel import random

    # Where the data-parallel wrapper puts its buffers of weights and gradients.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # The data-parallel wrapper orders the gradients' collectives after it.
    torch.cuda.current_stream = lambda *args: torch.cpu.current_stream()
    # After each exchange between pipeline stages.
    torch.cuda.synchronize = lambda *args: None
    # The tracker of random states keeps one per kind of parallelism when it is seeded, by this name,
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    # and by this one around attention's dropout and recomputed layers.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # Not an error without it: torch would keep the request until CUDA starts, which is never. Dropout of split
    # activations would then drop the same places on all ranks, and the requests pile up.
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # For what tensors are asked, above.
    _CpuForCuda().__enter__()
