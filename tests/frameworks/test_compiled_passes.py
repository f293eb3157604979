"""Under torch.compile (Inductor), too, forward, backward and recomputation are recognised once each per micro-batch.

Checkpoints are around compiled blocks. Inside a compiled model torch 2.13 cannot save DTensors for them, whatever the
backend ("expected all tensors_saved_with_vc_check to be Tensors").
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_of
from test_torch_passes import ENV, LAYERS, Watch


def micro_batches(watch: Watch, model: nn.Module) -> dict[str, tuple[int, int, int, int]]:
    """Passes and sums of three micro-batches of one step, then of an evaluation, all after compilation."""
    watch.loss(model).backward()
    model.eval()
    with torch.no_grad():
        model(watch.batch()[0])
    model.train()
    watch.look()
    for seed in range(3):
        watch.loss(model, seed).backward()
    found = {"three micro-batches": watch.look()}
    model.eval()
    with torch.no_grad():
        model(watch.batch()[0])
    model.train()
    found["an evaluation"] = watch.look()
    losses = [watch.loss(model, seed) for seed in range(2)]
    for loss in losses:
        loss.backward()
    found["two forwards, then two backwards"] = watch.look()
    return found


def run_compiled(rank: int, size: int) -> dict[str, Any]:
    device = device_of(rank)
    watch = Watch(device, init_device_mesh(device.type, (size,)))
    found = {}
    for name, wrap in (
        ("plain", None),
        ("non-reentrant", functools.partial(checkpoint, use_reentrant=False)),
        ("reentrant", functools.partial(checkpoint, use_reentrant=True)),
    ):
        torch._dynamo.reset()
        model = watch.another()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block)
        model.wrap = wrap
        found[f"blocks, {name}"] = micro_batches(watch, model)
    torch._dynamo.reset()
    found["whole model"] = micro_batches(watch, torch.compile(watch.another()))
    torch._dynamo.reset()
    model = watch.another()
    model.compile()
    found["whole model in place"] = micro_batches(watch, model)
    return found


def rows(again: int, recomputed: int) -> dict[str, tuple[int, int, int, int]]:
    """Passes (forward, backward, recompute) and sums: 4 forward, 8 backward, and those that are made again; `again`
    passes and `recomputed` sums per backward."""
    return {
        "three micro-batches": (3, 3, 3 * again, 3 * (12 + recomputed)),
        "an evaluation": (1, 0, 0, 4),
        "two forwards, then two backwards": (2, 2, 2 * again, 2 * (12 + recomputed)),
    }


def test_compiled_blocks_and_models() -> None:
    first, second = run_ranks(run_compiled, 2, backend="echo", env=ENV, timeout=300)
    assert first == second
    assert first == {
        "blocks, plain": rows(0, 0),
        "blocks, non-reentrant": rows(LAYERS, 2 * LAYERS),  # a compiled block is run again as a whole
        "blocks, reentrant": rows(LAYERS, 2 * LAYERS),
        "whole model": rows(0, 0),
        "whole model in place": rows(0, 0),
    }
