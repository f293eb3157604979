"""Every all-reduce that DeepSpeed 0.19, Megatron-core 0.19, transformers 5.24 and plain PyTorch are known to make, as a
row: what it looks like where it arrives, and whether it is quantized or why it is exact.

The other files here run most of them under the frameworks. Those marked "read" are known by source alone: they need
GPUs, kernels or models that a CPU does not have. Rows hold at any size; min_bytes is zero here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from echo_pg import build, passes

QUANTIZED = "tensor parallel"
VECTOR, NOT_SUM, FLOAT32 = "one-dimensional", "not a SUM", "dtype float32 not listed"
OUTSIDE, DENIED, NARROW = "outside a module and autograd", "denied group", "rows shorter than 16"
TENSOR, DATA = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"
HIDDEN, LOGITS = (2, 16, 64), (2, 16, 128)


class Row(NamedTuple):
    """`module`: class of the innermost module, or the attribute by which the model holds its output layer."""

    what: str
    outcome: str
    shape: tuple[int, ...] = HIDDEN
    context: str = "forward"
    group: str = "default_pg"
    dtype: str = "bfloat16"
    op: str = "SUM"
    module: str = "Linear"
    more: dict[str, Any] = {}  # noqa: RUF012 - never written to


DEEPSPEED = [
    Row("AutoTP, row-parallel output, layers.py:225", QUANTIZED, module="LinearAllreduce"),
    Row("the same beside data parallelism", QUANTIZED, group="mesh_tensor_parallel", module="LinearAllreduce"),
    Row("the same in inference, one token", QUANTIZED, (2, 1, 64), group="undefined", module="LinearAllreduce"),
    Row("column-parallel input gradient, layers.py:280, 313", QUANTIZED, context="backward"),
    Row("gradient of a scattered input, layers.py:254", QUANTIZED, context="backward"),
    Row("the same layers run again", QUANTIZED, context="recompute", module="LinearAllreduce"),
    Row("vocabulary-parallel embedding, layers.py:1167", "embedding", module="VocabParallelEmbedding"),
    Row("logits, layers.py:1745", "output layer", LOGITS, group="undefined", module="LmHeadLinearAllreduce"),
    Row("logits of a row-parallel lm_head", "output layer", LOGITS, module="lm_head"),
    Row("inputs are equal, engine.py:988", VECTOR, (), module="DeepSpeedEngine"),
    Row("flattened gradients, engine.py:3811", VECTOR, (49472,), "none", "mesh_data_parallel"),
    Row("ZeRO's gradients, stage_1_and_2.py:2384", VECTOR, (49472,), "none", "mesh_data_parallel"),
    Row("gradients of one matrix", DENIED, (128, 64), "backward", "mesh_data_parallel"),
    Row("overflow flag, utils.py:319", NOT_SUM, (1,), "none", dtype="uint8", op="MAX"),
    Row("norm, utils.py:584", FLOAT32, (1,), "none", dtype="float32"),
    Row("norm over data-parallel ranks", FLOAT32, (), "none", "mesh_data_parallel", "float32"),
    Row("Domino's halves, transformer.py:333 (forward)", QUANTIZED, (8, 2, 64), group="tp", module="DominoModule"),
    Row("Domino, async_linear.py:35 (backward)", QUANTIZED, (8, 2, 64), "backward", "tp"),
    Row("injected attention, ds_attention.py:181 (read)", QUANTIZED, module="DeepSpeedSelfAttention"),
    Row("injected MLP, `residual`, ds_mlp.py:123", "residual included", module="DeepSpeedMLP"),
    Row("injected experts, before the residual, moe_inference.py:122 (read)", QUANTIZED, module="DeepSpeedMoEMLP"),
    # Its engine calls model.forward, not the model, so that no pass is known: exact, unless new_pass says where one is.
    Row("inference v2, attention and MLP, */model.py (read)", OUTSIDE, (32, 64), "none", "undefined"),
    Row("inference v2, blocks that fit, kv_cache.py:113 (read)", NOT_SUM, (1,), "none", dtype="int64", op="MIN"),
]

MEGATRON = [
    Row("row-parallel output, mappings.py:35", QUANTIZED, (16, 2, 64), group=TENSOR, module="RowParallelLinear"),
    Row("gradient of a copied input, mappings.py:35", QUANTIZED, (16, 2, 64), "backward", TENSOR),
    Row("asynchronous input gradient, layers.py:639", QUANTIZED, (16, 2, 64), "backward", TENSOR),
    Row("input gradient of frozen weights, layers.py:441 (read)", QUANTIZED, (16, 2, 64), "backward", TENSOR),
    Row("full recomputation", QUANTIZED, (16, 2, 64), "recompute", TENSOR, module="RowParallelLinear"),
    Row("vocabulary-parallel embedding", "embedding", group=TENSOR, module="VocabParallelEmbedding"),
    Row("cross-entropy's maximum, cross_entropy.py:130", NOT_SUM, (16, 2), "forward", TENSOR, "float32", "MAX"),
    Row("cross-entropy's sums, cross_entropy.py:146, 150", FLOAT32, (16, 2), "forward", TENSOR, "float32"),
    Row("fused cross-entropy's two sums in one, fused_cross_entropy.py:112 (read)", FLOAT32, (64,), group=TENSOR,
        dtype="float32"),
    Row("norms' gradients, finalize_model_grads.py:474", FLOAT32, (64,), "none", TENSOR, "float32"),
    Row("the same kept in bfloat16", VECTOR, (64,), "none", TENSOR),
    Row("average_gradients_across_tp_domain (read)", NOT_SUM, (64,), "none", TENSOR, "float32", "AVG"),
    Row("norm, clip_grads.py:132", FLOAT32, (1,), "none", "MODEL_PARALLEL_GROUP", "float32"),
    Row("largest gradient, clip_grads.py:99 (read)", NOT_SUM, (1,), "none", TENSOR, "float32", "MAX"),
    Row("overflow flag", NOT_SUM, (1,), "none", "MODEL_PARALLEL_GROUP", "int32", "MAX"),
    # Softmax is taken in float32. On a group for tensor parallelism only its dtype keeps it exact.
    Row("attention scores of DSA, dsa.py:505, 774 (read)", FLOAT32, (2, 16, 16), group=TENSOR, dtype="float32"),
    Row("losses of DSA, dsa.py:327 (read)", FLOAT32, (2,), "none", dtype="float32"),
    Row("largest values for fp8, fp8_utils.py:504, 591 (read)", NOT_SUM, (8,), "none", DATA, "float32", "MAX"),
    Row("embedding's gradient, finalize_model_grads.py:258", FLOAT32, (128, 64), "none", "EMBEDDING_GROUP", "float32"),
    Row("embedding's weights at the start, and gradients in bfloat16", DENIED, (128, 64), "none", "EMBEDDING_GROUP"),
    Row("position embedding's gradient (read)", DENIED, (128, 64), "none", "POSITION_EMBEDDING_GROUP"),
    Row("conditional embedders' gradients over stages (read)", VECTOR, (512,), "none", "PIPELINE_MODEL_PARALLEL_GROUP"),
    Row("number of tokens (read)", "dtype int32 not listed", (1,), "none", DATA, "int32"),
    Row("gradients of replicas, all of a bucket", "several tensors", (49472,), "backward", DATA, more={"tensors": 2}),
    Row("gradients of replicas, one tensor (read)", VECTOR, (49472,), "backward", DATA),
    Row("gradients within a sharded optimizer (read)", VECTOR, (49472,), "backward",
        "INTRA_PARTIAL_DATA_PARALLEL_GROUP"),
    Row("tokens per expert, moe_utils.py:1162 (read)", "dtype int64 not listed", (8,), "none",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "int64"),
    Row("tokens per expert for the auxiliary loss (read)", FLOAT32, (8,), group="TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        dtype="float32", module="TopKRouter"),
    Row("auxiliary losses, moe_logging.py:277, 280 (read)", FLOAT32, (2,), "none", "PIPELINE_MODEL_PARALLEL_GROUP",
        "float32"),
    Row("auxiliary losses, moe_logging.py:288 (read)", NOT_SUM, (2,), "none", DATA, "float32", "AVG"),
    Row("experts' output over their own group (read)", DENIED, (32, 64), group="EXPERT_TENSOR_PARALLEL_GROUP",
        module="TEGroupedMLP"),
    Row("experts' input gradient (read)", DENIED, (32, 64), "backward", "EXPERT_TENSOR_PARALLEL_GROUP"),
    Row("stages of context parallelism (read)", DENIED, context="backward", group="CONTEXT_PARALLEL_GROUP"),
    Row("what a host keeps in step (read)", DENIED, (16, 64), "none", "DATA_PARALLEL_GROUP_GLOO"),
]  # fmt: skip

HUGGING_FACE = [
    Row("embedding_rowwise", "embedding", module="Embedding"),
    Row("row-parallel output, tensor_parallel.py:305, prompt or training", QUANTIZED),
    Row("row-parallel output, one token", QUANTIZED, (2, 1, 64)),
    Row("inputs of q, k, v, gate, up and lm_head", QUANTIZED, context="backward"),
    Row("checkpointed layers", QUANTIZED, context="recompute"),
    Row("norms of queries and keys, tensor_parallel.py:352", VECTOR, (16,), "backward", more={"accumulate_grad": True}),
    Row("a parameter's gradient that is a matrix", "parameter gradient", (64, 64), "backward",
        more={"accumulate_grad": True}),
    Row("row-parallel lm_head", "output layer", LOGITS, module="lm_head"),
    Row("experts, a token per row", QUANTIZED, (32, 64), module="Qwen3MoeExperts"),
    Row("router's gradient", NARROW, (32, 2), "backward"),
    Row("beside fully sharded data", QUANTIZED, group="mesh_tp"),
    Row("replicas of shards", NOT_SUM, (67744,), "backward", "mesh_dp_replicate", op="AVG"),
]  # fmt: skip

PLAIN = [
    Row("parallelize_module, forward", QUANTIZED, (2, 32, 64), group="mesh_shards"),
    Row("parallelize_module, backward", QUANTIZED, (2, 32, 64), "backward", "mesh_shards"),
    Row("compiled blocks", QUANTIZED, (2, 32, 64), module="OptimizedModule"),
    Row("loss_parallel's maximum", NOT_SUM, (16, 1), dtype="float32", op="MAX", module="CrossEntropyLoss"),
    Row("loss_parallel's sums", FLOAT32, (16, 1), dtype="float32", module="CrossEntropyLoss"),
    Row("loss_parallel's sums in bfloat16", NARROW, (16, 1), module="CrossEntropyLoss"),
    Row("clip_grad_norm_, a vector of norms", FLOAT32, (6,), "none", dtype="float32"),
    Row("clip_grad_norm_ in bfloat16", VECTOR, (6,), "none"),
    Row("DDP's bucket", VECTOR, (8320,), "backward", more={"accumulate_grad": True}),
    Row("DDP's bucket beside tensor parallelism", VECTOR, (8320,), "backward", "mesh_dp"),
    Row("FSDP2 over replicas", NOT_SUM, (67744,), "backward", "mesh_replicas", op="AVG"),
    Row("DTensor outside of modules", OUTSIDE, (16, 16), "none"),
    Row("a coalescing manager", "several tensors", more={"tensors": 3}),
    Row("a coalescing manager with a device", "inside a coalescing bracket", more={"coalesced": True}),
    Row("Inductor's bucket", VECTOR, (12288,), "backward"),
    Row("SyncBatchNorm's statistics", FLOAT32, (129,), dtype="float32", module="SyncBatchNorm"),
]


def role_of(name: str) -> int:
    """Of the innermost module: a class of this name, or the output layer of a model, found as at a model's call."""
    if name != "lm_head":
        base = getattr(nn, name, nn.Module)
        return passes._classify(type(name, (base,), {}))
    model = nn.ModuleDict({name: nn.Linear(2, 2)})
    passes._scan(model)
    return passes.role_of(model[name])


