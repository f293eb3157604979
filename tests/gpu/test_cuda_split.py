"""A default group bound to a GPU (`device_id=`), and what torch derives from it: meshes of two dimensions, split
groups, new groups of some of the ranks. Nobody may wait for a rank that has no part in a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPES = [(1, 2), (2, 1)]


def start(backend: str, rank: int, size: int, folder: str, **options: Any) -> torch.device:
    import echo_pg

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/{backend}{len(options)}", size),
        rank=rank,
        world_size=size,
        device_id=device,
        pg_options=echo_pg.Options(**options) if backend == "echo" else None,
    )
    return device


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(device: torch.device, shape: tuple[int, int]) -> tuple[list[float], Any]:
    """Losses of three steps of tensor parallelism over the second dimension and FSDP over the first, and the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device, torch.bfloat16)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + mesh.get_local_rank("dp"))
    losses = []
    for _ in range(3):
        x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, mesh


def run_mesh(rank: int, size: int, shape: tuple[int, int], folder: str) -> dict[str, Any]:
    import echo_pg

    found: dict[str, Any] = {}
    for name, options in ("nccl", {}), ("exact", {"policy": "off"}), ("echo", {"min_bytes": 0, "bits": 8}):
        backend = "nccl" if name == "nccl" else "echo"
        device = start(backend, rank, size, folder, **options)
        found[name], mesh = train(device, shape)
        if name == "echo":
            groups = {dim: mesh[dim].get_group() for dim in ("dp", "tp")}
            assert [dist.get_world_size(groups[dim]) for dim in ("dp", "tp")] == list(shape)
            assert {dist.get_backend(group) for group in groups.values()} == {"echo"}
            found["quantized"] = {dim: echo_pg.stats(group)["calls_quantized"] for dim, group in groups.items()}
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_of_two_dimensions_trains(shape: tuple[int, int], tmp_path: Path) -> None:
    outcomes = run_ranks(run_mesh, 2, shape, str(tmp_path), backend=None, timeout=240)
    for outcome in outcomes:
        assert outcome["exact"] == outcome["nccl"], "two addends have one sum, so forwarding changes no bit"
        assert (outcome["echo"] == outcome["nccl"]) == (shape == (2, 1))
        # Two blocks, three steps: one all-reduce in each forward, and in each backward, whose input gradient the
        # first block does not need.
        assert outcome["quantized"]["dp"] == 0
        assert outcome["quantized"]["tp"] >= 6 if shape == (1, 2) else outcome["quantized"]["tp"] == 0


def run_split(rank: int, size: int, folder: str) -> None:
    device = start("echo", rank, size, folder, policy="all", min_bytes=0, bits=8, rotation="none")
    dist.barrier()
    both = dist.split_group(split_ranks=[[0, 1]], group_desc="both")
    single = dist.split_group(split_ranks=[[0]])
    assert (single is None) == (rank == 1)
    x = torch.full((3000,), 1.0 + rank, device=device, dtype=torch.bfloat16)
    dist.all_reduce(x, group=both)
    assert x.unique().tolist() == [3.0], "equal elements are on the grid"
    received = torch.empty(4, device=device)
    sent = torch.full((4,), float(rank), device=device)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank, both), dist.P2POp(dist.irecv, received, 1 - rank, both)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [1.0 - rank] * 4
    from echo_pg import stats

    assert stats(both)["calls_quantized"] == 1
    child_options = both._get_backend(device).options
    assert type(child_options) is dist.ProcessGroupNCCL.Options
    dist.barrier(group=both)


def run_new_groups(rank: int, size: int, backend: str, folder: str) -> None:
    """Groups of one rank each, of every backend, while the other rank only passes by."""
    device = start(backend, rank, size, folder)
    for other in ("echo", "nccl") if backend == "echo" else ("nccl", "echo"):
        groups = [dist.new_group([member], backend=other) for member in range(size)]
        x = torch.ones(8, device=device)
        dist.all_reduce(x, group=groups[rank])
        assert x.tolist() == [1.0] * 8
    if backend == "echo":
        gloo = dist.new_group([0], backend="gloo")
        assert (gloo == dist.GroupMember.NON_GROUP_MEMBER) == (rank == 1)
    pair = dist.new_group(backend="echo")
    x = torch.ones(8, device=device)
    dist.all_reduce(x, group=pair)
    dist.all_reduce(x)
    assert x.tolist() == [4.0] * 8


def test_split_groups(tmp_path: Path) -> None:
    run_ranks(run_split, 2, str(tmp_path), backend=None, timeout=120)


@pytest.mark.parametrize("backend", ["echo", "nccl"])
def test_new_groups_need_their_members_alone(backend: str, tmp_path: Path) -> None:
    run_ranks(run_new_groups, 2, backend, str(tmp_path), backend=None, timeout=120)
