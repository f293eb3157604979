"""A tensor-parallel MLP in plain PyTorch: torchrun --nproc-per-node 2 examples/plain_torch.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echo_pg  # only for the counters printed at the end

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("echo")  # the one word that changes: it was "nccl" or "gloo"

torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device, torch.bfloat16)
x = torch.randn(4, 256, 1024).to(device, torch.bfloat16)
with torch.no_grad():
    expected = mlp(x)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    error = (mlp(x) - expected).norm() / expected.norm()
if dist.get_rank() == 0:
    print(f"relative error against one rank: {error.item():.4f}")
    print({key: value for key, value in echo_pg.stats().items() if value})
dist.destroy_process_group()
