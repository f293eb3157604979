"""Tensor-parallel transformers under torch.compile: which of their all-reduces are quantized, and what Inductor does to
them on the way."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from harness import DEBUG, Recorder, device_of, record, table

from echo_pg.bench import transformer

HIDDEN = "[2, 32, 64]"
FORWARD, BACKWARD = ((context, "SUM", "bfloat16", HIDDEN, "quantized") for context in ("forward", "backward"))
BLOCKS = {FORWARD: 2, BACKWARD: 4}  # one block
UNKNOWN = "compiled module, roles unknown"


class Fan(nn.Module):
    """Three layers on one input, whose gradients' sums depend on no other sum."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x) + self.parts[1](x) + self.parts[2](x)


class Compiled:
    """A fresh one-block model per case; `step` gives the table of a second step, after compilation."""

    def __init__(self, rank: int, size: int) -> None:
        self.recorder: Recorder = record()
        self.device = device_of(rank)
        self.mesh = init_device_mesh(self.device.type, (size,))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(transformer.BYTES, (2, 33), generator=generator).to(self.device)
        self.batch = tokens[:, :-1], tokens[:, 1:]

    def model(self, split_vocabulary: bool = False) -> transformer.Transformer:
        torch._dynamo.reset()
        model = transformer.make(self.mesh, device=self.device, layers=1)
        if split_vocabulary:
            parallelize_module(model, self.mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
        return model

    def step(self, model: nn.Module) -> tuple[Counter[tuple[str, ...]], float]:
        for _ in range(2):
            model.zero_grad()
            self.recorder.take()
            loss = transformer.loss_of(model, *self.batch)
            loss.backward()
        return table(self.recorder.take()), loss.item()


def run_cases(rank: int, size: int) -> dict[str, Any]:
    cases = Compiled(rank, size)
    found: dict[str, Any] = {}

    def block_by(name: str, **how: Any) -> None:
        model = cases.model()
        model.blocks[0] = torch.compile(model.blocks[0], **how)
        found[name] = cases.step(model)

    found["eager"] = cases.step(cases.model())
    block_by("block, aot_eager", backend="aot_eager")
    block_by("block, inductor")
    block_by("block, reduce-overhead", mode="reduce-overhead")
    for bucketing in "none", "all":
        torch._dynamo.reset()
        fan = Fan().to(cases.device)
        parallelize_module(fan, cases.mesh, {"parts.*": ColwiseParallel()})
        x = torch.ones(2, 32, 64, dtype=torch.bfloat16, device=cases.device, requires_grad=True)
        with torch._inductor.config.patch(bucket_all_reduces_fx=bucketing):
            torch.compile(fan)(x).sum().backward()
        found[f"fan, bucketing {bucketing}"] = table(cases.recorder.take())

    model = cases.model()
    model.blocks[0].compile(backend="aot_eager")
    found["block in place"] = cases.step(model)
    found["whole model"] = cases.step(torch.compile(cases.model(), backend="aot_eager"))
    model = cases.model()
    model.compile(backend="aot_eager")
    found["whole model in place"] = cases.step(model)
    found["split embedding inside"] = cases.step(torch.compile(cases.model(True), backend="aot_eager"))
    model = cases.model(True)
    model.compile(backend="aot_eager")
    found["split embedding inside, in place"] = cases.step(model)
    return found


def test_compiled() -> None:
    found, other = run_ranks(run_cases, 2, backend="echo", env=DEBUG | {"ECHO_MIN_BYTES": "0"}, timeout=250)
    assert found == other, "ranks decide alike"
    eager = found["eager"]
    assert eager[0] == BLOCKS
    same = ("block, aot_eager", "block in place", "whole model", "whole model in place")
    assert all(found[name] == eager for name in same), "the same sums, and the same loss to the bit"
    for name in "block, inductor", "block, reduce-overhead":
        assert found[name][0] == BLOCKS
    # The embedding's rows lie on different ranks, so one of the three sums is its own, and nobody can tell which.
    hidden = {("forward", "SUM", "bfloat16", HIDDEN, UNKNOWN): 3, BACKWARD: 4}
    for name in "split embedding inside", "split embedding inside, in place":
        assert found[name][0] == hidden
    # Switched on, Inductor's bucketing puts sums that do not depend on each other into one flat tensor.
    assert found["fan, bucketing none"] == {BACKWARD: 3}
    assert found["fan, bucketing all"] == {("backward", "SUM", "bfloat16", "[12288]", "one-dimensional"): 1}
