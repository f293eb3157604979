"""Sequence parallelism sums by reduce-scatter, which echo forwards: who expects 4 bits there is told so, once."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from harness import Warnings, device_of
from ranks import run_ranks
from torch import nn

PASSES = 6


class Gather(torch.autograd.Function):
    """All-gather along the first dimension; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter along the first dimension; its gradient is all-gathered."""

    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return reduce_scatter(partial, group)

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient, ctx.group), None


def reduce_scatter(whole, group):
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


class Block(nn.Module):
    """`sums` says how the block's partial results become sums."""

    def __init__(self, group, sums: str) -> None:
        super().__init__()
        self.group, self.sums = group, sums
        self.linear = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        if self.sums == "reduce-scatter":
            return Scatter.apply(self.linear(Gather.apply(x, self.group)), self.group)
        if self.sums == "all-reduce":
            result = self.linear(x)
            dist.all_reduce(result.data, group=self.group)
            reduce_scatter(result.data, self.group)
            return result
        return self.linear(Gather.apply(x, self.group))  # as sharded data parallelism: reduce-scatter in backward only


def run_blocks(rank: int, size: int) -> dict[str, list[str]]:
    warned = Warnings()
    logging.getLogger("echo_pg").addHandler(warned)
    device = device_of(rank)
    found = {}
    for name, desc, sums in (
        ("in a tensor-parallel group", "tp", "reduce-scatter"),
        ("in a group without a description", None, "reduce-scatter"),
        ("in a data-parallel group", "mesh_dp", "reduce-scatter"),
        ("beside quantized all-reduces", "tp", "all-reduce"),
        ("in backward only", None, "backward"),
    ):
        block = Block(dist.new_group(backend="echo", group_desc=desc), sums).to(device)
        for _ in range(PASSES):
            part = torch.ones(4, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
            block(part).sum().backward()
        found[name] = warned.texts[:]
        warned.texts.clear()
    return found


def test_it_is_warned_of_once_and_only_where_it_is() -> None:
    first, second = run_ranks(run_blocks, 2, env={"ECHO_MIN_BYTES": "0"})
    for name in ("in a tensor-parallel group", "in a group without a description"):
        (text,) = first.pop(name)
        assert text.endswith(
            "nothing was quantized in three passes: sequence parallelism is not quantized (reduce-scatter 4)"
        )
    assert not any(first.values())
    assert not any(second.values())
