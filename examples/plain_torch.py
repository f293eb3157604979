"""Trains a small tensor-parallel transformer in plain PyTorch: torchrun --nproc-per-node 2 examples/plain_torch.py

It learns the bytes of its own source, on 2, 4 or 8 ranks, which its 8 heads are split over. At the end the same
training runs on the exact backend, for comparison.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

STEPS, BATCH, LENGTH, WIDTH, LAYERS = 20, 32, 128, 256, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, 32)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}


def train(device):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256)).to(device)
    model.bfloat16()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks:
        parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        tokens = text[starts + torch.arange(LENGTH + 1)].to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("echo")  # the one word that changes: it was "nccl" or "gloo"
losses = train(device)

# What follows only tells what happened.
import echo_pg  # noqa: E402

stats, size = echo_pg.stats(), dist.get_world_size()
with echo_pg.exact():
    expected = train(device)
if dist.get_rank() == 0:
    sent, without = stats["wire_bytes"], stats["bytes_quantized"] * 2 * (size - 1) // size
    difference = sum(abs(x - y) for x, y in zip(losses, expected, strict=True)) / STEPS
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on the exact backend {expected[-1]:.3f}")
    print(f"mean difference over {STEPS} steps: {difference:.4f}")
    print(f"{stats['calls_quantized']} all-reduces quantized")
    print(f"{(without - sent) / 2**20:.1f} of {without / 2**20:.1f} MiB saved")
    print(f"{stats['calls_forwarded']} exact: {stats['forwarded']}; passes: {stats['passes']}")
dist.destroy_process_group()
