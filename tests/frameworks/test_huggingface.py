"""Hugging Face models under tp_plan="auto", unmodified: what is quantized, what stays exact and why, and where a pass
starts."""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEBUG, Recorder, needs_four_devices, record, table
from hf_models import be_a_rank, gradients, load, save, splits_vocabulary, start, tokens
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Table = Counter[tuple[str, ...]]
LAYERS = {"Llama": 3, "Qwen3": 2}


def rows(context: str, outcomes: dict[tuple[str, str], int], dtype: str = "bfloat16") -> Table:
    """A table as the harness counts it, of SUMs: (shape, outcome) -> calls."""
    return Counter({(context, "SUM", dtype, *key): calls for key, calls in outcomes.items()})


def forward(layers: int, shape: str = "[2, 16, 64]", passes: int = 1, context: str = "forward") -> Table:
    """The embedding, if it is split, then attention and MLP of each layer. The logits are gathered, which is no
    all-reduce."""
    return embedding(shape, passes, context) + rows(context, {(shape, "quantized"): 2 * layers * passes})


def embedding(shape: str = "[2, 16, 64]", passes: int = 1, context: str = "forward") -> Table:
    return rows(context, {(shape, "embedding"): passes} if splits_vocabulary() else {})


def backward(kind: str, shape: str = "[2, 16, 64]") -> Table:
    """The gradients of the inputs of q, k, v, gate and up of each layer, and of lm_head's input: like the others that
    is a hidden state's gradient, summed over shards of a column-parallel weight, and not a logit. Qwen3 also sums
    the gradients of its norms of queries and keys."""
    layers = LAYERS[kind]
    norms = {("[16]", "one-dimensional"): 2 * layers} if kind == "Qwen3" else {}
    return rows("backward", {(shape, "quantized"): 5 * layers + 1} | norms)


def generated(layers: int, batch: int, steps: int) -> Table:
    """A prompt of 16 tokens, then one pass per token; the last token needs none."""
    return forward(layers, f"[{batch}, 16, 64]") + forward(layers, f"[{batch}, 1, 64]", steps - 1)


class Watch:
    """What happened since the last look: the calls by kind, and how many passes began."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.passes: dict[str, int] = {}
        self.look()

    def look(self) -> dict[str, Any]:
        import echo_pg

        before, self.passes = self.passes, dict(echo_pg.stats()["passes"])
        begun = {name: count - before.get(name, 0) for name, count in self.passes.items()}
        return {"calls": table(self.recorder.take()), "passes": tuple(begun.values())}


def step(model: Any, ids: Tensor) -> tuple[float, bytes]:
    """A training step without an optimizer: the loss, and all gradients as bytes."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model).cpu().numpy().tobytes()


def interrupted(model: Any, ids: Tensor) -> bool:
    """A forward that fails after the sums of its first layer, on all ranks alike."""

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    return True


def checkpointed(model: Any, ids: Tensor, reentrant: bool) -> float:
    # The name that every transformers 5 has; later ones also have another.
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss, _ = step(model, ids)
    model.gradient_checkpointing_disable()
    return loss


def nested(model: Any, ids: Tensor) -> None:
    """A reentrant checkpoint around the whole model, whose layers have one each."""
    model.gradient_checkpointing_enable({"use_reentrant": True})
    scale = torch.ones((), device=ids.device, requires_grad=True)
    checkpoint(
        lambda x: model(input_ids=ids, labels=ids, use_cache=False).loss * x, scale, use_reentrant=True
    ).backward()
    model.gradient_checkpointing_disable()


def compiled(model: Any, ids: Tensor) -> None:
    """Its layers, in two steps; the last use of the model."""
    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = torch.compile(layers[i], backend="aot_eager")
    for _ in range(2):
        step(model, ids)


def run_model(rank: int, size: int, folder: str) -> dict[tuple[str, str], Any]:
    recorder = record()
    be_a_rank(rank, size)
    start(folder, rank, size, "all")
    found: dict[tuple[str, str], Any] = {}
    for kind, layers in LAYERS.items():
        model, draft = load(save(folder, kind, layers, rank)), load(save(folder, kind, 1, rank))
        found |= {(kind, name): seen for name, seen in phases(model, draft, Watch(recorder)).items()}
    return found


