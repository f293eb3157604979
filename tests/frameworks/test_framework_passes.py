"""Under DeepSpeed and Megatron-core forward, backward and recomputation are recognised once each per micro-batch,
however a step is put together; test_torch_passes.py and test_huggingface.py ask that of plain PyTorch and of Hugging
Face. Accumulation, pipelines and recomputed layers are in test_deepspeed.py and test_megatron.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_runs
import pytest
import test_megatron
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ENV = {"ECHO_MIN_BYTES": "0", "ECHO_LOG": "off"}
Found = dict[str, tuple[int, int, int]]  # (forward, backward, recompute)


def breaks(module: nn.Module, run: Callable[[], Any]) -> None:
    """`run`, in which this module raises on all ranks alike, after what comes before it has been summed."""

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        run()
    handle.remove()


class Looks:
    """The passes of the tensor-parallel group while something ran."""

    def __init__(self, counters: Callable[[], dict[str, int]]) -> None:
        self.counters, self.found = counters, Found()

    def __call__(self, name: str, run: Callable[[], Any]) -> None:
        before = self.counters()
        run()
        after = self.counters()
        self.found[name] = tuple(after[kind] - before[kind] for kind in ("forward", "backward", "recompute"))


def run_deepspeed(rank: int, size: int, folder: str) -> Found:
    deepspeed_runs.environment(rank, size, 1)
    deepspeed = deepspeed_runs.import_deepspeed()
    deepspeed.init_distributed("echo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    engine, other = (
        deepspeed.initialize(model=deepspeed_runs.llama(), config=deepspeed_runs.config())[0] for _ in range(2)
    )
    tokens = next(deepspeed_runs.batches())
    look = Looks(deepspeed_runs.passes)

    def loss(of: Any = engine) -> Any:
        return of(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step(of: Any = engine) -> None:
        of.backward(loss(of))
        of.step()

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            loss()
        engine.train()

    def both() -> None:
        losses = loss(), loss(other)
        for one, its in zip((engine, other), losses, strict=True):
            one.backward(its)
            one.step()

    def nested() -> None:
        """A checkpoint around the whole model, whose layers have one each."""
        engine.module.gradient_checkpointing_enable({"use_reentrant": True})
        start = torch.ones((), device=tokens.device, requires_grad=True)
        engine.backward(checkpoint(lambda x: loss() * x, start, use_reentrant=True))
        engine.step()
        engine.module.gradient_checkpointing_disable()

    look("step", step)
    look("exception in forward", lambda: breaks(engine.module.model.layers[1], loss))
    look("step after it", step)
    look("evaluation", evaluate)
    look("step after that", step)
    look("two models in turn", lambda: (step(), step(other)))
    look("two models, forwards first", both)
    look("nested checkpoints", nested)
    layers = engine.module.model.layers
    for i in range(len(layers)):
        layers[i] = torch.compile(layers[i], backend="aot_eager")
    look("compiled layers", step)
    look("compiled layers again", step)
    for each in engine, other:
        each.destroy()
    deepspeed.comm.destroy_process_group()
    return look.found


def run_megatron(rank: int, size: int, folder: str) -> Found:
    with test_megatron.megatron(rank, size, folder, "echo") as device:
        import megatron_core
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        import echo_pg

        sequence, batch = test_megatron.SEQUENCE, test_megatron.MICRO_BATCH
        group = parallel_state.get_tensor_model_parallel_group()
        look = Looks(lambda: echo_pg.stats(group)["passes"])
        tokens = torch.arange(batch * (sequence + 1), device=device).view(batch, -1) % megatron_core.VOCABULARY

        def make(**changes: Any) -> tuple[Any, Any]:
            config = megatron_core.make_config(test_megatron.LAYERS, test_megatron.HIDDEN, size, **changes)
            return megatron_core.make_model(config, sequence, device)

        def run(model: Any, forward_only: bool = False, forward_step: Any = megatron_core.forward_step) -> None:
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter([tokens]), model=[model], num_microbatches=1,
                seq_length=sequence, micro_batch_size=batch, forward_only=forward_only,
            )  # fmt: skip

        def step(of: tuple[Any, Any], forward_step: Any = megatron_core.forward_step) -> None:
            model, optimizer = of
            model.zero_grad_buffer()
            optimizer.zero_grad()
            run(model, forward_step=forward_step)
            optimizer.step()

        def evaluate() -> None:
            first[0].eval()
            with torch.no_grad():
                run(first[0], forward_only=True)
            first[0].train()

        def in_a_checkpoint(batches: Any, model: Any) -> tuple[Any, Any]:
            """Around the whole model, whose layers have one each."""
            batch, start = next(batches), torch.ones((), device=device, requires_grad=True)

            def whole(x: Tensor) -> Tensor:
                return megatron_core.forward_step(iter([batch]), model)[0] * x

            output = checkpoint(whole, start, use_reentrant=True)
            return output, megatron_core.loss_of

        first, second = make(), make()
        look("step", lambda: step(first))
        broken = first[0].module.decoder.layers[1]
        look("exception in forward", lambda: breaks(broken, lambda: run(first[0])))
        look("step after it", lambda: step(first))
        look("evaluation", evaluate)
        look("step after that", lambda: step(first))
        look("two models in turn", lambda: (step(first), step(second)))
        look("nested checkpoints", lambda: step(make(**test_megatron.RECOMPUTED), in_a_checkpoint))
        layers = first[0].module.decoder.layers
        for i in range(len(layers)):
            layers[i] = torch.compile(layers[i], backend="aot_eager")
        look("compiled layers", lambda: step(first))
        look("compiled layers again", lambda: step(first))
        return look.found


@pytest.mark.parametrize("framework", ["DeepSpeed", "Megatron-core"])
def test_passes(framework: str, tmp_path: Path) -> None:
    run, layers = (
        (run_deepspeed, deepspeed_runs.LAYERS) if framework == "DeepSpeed" else (run_megatron, test_megatron.LAYERS)
    )
    first, second = run_ranks(run, 2, str(tmp_path), backend=None, env=ENV, timeout=200)
    assert first == second, "ranks count alike"
    expected: Found = {
        "step": (1, 1, 0),
        "exception in forward": (1, 0, 0),
        "step after it": (1, 1, 0),
        "evaluation": (1, 0, 0),
        "step after that": (1, 1, 0),
        "two models in turn": (2, 2, 0),
    }
    expected |= {
        "nested checkpoints": (1, 1, 1 + layers),
        "compiled layers": (1, 1, 0),
        "compiled layers again": (1, 1, 0),
    }
    if framework == "DeepSpeed":  # Megatron's schedule makes a step of one model as a whole
        expected["two models, forwards first"] = (2, 2, 0)
    assert first == expected
