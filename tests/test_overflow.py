"""Mixed-precision training under echo: an overflow on one rank is seen on all, its step is skipped, the scale halves,
and the next step is the one that would have come anyway. torch's GradScaler here, DeepSpeed's loss scalers in
tests/frameworks/test_deepspeed.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_allreduce import digest
from torch import Tensor

WIDTH = 64
SCALE = 2.0**10


class IntoParallel(torch.autograd.Function):
    """Where a replicated activation enters a tensor-parallel region: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class OutOfParallel(torch.autograd.Function):
    """Where partial results leave it: they are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Model(torch.nn.Module):
    """A replicated layer, then two whose weights are split over the ranks; fp32 weights, fp16 arithmetic."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(11)
        whole = [torch.randn(WIDTH, WIDTH, generator=gen) / math.sqrt(WIDTH) for _ in range(3)]
        self.group = group
        self.replicated = torch.nn.Parameter(whole[0])
        self.column = torch.nn.Parameter(whole[1].chunk(size)[rank].clone())
        self.row = torch.nn.Parameter(whole[2].chunk(size, dim=1)[rank].clone())
        self.poison = False

    def forward(self, x: Tensor) -> Tensor:
        x = IntoParallel.apply(x @ self.replicated.half().t(), self.group)
        hidden = torch.relu(x @ self.column.half().t())
        if self.poison:
            hidden.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), math.inf))
        return OutOfParallel.apply(hidden @ self.row.half().t(), self.group)


def batch(step: int) -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).half()


def train(
    rank: int, size: int, fabric: str, batches: list[int], poisoned: int = -1, halved_after: int = -1
) -> list[tuple[float, str]]:
    """After each step the scale, and a digest of this rank's weights. In step `poisoned` rank 1's gradient overflows
    behind the region's entry, where no gradient of another rank shows it but the summed one."""
    import echo_pg

    options = echo_pg.Options(min_bytes=0, fabric=fabric)
    group = dist.new_group(backend="echo", pg_options=options, group_desc="tp")
    model = Model(rank, size, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    steps = []
    for step in batches:
        model.poison = step == poisoned and rank == 1
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).float().square().mean()).backward()
        assert model.replicated.grad is not None
        assert bool(model.replicated.grad.isfinite().all()) == (step != poisoned), "seen on every rank, and only then"
        scaler.step(optimizer)
        scaler.update(SCALE / 2 if step == halved_after else None)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        steps.append((scaler.get_scale(), digest(weights)))
    stats = echo_pg.stats(group)
    assert stats["passes"] == {"forward": len(batches), "backward": len(batches), "recompute": 0}
    assert stats["calls_quantized"] == 2 * len(batches)
    dist.destroy_process_group(group)
    return steps


def run_scaler(rank: int, size: int, fabric: str) -> None:
    troubled = train(rank, size, fabric, [0, 1, 2, 3], poisoned=1)
    assert [scale for scale, _ in troubled] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
    weights = [digest for _, digest in troubled]
    assert weights[1] == weights[0] and len(set(weights)) == 3, "one step is skipped, and one only"
    # To the byte a run in which that batch never came and the scale was halved by hand: nothing of it is left behind.
    smooth = train(rank, size, fabric, [0, 2, 3], halved_after=0)
    assert smooth == [(SCALE / 2, weights[0]), *troubled[2:]]


@pytest.mark.parametrize("fabric", ["peer", "wire"])
def test_torch_grad_scaler_skips_the_step_on_all_ranks_and_goes_on(fabric: str) -> None:
    run_ranks(run_scaler, 2, fabric)