def phases(model: Any, draft: Any, watch: Watch) -> dict[str, dict[str, Any]]:
    """What each use of the model returned, the calls it made and the passes it began."""
    found: dict[str, dict[str, Any]] = {}

    def look(name: str, call: Callable[[], Any]) -> None:
        watch.look()
        found[name] = {"value": call()} | watch.look()

    ids, runs = tokens(), []
    brief = {"min_new_tokens": 4, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for each in (model, draft):
        each.register_forward_pre_hook(lambda *_: runs.append(""))
    model.train()
    look("step", lambda: step(model, ids))
    look("two micro-batches", lambda: [model(input_ids=ids, labels=ids).loss.backward() for _ in range(2)])
    look("non-reentrant", lambda: checkpointed(model, ids, reentrant=False))
    look("reentrant", lambda: checkpointed(model, ids, reentrant=True))
    model.eval()
    with torch.no_grad():
        look("evaluation", lambda: model(input_ids=ids, labels=ids).loss.item())
    look("greedy", lambda: model.generate(ids, **brief).tolist())
    look("beams", lambda: model.generate(ids, num_beams=2, **brief).tolist())
    runs.clear()
    look("assisted", lambda: model.generate(ids[:1], assistant_model=draft, **brief).shape[1])
    found["assisted"]["runs"] = len(runs)
    look("interrupted", lambda: interrupted(model, ids))
    model.train()
    look("step again", lambda: step(model, ids))
    look("nested", lambda: nested(model, ids))
    look("compiled", lambda: compiled(model, ids))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """What each rank saw."""
    return run_ranks(run_model, 2, str(tmp_path_factory.mktemp("models")), backend=None, env=DEBUG, timeout=200)


@pytest.mark.parametrize("kind", LAYERS)
def test_training(found: Any, kind: str) -> None:
    layers, one = LAYERS[kind], found[0][kind, "step"]
    assert one["calls"] == forward(layers) + backward(kind)
    assert one["passes"] == (1, 1, 0)
    two = found[0][kind, "two micro-batches"]
    assert two["calls"] == forward(layers, passes=2) + backward(kind) + backward(kind)
    assert two["passes"] == (2, 2, 0)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("how", "again"), [("non-reentrant", 1), ("reentrant", 2)])
def test_checkpointing(found: Any, kind: str, how: str, again: int) -> None:
    """Each layer is run again as a pass of its own; the non-reentrant way stops before the sum of the MLP, which
    backward does not need."""
    layers, seen = LAYERS[kind], found[0][kind, how]
    recomputed = rows("recompute", {("[2, 16, 64]", "quantized"): again * layers})
    assert seen["calls"] == forward(layers) + backward(kind) + recomputed
    assert seen["passes"] == (1, 1, layers)
    assert seen["value"] == found[0][kind, "step"]["value"][0], "the forward itself is the same"


@pytest.mark.parametrize("kind", LAYERS)
def test_nested_checkpoints_and_compiled_layers(found: Any, kind: str) -> None:
    layers = LAYERS[kind]
    assert found[0][kind, "nested"]["passes"] == (1, 1, 1 + layers)
    assert found[0][kind, "compiled"]["passes"] == (2, 2, 0)
    assert found[0][kind, "compiled"]["calls"] == forward(layers, passes=2) + backward(kind) + backward(kind)


@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_and_generation(found: Any, kind: str) -> None:
    """Without gradients transformers sums in place by torch.distributed.all_reduce, not by a functional collective."""
    layers = LAYERS[kind]
    assert found[0][kind, "evaluation"]["calls"] == forward(layers)
    assert found[0][kind, "evaluation"]["passes"] == (1, 0, 0)
    for name, batch in (("greedy", 2), ("beams", 4)):
        seen = found[0][kind, name]
        assert seen["calls"] == generated(layers, batch, steps=4)
        assert seen["passes"] == (4, 0, 0), "the prompt, then a pass per token"
    for key, seen in found[0].items():
        if not key[1].startswith("step"):  # whose values hold gradients of shards
            assert seen == found[1][key], "all ranks see, lose and write the same"


@pytest.mark.parametrize("kind", LAYERS)
def test_two_models_take_turns(found: Any, kind: str) -> None:
    """A draft model of one layer writes, the model checks: every run of either is a pass."""
    seen = found[0][kind, "assisted"]
    assert seen["value"] == 16 + 4
    assert seen["passes"] == (seen["runs"], 0, 0) and seen["runs"] >= 4
    calls: Counter[str] = Counter()
    for (context, op, dtype, _, outcome), count in seen["calls"].items():
        assert (context, op, dtype) == ("forward", "SUM", "bfloat16")
        calls[outcome] += count
    assert set(calls) - {"embedding"} == {"quantized"}
    assert calls["embedding"] == (seen["runs"] if splits_vocabulary() else 0)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_pass_starts_afresh_whatever_came_before(found: Any, kind: str) -> None:
    """A step is the same to the bit after steps, checkpointing, generation and a forward that failed: no feedback
    crosses the border of a pass."""
    assert found[0][kind, "step again"] == found[0][kind, "step"]
    failed = found[0][kind, "interrupted"]
    assert failed["calls"] == forward(1) and failed["passes"] == (1, 0, 0), "one layer had been summed"


