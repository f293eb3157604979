"""Forward, backward and recomputation are each recognised once per micro-batch, however a step is put together: the
passes that a group counts, and the sums in each."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_of, needs_four_devices

from echo_pg.bench import transformer

# All recomputed sums are quantized here: only those count as passes.
ENV = {"ECHO_MIN_BYTES": "0", "ECHO_RECOMPUTE": "feedback", "ECHO_LOG": "off"}
LAYERS = 2


class Watch:
    """A tensor-parallel model, and what its group counts from one look to the next."""

    def __init__(self, device: Any, mesh: Any) -> None:
        self.device, self.mesh = device, mesh
        self.model = self.another()
        self.before = self.counters()

    def another(self, seed: int = 0) -> transformer.Transformer:
        return transformer.make(self.mesh, seed, self.device, layers=LAYERS)

    def counters(self) -> dict[str, int]:
        import echo_pg

        stats = echo_pg.stats(self.mesh.get_group())
        return stats["passes"] | {"sums": stats["calls_quantized"]}

    def look(self) -> tuple[int, int, int, int]:
        """Passes since the last look: (forward, backward, recompute), and sums."""
        now = self.counters()
        found = {name: now[name] - self.before[name] for name in now}
        self.before = now
        return found["forward"], found["backward"], found["recompute"], found["sums"]

    def batch(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(transformer.BYTES, (2, 17), generator=generator).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, model: Any = None, seed: int = 0) -> Tensor:
        return transformer.loss_of(self.model if model is None else model, *self.batch(seed))


def plain_and_accumulated(watch: Watch) -> dict[str, Any]:
    found = {}
    watch.loss().backward()
    found["one step"] = watch.look()
    for seed in range(3):
        (watch.loss(seed=seed) / 3).backward()
    found["three micro-batches"] = watch.look()
    with torch.no_grad():
        watch.loss()
    watch.model.eval()
    with torch.inference_mode():
        watch.model(watch.batch()[0])
    watch.model.train()
    found["two evaluations"] = watch.look()
    losses = [watch.loss(seed=seed) for seed in range(2)]
    for loss in losses:
        loss.backward()
    found["two forwards, then two backwards"] = watch.look()
    other = watch.another(seed=1)
    (watch.loss() + watch.loss(other)).backward()
    found["two models, one backward"] = watch.look()
    loss = watch.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    found["backward twice"] = watch.look()
    torch.autograd.grad(watch.loss(), list(watch.model.parameters()))
    found["autograd.grad"] = watch.look()
    return found


def checkpointed(watch: Watch) -> dict[str, Any]:
    found = {}
    for reentrant in (False, True):
        kind = "reentrant" if reentrant else "non-reentrant"
        watch.model.wrap = functools.partial(checkpoint, use_reentrant=reentrant)
        for _ in range(2):
            watch.loss().backward()
        found[f"{kind}, each block"] = watch.look()
        watch.model.blocks_per_segment = LAYERS
        watch.loss().backward()
        found[f"{kind}, all blocks"] = watch.look()
        watch.model.blocks_per_segment = 1
        watch.model.wrap = None
        # Not a module but a function that calls some.
        tokens, _ = watch.batch()
        x = watch.model.embed(tokens)
        x = checkpoint(lambda x: watch.model.blocks[1](watch.model.blocks[0](x)), x, use_reentrant=reentrant)
        watch.look()
        x.float().sum().backward()
        found[f"{kind}, a function's backward"] = watch.look()
    return found


def nested(watch: Watch) -> dict[str, Any]:
    """A reentrant checkpoint around two blocks of which each has one of its own."""

    def inner(x: Tensor) -> Tensor:
        for block in watch.model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return inner(x)

    tokens, _ = watch.batch()
    found = {}
    for name, outer in (("function", inner), ("module", Outer())):
        x = checkpoint(outer, watch.model.embed(tokens), use_reentrant=True)
        watch.look()
        x.float().sum().backward()
        found[f"nested in a {name}"] = watch.look()
    return found


def interrupted(watch: Watch) -> dict[str, Any]:
    """Exceptions in forward, in a recomputation and in backward leave nothing open."""

    class Broken(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.breaks_at = inner, 0

        def forward(self, x: Tensor) -> Tensor:
            self.breaks_at -= 1
            x = self.inner(x)
            if self.breaks_at == 0:
                raise RuntimeError("broken on purpose")
            return x

    broken = Broken(watch.model.blocks[0])
    watch.model.blocks[0] = broken
    found = {}
    broken.breaks_at = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        watch.loss()
    watch.look()
    watch.loss().backward()
    found["after an exception in forward"] = watch.look()
    watch.model.wrap = functools.partial(checkpoint, use_reentrant=True)
    broken.breaks_at = 2
    with pytest.raises(RuntimeError, match="on purpose"):
        watch.loss().backward()
    watch.model.wrap = None
    watch.look()
    watch.loss().backward()
    found["after an exception in a recomputation"] = watch.look()
    loss = watch.loss()
    handle = watch.model.embed.weight.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("hook on purpose")))
    with pytest.raises(RuntimeError, match="hook on purpose"):
        loss.backward()
    handle.remove()
    watch.look()
    watch.loss().backward()
    found["after an exception in backward"] = watch.look()
    return found


def run_one_dimension(rank: int, size: int) -> dict[str, Any]:
    device = device_of(rank)
    watch = Watch(device, init_device_mesh(device.type, (size,)))
    return plain_and_accumulated(watch) | checkpointed(watch) | nested(watch) | interrupted(watch)


def test_tensor_parallel() -> None:
    first, second = run_ranks(run_one_dimension, 2, backend="echo", env=ENV, timeout=120)
    assert first == second
    # Per micro-batch 4 sums forward and 8 backward, and where blocks are recomputed 2 for each; without reentrance a
    # checkpoint stops before its last sum, which nothing saves.
    assert first == {
        "one step": (1, 1, 0, 12),
        "three micro-batches": (3, 3, 0, 36),
        "two evaluations": (2, 0, 0, 8),
        "two forwards, then two backwards": (2, 2, 0, 24),
        "two models, one backward": (2, 1, 0, 24),
        "backward twice": (1, 2, 0, 20),
        "autograd.grad": (1, 1, 0, 12),
        "non-reentrant, each block": (2, 2, 4, 28),
        "non-reentrant, all blocks": (1, 1, 1, 15),
        "non-reentrant, a function's backward": (0, 1, 1, 11),
        "reentrant, each block": (2, 2, 4, 32),
        "reentrant, all blocks": (1, 1, 1, 16),
        "reentrant, a function's backward": (0, 1, 1, 12),
        # The outer checkpoint runs both blocks again, each inner one its own once more.
        "nested in a function": (0, 1, 1 + 2, 16),
        "nested in a module": (0, 1, 1 + 2, 16),
        "after an exception in forward": (1, 1, 0, 12),
        "after an exception in a recomputation": (1, 1, 0, 12),
        "after an exception in backward": (1, 1, 0, 12),
    }


# ---- four ranks
def accumulated_with_ddp(watch: Watch, replicas: Any) -> tuple[int, int, int, int]:
    """no_sync for all micro-batches but the last."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(watch.model)
    model = nn.parallel.DistributedDataParallel(watch.model, process_group=replicas.get_group())
    watch.look()
    with model.no_sync():
        for seed in range(2):
            watch.loss(model, seed).backward()
    watch.loss(model, 2).backward()
    return watch.look()


