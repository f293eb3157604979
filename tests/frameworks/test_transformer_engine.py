"""The calls of TransformerEngine's Linear, in its own structure: Megatron's layers on GPUs are made of it.

An autograd function that a module applies, or calls directly where gradients are off. It works on two dimensions,
whatever the input's: the row-parallel output is reduced in place and waited for; the column-parallel input gradient is
reduced while the weight's gradient is computed, and waited for at the end. FP8 adds the maximum of its scales.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import DEBUG, device_of, record, table
from ranks import run_ranks
from torch import nn

SEQUENCE, BATCH, HIDDEN = 16, 2, 128


def allreduce(x: torch.Tensor, group: Any, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    return x, dist.all_reduce(x, group=group, async_op=async_op)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, inp, mode, group):
        flat = inp.view(-1, weight.shape[1])
        out = flat @ weight.t()
        if mode == "row":
            out, _ = allreduce(out, group)
        if ctx is not None:
            ctx.save_for_backward(flat, weight)
            ctx.mode, ctx.group, ctx.shape = mode, group, inp.shape
        return out.view(-1, *inp.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_output):
        flat, weight = ctx.saved_tensors
        grad_output = grad_output.reshape(-1, weight.shape[0])
        dgrad, work = grad_output @ weight, None
        if ctx.mode == "column":
            dgrad, work = allreduce(dgrad, ctx.group, async_op=True)
        wgrad = grad_output.t() @ flat
        amax = wgrad.abs().max().float().view(1)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=ctx.group)
        if work is not None:
            work.wait()
        return wgrad, dgrad.view(ctx.shape), None, None


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, mode: str, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5)
        self.mode, self.group = mode, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return LinearFunction.apply(self.weight, x, self.mode, self.group)
        return LinearFunction.forward(None, self.weight, x, self.mode, self.group)


def run_linears(rank: int, size: int) -> dict[str, Any]:
    recorder = record()
    device = device_of(rank)
    group = dist.new_group(backend="echo", group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    torch.manual_seed(1)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN).to(device, torch.bfloat16).requires_grad_()
    torch.manual_seed(2 + rank)
    mlp = nn.Sequential(Linear(HIDDEN, 256, "column", group), Linear(256, HIDDEN, "row", group)).to(device)
    output = mlp(x)
    output.square().sum().backward()
    trained = table(recorder.take())
    with torch.no_grad():
        mlp(x)
    bits = [t.detach().view(torch.int16).tolist() for t in (output, x.grad)]
    return {"trained": trained, "generated": table(recorder.take()), "bits": bits}


def test_its_sums_are_quantized() -> None:
    first, second = run_ranks(run_linears, 2, env=DEBUG | {"ECHO_MIN_BYTES": "0"})
    for found in first, second:
        shape = f"[{SEQUENCE * BATCH}, {HIDDEN}]"
        assert found["trained"] == {
            ("forward", "SUM", "bfloat16", shape, "quantized"): 1,
            ("backward", "SUM", "bfloat16", shape, "quantized"): 1,
            ("backward", "MAX", "float32", "[1]", "not a SUM"): 2,
        }
        assert found["generated"] == {("forward", "SUM", "bfloat16", shape, "quantized"): 1}
    assert first["bits"] == second["bits"], "sums are the same on all ranks, and complete where they are waited for"