# ---- other plans ----------------------------------------------------------------------------------------------------


def run_plans(rank: int, size: int, folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    recorder = record()
    be_a_rank(rank, size)
    start(folder, rank, size, "all")
    ids, found = tokens(), {}

    def look(name: str, call: Callable[[], Any]) -> None:
        recorder.take()
        call()
        found[name] = table(recorder.take())

    path = save(folder, "Llama", 1, rank)
    whole = load(path)
    row = load(path, tp_plan={**whole.tp_plan, "lm_head": "rowwise_split_input"})
    look("row-parallel lm_head", lambda: step(row, ids))
    experts = load(save(folder, "Qwen3Moe", 1, rank))
    look("experts", lambda: step(experts, ids))
    mesh = init_device_mesh(ids.device.type, (size,), mesh_dim_names=("tp",))

    def parallel_loss(dtype: torch.dtype) -> None:
        shard = torch.ones(32, 64, dtype=dtype, device=ids.device, requires_grad=True)
        with loss_parallel():
            logits = DTensor.from_local(shard, mesh, [Shard(1)], run_check=False)
            nn.CrossEntropyLoss()(logits, ids.flatten()).backward()

    look("loss_parallel float32", lambda: parallel_loss(torch.float32))
    look("loss_parallel bfloat16", lambda: parallel_loss(torch.bfloat16))

    class Scalar(nn.Module):
        def forward(self, x: Tensor) -> None:
            dist.all_reduce(x)

    look("scalar", lambda: Scalar()(torch.ones((), dtype=torch.bfloat16, device=ids.device)))

    compiled = torch.compile(whole, backend="aot_eager")
    look("compiled", lambda: compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward())
    return found


def test_other_plans() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(run_plans, 2, folder, backend=None, env=DEBUG, timeout=200)[0]
    hidden, norms = "[2, 16, 64]", {("[16]", "one-dimensional"): 2}
    # Then the logits are summed, and the gradient of lm_head's input is gathered instead.
    logits = rows("forward", {("[2, 16, 128]", "output layer"): 1})
    assert found["row-parallel lm_head"] == forward(1) + logits + rows("backward", {(hidden, "quantized"): 5})
    # Attention as ever; the experts take a token per row. In backward q, k, v, the experts' input and lm_head's.
    experts = {("[32, 64]", "quantized"): 1, ("[32, 2]", "rows shorter than 16"): 1}
    assert found["experts"] == (
        embedding()
        + rows("forward", {(hidden, "quantized"): 1, ("[32, 64]", "quantized"): 1})
        + rows("backward", {(hidden, "quantized"): 4} | experts | norms)
    )
    for dtype in ("float32", "bfloat16"):
        outcomes = {outcome for *_, outcome in found[f"loss_parallel {dtype}"]}
        assert sum(found[f"loss_parallel {dtype}"].values()) == 3 and "quantized" not in outcomes
    assert found["scalar"] == rows("forward", {("[]", "one-dimensional"): 1})
    # Inside a compiled model the embedding cannot be told from the layers; backward needs no roles.
    unknown = rows("forward", {(hidden, "compiled module, roles unknown"): embedding().total() + 2})
    assert found["compiled"] == unknown + rows("backward", {(hidden, "quantized"): 6})


def run_sharded(rank: int, size: int, folder: str) -> dict[str, Any]:
    recorder = record()
    be_a_rank(rank, size)
    start(folder, rank, size, "all")
    ids, found = tokens(), {}
    path = save(folder, "Qwen3", 2, rank)
    for name, plan in {
        "tensors and shards": {"tp_size": 2, "fsdp_size": 2},
        "replicas of shards": {"tp_size": 1, "fsdp_size": 2, "dp_replicate_size": 2},
    }.items():
        model = load(path, **plan)
        recorder.take()
        model(input_ids=ids, labels=ids).loss.backward()
        calls = recorder.take()
        found[name] = {group: table(c for c in calls if c["group"] == group) for group in {c["group"] for c in calls}}
    return found


@needs_four_devices
def test_tensor_parallelism_beside_fully_sharded_data() -> None:
    """Groups of a mesh take their options from the environment, not from the default group."""
    from transformers.distributed import DistributedConfig

    if "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters:
        pytest.skip("this transformers cannot replicate shards")
    with tempfile.TemporaryDirectory() as folder:
        env = DEBUG | {"ECHO_MIN_BYTES": "0"}
        found = run_ranks(run_sharded, 4, folder, backend=None, env=env, timeout=200)[0]
    assert found["tensors and shards"] == {"mesh_tp": forward(2) + backward("Qwen3")}
    (replicas,) = found["replicas of shards"].items()
    assert replicas[0] == "mesh_dp_replicate" and {row[-1] for row in replicas[1]} == {"not a SUM"}
