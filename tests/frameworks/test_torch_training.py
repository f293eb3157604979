"""A small tensor-parallel transformer learns bytes of English in plain PyTorch: how far echo's losses and gradients are
from those of the exact backend. Same seed, same batches; everything repeats to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_of

from echo_pg.bench import transformer
from echo_pg.bench.recompute import compare

STEPS = 50


def train(group: Any, steps: int, device: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of all steps, and this rank's part of the first step's gradient."""
    model = transformer.make(transformer.mesh_over(group, device), device=device, layers=4)
    optimizer = transformer.MasterAdamW(model, 1e-3)
    batches = transformer.batches(transformer.text(), 8, 64)
    losses, first = [], []
    for step in range(steps):
        tokens, targets = (part.to(device) for part in next(batches))
        loss = transformer.loss_of(model, tokens, targets)
        loss.backward()
        if step == 0:
            first = [transformer.local(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def run_trainings(rank: int, size: int) -> dict[str, Any]:
    import echo_pg

    device = device_of(rank)

    def echo_group(**changes: Any) -> Any:
        return dist.new_group(backend="echo", pg_options=echo_pg.Options(min_bytes=0, **changes))

    inner = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    exact, gradient = train(inner, STEPS, device)
    off, _ = train(echo_group(policy="off"), 10, device)
    found: dict[str, Any] = {"exact": exact, "off": off, "cosine": {}}
    for name, changes in (("echo", {}), ("no feedback", {"feedback": False})):
        found[name], first = train(echo_group(**changes), STEPS, device)
        found["cosine"][name] = 1 - compare(first, gradient)[1]
    _, first = train(echo_group(bits=8), 1, device)
    found["cosine"]["8 bits"] = 1 - compare(first, gradient)[1]
    return found


def test_losses_and_gradients_against_the_exact_backend() -> None:
    found = run_ranks(run_trainings, 2, timeout=150, env={"ECHO_LOG": "off"})[0]
    exact, last = found["exact"], slice(STEPS - 10, STEPS)
    assert found["off"] == exact[:10]

    def distance(name: str) -> float:
        return sum(abs(x - y) for x, y in zip(found[name][last], exact[last], strict=True)) / 10

    off, without = distance("echo"), distance("no feedback")
    print(f"loss {sum(exact[last]) / 10:.4f}, off by {off:.5f}, without feedback {without:.5f}")
    print("cosine of the first gradient:", {name: round(value, 5) for name, value in found["cosine"].items()})
    assert off < 0.01 * sum(exact[last]) / 10
    assert off < without
    assert found["cosine"]["8 bits"] >= 0.99
    assert exact[-1] < exact[0] - 1, "it learns"
