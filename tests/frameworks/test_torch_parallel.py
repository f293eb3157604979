"""Plain PyTorch under init_process_group("echo"), unmodified: what each way of training in parallel sends, and which of
its all-reduces are quantized."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
from harness import DEBUG, device_of, needs_four_devices, record, table

from echo_pg.bench import transformer

ENV = DEBUG | {"ECHO_MIN_BYTES": "0"}
HIDDEN = "[2, 32, 64]"  # batch, length, width of the small model's activations
# Two blocks with two sums each; in backward the gradients of four inputs each.
BLOCKS = {
    ("forward", "SUM", "bfloat16", HIDDEN, "quantized"): 4,
    ("backward", "SUM", "bfloat16", HIDDEN, "quantized"): 8,
}


def batch(device: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(transformer.BYTES, (2, 33), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def sharded(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


class Bench:
    """What a scenario needs, and a step that returns the table of its all-reduces."""

    def __init__(self, rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.recorder = record()
        self.device = device_of(rank)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def step(self, model: nn.Module, optimizer: Any = None) -> Counter[tuple[str, ...]]:
        self.recorder.take()
        transformer.loss_of(model, *batch(self.device)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return table(self.recorder.take())


# ---- one dimension, two ranks
def tensor_parallel(bench: Bench) -> list[Counter[tuple[str, ...]]]:
    model = transformer.make(bench.mesh, device=bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    steps = [bench.step(model, optimizer), bench.step(model, optimizer)]
    bench.step(model)
    nn.utils.clip_grad_norm_(sharded(model), 1.0)
    steps.append(table(bench.recorder.take()))
    dist.all_reduce(torch.ones((), device=bench.device))
    dist.all_reduce(torch.ones(4, 4, device=bench.device, dtype=torch.bfloat16))
    steps.append(table(bench.recorder.take()))
    return steps


class WithLoss(nn.Module):
    """As models that take labels: the loss is computed inside a module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(tokens).flatten(0, 1), targets.flatten())


def vocabulary_parallel(bench: Bench) -> list[Counter[tuple[str, ...]]]:
    steps = []
    for inside in (False, True):
        model = transformer.make(bench.mesh, device=bench.device)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, bench.mesh, plan)
        tokens, targets = batch(bench.device)
        with loss_parallel():
            if inside:
                loss = WithLoss(model)(tokens, targets)
            else:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        steps.append(table(bench.recorder.take()))
    return steps


def sequence_parallel(bench: Bench) -> tuple[Counter[tuple[str, ...]], int]:
    import echo_pg

    model = transformer.make(None, device=bench.device)
    rows, split = Shard(1), {"input_layouts": Shard(1)}
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel(**split) for name in ("query", "key", "value", "up")}
        plan |= {name: RowwiseParallel(output_layouts=rows) for name in ("out", "down")}
        plan |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        parallelize_module(block, bench.mesh, plan)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(**split, output_layouts=Replicate()),
    }
    parallelize_module(model, bench.mesh, plan)
    others = echo_pg.stats()["other_calls"]
    tokens, targets = batch(bench.device)
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    F.cross_entropy(model.lm_head(model.norm(x)).float().flatten(0, 1), targets.flatten()).backward()
    return table(bench.recorder.take()), echo_pg.stats()["other_calls"] - others


def dtensor(bench: Bench) -> list[Counter[tuple[str, ...]]]:
    """Sums that DTensor makes by itself: outside of modules, and gradients of a replicated weight."""
    left = distribute_tensor(torch.randn(16, 32, device=bench.device).bfloat16(), bench.mesh, [Shard(1)])
    right = distribute_tensor(torch.randn(32, 16, device=bench.device).bfloat16(), bench.mesh, [Shard(0)])
    (left @ right).full_tensor()
    steps = [table(bench.recorder.take())]
    linear = nn.Linear(32, 16, bias=False, device=bench.device, dtype=torch.bfloat16)
    parameter = nn.Parameter(distribute_tensor(linear.weight.detach(), bench.mesh, [Replicate()]))
    linear.weight = parameter
    x = distribute_tensor(torch.randn(8, 32, device=bench.device).bfloat16(), bench.mesh, [Shard(0)])
    linear(x).sum().backward()
    assert parameter.grad is not None
    parameter.grad.full_tensor()
    steps.append(table(bench.recorder.take()))
    return steps


def replicated(bench: Bench) -> dict[str, Any]:
    """Data parallel: DDP, and FSDP2, whose gradients are reduce-scattered."""
    import echo_pg

    model = nn.parallel.DistributedDataParallel(transformer.make(None, device=bench.device))
    found: dict[str, Any] = {"ddp": bench.step(model)}
    model = transformer.make(None, device=bench.device)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=bench.mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=bench.mesh)
    others = echo_pg.stats()["other_calls"]
    found["fsdp"] = bench.step(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm.full_tensor()
    found["fsdp norm"] = table(bench.recorder.take())
    found["fsdp others"] = echo_pg.stats()["other_calls"] - others
    return found


def point_to_point_and_objects(bench: Bench, rank: int, size: int) -> None:
    mine = torch.full((5,), float(rank), device=bench.device)
    theirs = torch.empty_like(mine)
    peer = 1 - rank
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
    for work in works:
        work.wait()
    assert theirs.tolist() == [float(peer)] * 5
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "what": [1, "two"]})
    assert [entry["rank"] for entry in gathered] == list(range(size))
    sent = [("from", 0)] if rank == 0 else [None]
    dist.broadcast_object_list(sent, src=0)
    assert sent == [("from", 0)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, [10, 11] if rank == 0 else None, src=0)
    assert received == [10 + rank]