def decide(row: Row, **config: Any) -> tuple[bool, str]:
    extension = build.extension()
    chosen = extension.Config()
    for name, value in ({"min_bytes_cpu": 0} | config).items():
        setattr(chosen, name, value)
    role = role_of(row.module)
    facts = {
        "numel": math.prod(row.shape), "ndim": len(row.shape), "row_elems": row.shape[-1] if row.shape else 1,
        "op": row.op, "dtype": row.dtype, "group_desc": row.group, "context": row.context,
        # No module is open in backward or outside of modules; a compiled one is judged by what is in it.
        "role": role if row.context in ("forward", "recompute") and role != passes.OPAQUE else passes.PLAIN,
    }  # fmt: skip
    return extension.decide(chosen, facts | row.more)  # type: ignore[no-any-return]


ROWS = [
    pytest.param(row, id=f"{framework}: {row.what}")
    for framework, rows in (("DeepSpeed", DEEPSPEED), ("Megatron", MEGATRON), ("HF", HUGGING_FACE), ("torch", PLAIN))
    for row in rows
]


@pytest.mark.parametrize("row", ROWS)
def test_every_known_call(row: Row) -> None:
    assert decide(row) == (row.outcome == QUANTIZED, row.outcome)


@pytest.mark.parametrize("row", [row for row in ROWS if row.values[0].outcome == FLOAT32])
def test_where_float32_is_listed(row: Row) -> None:
    """Losses, norms and gradients have other reasons then; of what has none, only DSA's scores are known."""
    quantized, _ = decide(row, dtypes=["bfloat16", "float32"])
    assert quantized == (row.what == "attention scores of DSA, dsa.py:505, 774 (read)")