class Stage(nn.Module):
    """The first or the second half of a model."""

    def __init__(self, model: transformer.Transformer, first: bool) -> None:
        super().__init__()
        self.block = model.blocks[0 if first else 1]
        self.first = first
        if first:
            self.embed = model.embed
        else:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.embed(x)) if self.first else self.lm_head(self.norm(self.block(x)))


def pipelined(watch: Watch, pipeline: Any, checkpointing: bool) -> tuple[int, int, int, int]:
    """1F1B over two stages of two ranks each, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = watch.another()
    index = pipeline.get_local_rank()
    stage_module = Stage(model, index == 0)
    if checkpointing:
        block = stage_module.block
        stage_module.block = None
        stage_module.forward = functools.partial(_checkpointed_stage, stage_module, block)  # type: ignore[method-assign]
    stage = PipelineStage(stage_module, index, 2, watch.device, group=pipeline.get_group())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    tokens = torch.randint(transformer.BYTES, (8, 17), generator=torch.Generator().manual_seed(0)).to(watch.device)
    for _ in range(2):
        watch.look()  # the first step also runs the stage to learn its shapes
        if index == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=[])
    return watch.look()


def _checkpointed_stage(stage: Stage, block: nn.Module, x: Tensor) -> Tensor:
    x = checkpoint(block, stage.embed(x) if stage.first else x, use_reentrant=False)
    return x if stage.first else stage.lm_head(stage.norm(x))


def run_two_dimensions(rank: int, size: int) -> dict[str, Any]:
    device = device_of(rank)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("outer", "tp"))
    found: dict[str, Any] = {}
    for checkpointing in (False, True):
        found[f"1F1B, checkpointing={checkpointing}"] = pipelined(
            Watch(device, mesh["tp"]), mesh["outer"], checkpointing
        )
    found["DDP with no_sync"] = accumulated_with_ddp(Watch(device, mesh["tp"]), mesh["outer"])
    return found


@needs_four_devices
def test_pipeline_and_replicas() -> None:
    for found in run_ranks(run_two_dimensions, 4, backend="echo", env=ENV, timeout=120):
        assert found == {
            "1F1B, checkpointing=False": (4, 4, 0, 4 * 6),  # a stage has half of the sums
            "1F1B, checkpointing=True": (4, 4, 4, 4 * 7),
            "DDP with no_sync": (3, 3, 0, 3 * 12),
        }