def checkpoint(bench: Bench, folder: str) -> None:
    """A model and its optimizer, saved and loaded into others with other values: equal to the bit, and trains on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = transformer.make(bench.mesh, seed=seed, device=bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
        bench.step(model, optimizer)
        return model, optimizer

    model, optimizer = made(0)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    other, other_optimizer = made(1)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for training in (model, optimizer), (other, other_optimizer):
        bench.step(*training)
    for name, parameter in model.named_parameters():
        loaded = dict(other.named_parameters())[name]
        assert torch.equal(transformer.local(parameter), transformer.local(loaded)), name


def run_one_dimension(rank: int, size: int, folder: str) -> dict[str, Any]:
    bench = Bench(rank, (size,), ("shards",))
    found = {
        "tensor": tensor_parallel(bench),
        "vocabulary": vocabulary_parallel(bench),
        "sequence": sequence_parallel(bench),
        "dtensor": dtensor(bench),
        "replicated": replicated(bench),
    }
    point_to_point_and_objects(bench, rank, size)
    checkpoint(bench, folder)
    return found


def test_one_dimension() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(run_one_dimension, 2, folder, backend="echo", env=ENV, timeout=150)
    assert first == second, "ranks decide alike"
    outside = "outside a module and autograd"
    vocabulary = BLOCKS | {
        ("forward", "SUM", "bfloat16", HIDDEN, "embedding"): 1,
        ("backward", "SUM", "bfloat16", HIDDEN, "quantized"): 9,  # and the output layer's input
    }
    assert first == {
        "tensor": [
            BLOCKS,
            BLOCKS,
            {("none", "SUM", "bfloat16", "[12]", "one-dimensional"): 1},  # norms of the 12 split gradients
            {
                ("none", "SUM", "float32", "[]", "dtype float32 not listed"): 1,
                ("none", "SUM", "bfloat16", "[4, 4]", "rows shorter than 16"): 1,
            },
        ],
        "vocabulary": [
            vocabulary
            | {
                (context, "MAX", "float32", "[64, 1]", "not a SUM"): 1,
                (context, "SUM", "float32", "[64, 1]", "dtype float32 not listed"): 1,
                (context, "SUM", "bfloat16", "[64, 1]", "rows shorter than 16"): 1,
            }
            for context in ("none", "forward")
        ],
        "sequence": ({}, 29),
        "dtensor": [
            {("none", "SUM", "bfloat16", "[16, 16]", outside): 1},
            {("none", "SUM", "bfloat16", "[16, 32]", outside): 1},
        ],
        "replicated": {
            "ddp": {("backward", "SUM", "bfloat16", "[135488]", "one-dimensional"): 1},
            "fsdp": {},
            "fsdp others": 8,  # three all-gathers forward, two again backward (the last stays), three reduce-scatters
            "fsdp norm": {("none", "SUM", "bfloat16", "[20]", "one-dimensional"): 1},
        },
    }


# ---- two dimensions, four ranks
def run_two_dimensions(rank: int, size: int) -> dict[str, Any]:
    bench = Bench(rank, (2, 2), ("dp", "tp"))
    found = {}
    model = transformer.make(bench.mesh["tp"], device=bench.device)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=bench.mesh["dp"])
    torch.distributed.fsdp.fully_shard(model, mesh=bench.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    for name in ("fsdp x tp", "again"):
        found[name] = bench.step(model, optimizer)
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    model = transformer.make(bench.mesh["tp"], device=bench.device)
    _pre_dp_module_transform(model)
    model = nn.parallel.DistributedDataParallel(model, process_group=bench.mesh["dp"].get_group())
    found["ddp x tp"] = bench.step(model)
    model = transformer.make(None, device=bench.device)
    replicate = init_device_mesh(bench.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.distributed.fsdp.fully_shard(model, mesh=replicate)
    found["hsdp"] = bench.step(model)
    return found


@needs_four_devices
def test_two_dimensions() -> None:
    for found in run_ranks(run_two_dimensions, 4, backend="echo", env=ENV, timeout=150):
        assert found == {
            "fsdp x tp": BLOCKS,
            "again": BLOCKS,
            "ddp x tp": BLOCKS | {("backward", "SUM", "bfloat16", "[86336]", "one-dimensional"): 1},
            "hsdp": {("backward", "AVG", "bfloat16", "[67744]", "not a SUM"): 1},
        }
