"""How far the gradient of a first training step under DeepSpeed and under Megatron-core is from that of the exact
backend: same seed, same data. test_torch_training.py and test_huggingface_training.py ask the same of plain PyTorch and
of Hugging Face, beside the losses."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import deepspeed_runs
import pytest
import test_megatron
import torch
from ranks import run_ranks
from torch import Tensor

EXACT = "nccl" if torch.cuda.is_available() else "gloo"
# Name -> backend and variables.
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "exact": (EXACT, {}),
    "off": ("echo", {"ECHO_POLICY": "off"}),
    "8 bits": ("echo", {"ECHO_BITS": "8"}),
    "4 bits": ("echo", {}),
}
LEAST = 0.99  # cosine at 8 bits; at 4 bits it is told
ENV = {"ECHO_MIN_BYTES": "0", "ECHO_LOG": "off"}


def flat(gradients: Iterable[Tensor | None]) -> Tensor:
    """One vector [elements], float64 on the CPU, of this rank's parts of a model's gradients. A parameter without a
    gradient is an error: it would go unnoticed."""
    parts = []
    for gradient in gradients:
        assert gradient is not None, "a parameter has no gradient"
        parts.append(gradient.detach().double().flatten().cpu())
    return torch.cat(parts)


def cosine(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of the whole gradient, given as one vector per rank; what ranks hold alike counts once per rank. NaN if either is
    zero all over."""
    pairs = list(zip(found, exact, strict=True))
    product = sum(float(x @ y) for x, y in pairs)
    lengths = [math.sqrt(sum(float(x @ x) for x in side)) for side in (found, exact)]
    return product / math.prod(lengths) if all(lengths) else math.nan


def in_turn(gradient: Callable[[str, str], Tensor]) -> dict[str, Tensor]:
    """What gradient(name, backend) gives under each of RUNS."""
    found = {}
    for name, (backend, variables) in RUNS.items():
        os.environ.update(variables)
        found[name] = gradient(name, backend)
        for variable in variables:
            del os.environ[variable]
    return found


def run_deepspeed(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    deepspeed_runs.environment(rank, size, 1)
    deepspeed = deepspeed_runs.import_deepspeed()

    def gradient(name: str, backend: str) -> Tensor:
        store = f"file://{folder}/{name.replace(' ', '-')}"
        deepspeed.init_distributed(backend, init_method=store, rank=rank, world_size=size)
        engine = deepspeed.initialize(model=deepspeed_runs.llama(), config=deepspeed_runs.config())[0]
        tokens = next(deepspeed_runs.batches())
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        found = flat(parameter.grad for parameter in engine.module.parameters())
        engine.destroy()
        deepspeed.comm.destroy_process_group()
        return found

    return in_turn(gradient)


def run_megatron(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    def gradient(name: str, backend: str) -> Tensor:
        found: list[Tensor] = []
        with test_megatron.megatron(rank, size, folder, backend) as device, pytest.MonkeyPatch.context() as patch:
            import megatron_core

            make = megatron_core.make_model

            def noting(*args, **kwargs):
                """The gradients are complete, and not clipped yet, where the optimizer takes its step."""
                model, optimizer = make(*args, **kwargs)
                step = optimizer.step

                def noted():
                    found.append(flat(parameter.main_grad for parameter in model.parameters()))
                    return step()

                optimizer.step = noted
                return model, optimizer

            patch.setattr(megatron_core, "make_model", noting)
            test_megatron.train(device, 1, 1, shape=(64, 8))
        (only,) = found
        return only

    return in_turn(gradient)


@pytest.mark.parametrize("framework", ["DeepSpeed", "Megatron-core"])
def test_the_first_gradient_points_the_same_way(framework: str, tmp_path: Path) -> None:
    """On CPU, at 8 and 4 bits: DeepSpeed 0.999977 and 0.999547, Megatron 0.999993 and 0.999596."""
    run = run_deepspeed if framework == "DeepSpeed" else run_megatron
    ranks = run_ranks(run, 2, str(tmp_path), backend=None, env=ENV, timeout=200)
    of = {name: [found[name] for found in ranks] for name in RUNS}
    for off, exact in zip(of["off"], of["exact"], strict=True):
        assert torch.equal(off, exact), "switched off, it is the exact backend's to the bit"
    eight, four = (cosine(of[name], of["exact"]) for name in ("8 bits", "4 bits"))
    said = f"{framework}: cosine of the first gradient {eight:.6f} at 8 bits, {four:.6f} at 4"
    print(said)
    assert LEAST <= eight < 1, said
    assert four < eight, said