class Calls(nn.Module):
    """What the frameworks call beside all-reduces, here inside a forward, in a group for tensor parallelism."""

    def forward(self, rank: int, size: int, group: Any) -> dict[str, tuple[Any, Any]]:
        hidden = torch.full(HIDDEN, rank + 1.0, dtype=torch.bfloat16)
        flat, found = hidden.flatten(), {}
        inputs = torch.tensor([rank, 7])
        dist.broadcast(inputs, 0, group=group)
        found["DeepSpeed: inputs, engine.py:970"] = inputs, torch.tensor([0, 7])
        gathered = [torch.zeros_like(hidden) for _ in range(size)]
        dist.all_gather(gathered, hidden, group=group)
        each = torch.stack([torch.full(HIDDEN, r + 1.0, dtype=torch.bfloat16) for r in range(size)])
        found["DeepSpeed, HF: logits of lm_head"] = torch.stack(gathered), each
        whole = torch.zeros(size * flat.numel(), dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, flat, group=group)
        found["ZeRO: parameters; Megatron: sequence parallelism"] = whole, each.flatten()
        part = torch.zeros(flat.numel() // size, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, flat, group=group)
        found["Megatron: sequence parallelism, sums"] = part, torch.full_like(part, size * (size + 1) / 2)
        mine = torch.zeros_like(hidden)
        dist.scatter(mine, list(each) if rank == 0 else None, 0, group=group)
        found["parallelize_module: weights at load"] = mine, hidden
        swapped = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        dist.all_to_all_single(swapped, hidden, group=group)
        found["Ulysses: sequences against heads"] = swapped, each[:, : HIDDEN[0] // size].flatten(0, 1)
        return found


def run_other_calls(rank: int, size: int) -> tuple[dict[str, bool], int, int]:
    import echo_pg

    group = dist.new_group(backend="echo", group_desc=TENSOR, pg_options=echo_pg.Options(min_bytes=0))
    found = Calls()(rank, size, group)
    stats = echo_pg.stats(group)
    return {name: torch.equal(*pair) for name, pair in found.items()}, stats["other_calls"], stats["calls_quantized"]


def test_what_is_no_all_reduce_is_forwarded_and_exact() -> None:
    for equal, others, quantized in run_ranks(run_other_calls, 2):
        assert all(equal.values()), equal
        assert (others, quantized) == (len(equal), 0)
