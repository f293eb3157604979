"""Hugging Face models in pipeline stages: torch's 1F1B schedule over a model that its own tensor-parallel plan splits
within each stage, and transformers' own pipeline, which generates and has stages of one rank each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEBUG, needs_four_devices, record, table
from hf_models import EXACT, SHAPE, be_a_rank, load, save, splits_vocabulary, start, tokens
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

LAYERS, MICRO_BATCHES = 2, 4  # layers per stage
STREAM = "[2, 16, 64]"
ENV = DEBUG | {"ECHO_MIN_BYTES": "0"}  # the groups of a mesh read the environment


class Stage(nn.Module):
    """The half of a model that a stage holds, run by the model's own code."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first
        base = model.model
        base.layers = base.layers[:LAYERS] if first else base.layers[LAYERS:]
        if first:
            base.norm = model.lm_head = nn.Identity()
        else:
            base.embed_tokens = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.model.model(input_ids=x, use_cache=False).last_hidden_state
        return self.model(inputs_embeds=x, use_cache=False).logits


def make_stage(kind: str, mesh: Any, device: torch.device) -> Stage:
    import transformers
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2 * LAYERS, **SHAPE)
    torch.manual_seed(0)  # all ranks make the whole model and keep their part
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").to(
        device
    )
    apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
    return Stage(model, mesh["stage"].get_local_rank() == 0).train()


def run_schedule(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Of each kind, with checkpointing and without: passes, calls, and the micro-batches' losses, exact and not."""
    recorder = record()
    be_a_rank(rank, size)
    start(folder, rank, size, "all")
    import echo_pg

    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("stage", "tp"))
    group = mesh["tp"].get_group()
    found = {}
    for kind in ("Llama", "Qwen3"):
        stage = make_stage(kind, mesh, device)
        with echo_pg.exact():
            exact = one_f_one_b(stage, mesh["stage"], device)()
        for checkpointing in (False, True):
            if checkpointing:
                stage.model.gradient_checkpointing_enable({"use_reentrant": False})
            step = one_f_one_b(stage, mesh["stage"], device)
            step()  # the first step also runs the stage to learn its shapes
            recorder.take()
            before = echo_pg.stats(group)["passes"]
            losses = step()
            after = echo_pg.stats(group)["passes"]
            found[f"{kind}, checkpointing={checkpointing}"] = {
                "passes": tuple(after[name] - before[name] for name in ("forward", "backward", "recompute")),
                "calls": table(call for call in recorder.take() if call["group"] == "mesh_tp"),
                "losses": (exact, losses),
            }
    return found


def one_f_one_b(stage: Stage, mesh: Any, device: torch.device) -> Any:
    """A step of the schedule; on the last stage it returns the losses of the micro-batches, else nothing."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(
        PipelineStage(stage, mesh.get_local_rank(), 2, device, group=mesh.get_group()),
        n_microbatches=MICRO_BATCHES, loss_fn=loss,
    )  # fmt: skip
    text = tokens(batch=2 * MICRO_BATCHES, length=17)

    def step() -> list[float]:
        stage.zero_grad()
        losses: list[Tensor] = []
        if stage.first:
            schedule.step(text[:, :-1])
        else:
            schedule.step(target=text[:, 1:], losses=losses)
        return [each.item() for each in losses]

    return step


def expected_calls(kind: str, first: bool, checkpointing: bool) -> Counter[tuple[str, ...]]:
    """Two sums forward and five backward per layer and micro-batch, as without a pipeline; the embedding's belong to
    the first stage, that of lm_head's input gradient to the last. A recomputed layer stops before its second sum."""
    calls: Counter[tuple[str, ...]] = Counter()

    def add(context: str, outcome: str, each: int, shape: str = STREAM) -> None:
        calls[context, "SUM", "bfloat16", shape, outcome] += each * MICRO_BATCHES

    add("forward", "quantized", 2 * LAYERS)
    add("backward", "quantized", 5 * LAYERS + (not first))
    if first and splits_vocabulary():
        add("forward", "embedding", 1)
    if kind == "Qwen3":
        add("backward", "one-dimensional", 2 * LAYERS, "[16]")
    if checkpointing:
        add("recompute", "quantized", LAYERS)
    return calls


@needs_four_devices
def test_1f1b(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(run_schedule, 4, str(tmp_path), backend=None, env=ENV, timeout=250)):
        first = rank < 2
        for kind in ("Llama", "Qwen3"):
            for checkpointing in (False, True):
                seen = found[f"{kind}, checkpointing={checkpointing}"]
                again = MICRO_BATCHES * LAYERS if checkpointing else 0
                assert seen["passes"] == (MICRO_BATCHES, MICRO_BATCHES, again)
                assert seen["calls"] == expected_calls(kind, first, checkpointing)
                exact, losses = seen["losses"]
                assert len(exact) == len(losses) == (0 if first else MICRO_BATCHES)
                assert losses == pytest.approx(exact, rel=0.01) and (first or losses != exact)


def run_own_pipeline(rank: int, size: int, folder: str, backend: str) -> tuple[list[list[int]], int]:
    """The tokens that a model of three layers in two stages writes, and the calls that were quantized."""
    be_a_rank(rank, size)
    start(folder, rank, size, backend, backend)
    import echo_pg

    model = load(save(folder, "Qwen3", 3, rank), pp_size=size)
    brief = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens(), **brief).tolist()
    quantized = echo_pg.stats()["calls_quantized"] if backend == "echo" else 0
    dist.destroy_process_group()
    return written, quantized


def run_both(rank: int, size: int, folder: str) -> dict[str, Any]:
    return {backend: run_own_pipeline(rank, size, folder, backend) for backend in (EXACT, "echo")}


def test_transformers_own_pipeline(tmp_path: Path) -> None:
    """It asks for the group's name, to send tensors of GPUs through the host under Gloo. In 5.24 it writes, does not
    train, and refuses a tensor-parallel plan, whatever the backend: nothing is summed, and what is sent is exact."""
    for found in run_ranks(run_both, 2, str(tmp_path), backend=None, env=DEBUG, timeout=120):
        assert found["echo"][0] == found[EXACT][0]
        assert found["echo"][1] == 0
        assert len(found["echo"][0][0]) == 16 + 8
