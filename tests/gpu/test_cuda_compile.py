"""Blocks compiled with `mode="reduce-overhead"`: Inductor records their all-reduces into CUDA graphs, and replays them
with other values to the bytes that the same blocks compute unrecorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from echo_pg.bench import transformer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
STEPS = 8
LAYERS = 3


def train(device: torch.device, size: int, mode: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Loss and gradients of each step, and the quantized calls that the host had made after it."""
    from torch.distributed.device_mesh import init_device_mesh

    import echo_pg

    torch._dynamo.reset()
    before = calls = echo_pg.stats(dist.group.WORLD)["calls_quantized"]
    model = transformer.make(init_device_mesh("cuda", (size,)), device=device, layers=LAYERS)
    for i in range(LAYERS):
        model.blocks[i] = torch.compile(model.blocks[i], mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # DTensors and tensors, one at a time
    batches = transformer.batches(transformer.text(), 4, 32)
    steps, counts = [], []
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        inputs, following = (part.to(device) for part in next(batches))
        loss = transformer.loss_of(model, inputs, following)
        loss.backward()
        gradients = {
            name: parameter.grad.to_local().cpu() if hasattr(parameter.grad, "to_local") else parameter.grad.cpu()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        steps.append({"loss": loss.item()} | gradients)
        optimizer.step()
        optimizer.zero_grad()
        calls = echo_pg.stats(dist.group.WORLD)["calls_quantized"]
        counts.append(calls - before)
        before = calls
    return steps, counts


def run_modes(rank: int, size: int) -> dict[str, Any]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)  # an embedding's gradient is a sum in any order otherwise
    return {mode: train(device, size, mode) for mode in ("default", "reduce-overhead")}


def first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str | None:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.keys() != b.keys():
            return f"step {step}: {a.keys() ^ b.keys()}"
        for name in a:
            if not torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])):
                worst = (torch.as_tensor(a[name]).double() - torch.as_tensor(b[name]).double()).abs().max().item()
                return f"step {step}, {name}: differs by {worst}"
    return None


def test_recorded_blocks_equal_unrecorded_ones() -> None:
    environment = {"ECHO_MIN_BYTES": "0", "ECHO_ALLOW_SHARED_GPU": "1", "ECHO_LOG": "off"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # asked for where algorithms are to be deterministic
    for found in run_ranks(run_modes, 2, backend="echo", env=environment, timeout=280):
        plain, plain_calls = found["default"]
        recorded, recorded_calls = found["reduce-overhead"]
        losses = [step["loss"] for step in plain]
        assert len(set(losses)) == STEPS, "every step has values of its own"
        # Two sums of each block forward; backward one for each layer that splits columns: query, key, value, up.
        assert plain_calls == [6 * LAYERS] * STEPS, plain_calls
        assert recorded_calls[-4:] == [0] * 4, (
            f"the last steps are replays, which the host does not see: {recorded_calls}"
        )
        assert first_difference(plain, recorded) is None, first_difference(plain, recorded)
