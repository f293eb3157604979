"""A small tensor-parallel transformer over bytes, in plain PyTorch, and the text that it learns: for runs that compare
whole trainings."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

BYTES = 256
# Modules of the standard library whose docstrings are the text: long ones, and present in every supported Python.
_SOURCES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "difflib", "doctest", "enum", "fileinput", "fractions", "ftplib", "functools", "gettext", "heapq",
    "imaplib", "inspect", "locale", "mailbox", "netrc", "optparse", "pathlib", "pdb", "pickle", "pickletools",
    "platform", "plistlib", "poplib", "pprint", "pydoc", "queue", "random", "sched", "shelve", "shlex",
    "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "trace", "turtle", "typing", "uuid", "weakref", "zipapp",
)  # fmt: skip


def text() -> Tensor:
    """The docstrings as uint8 tensor [bytes]; the same for all ranks of one Python version."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for name in _SOURCES:
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.is_file():
                found += _docstrings(ast.parse(path.read_text(encoding="utf-8")))
    return torch.frombuffer(bytearray("\n\n".join(found).encode()), dtype=torch.uint8)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            said := ast.get_docstring(node)
        ):
            yield said


def batches(data: Tensor, size: int, length: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: random stretches of the text as int64 [size, length], and the bytes that follow each."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(data) - length - 1, (size, 1), generator=generator)
        stretch = data[starts + offsets].long()
        yield stretch[:, :-1], stretch[:, 1:]


class Block(nn.Module):
    """Attention and MLP; their outputs are what ranks sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        heads = [
            part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Next-byte logits [batch, length, 256] of bytes [batch, length]. `wrap(block, x)` replaces the call of each run of
    `blocks_per_segment` blocks: a checkpoint, for instance."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)
        self.wrap: Any = None
        self.blocks_per_segment = 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        step = self.blocks_per_segment
        for first in range(0, len(self.blocks), step):
            segment = nn.Sequential(*self.blocks[first : first + step]) if step > 1 else self.blocks[first]
            x = segment(x) if self.wrap is None else self.wrap(segment, x)
        return self.lm_head(self.norm(x))


PLAN = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


def mesh_over(group: Any, device: Any) -> DeviceMesh:
    """The mesh of a group, with a dimension named after it: DTensor takes meshes of equal names and ranks for one, and
    would send everything through the group of the first."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(group.group_name,))


def make(mesh: Any, seed: int = 0, device: Any = "cpu", **sizes: int) -> Transformer:
    """A bfloat16 model whose blocks are split over the ranks of a one-dimensional mesh; None: a whole one."""
    torch.manual_seed(seed)
    model = Transformer(**sizes).to(device, torch.bfloat16)
    for block in model.blocks if mesh is not None else ():
        parallelize_module(block, mesh, PLAN)
    return model


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MasterAdamW:
    """AdamW on fp32 copies of this rank's part of bfloat16 parameters: updates smaller than their rounding count.

    settings: of torch's AdamW; weight_decay (default 0) is for parameters of two or more dimensions.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0, **settings: Any) -> None:
        self.parameters = list(model.parameters())
        self.masters = [local(parameter.detach()).float() for parameter in self.parameters]
        groups = [
            {"params": [master for master in self.masters if (master.dim() > 1) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, weight_decay), (False, 0.0))
        ]
        self.inner = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **settings)

    @torch.no_grad()
    def take_gradients(self) -> list[Tensor]:
        """Move the parameters' gradients to the copies, as fp32; returns them, in the order of the parameters."""
        gradients = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = local(parameter.grad).float()
            parameter.grad = None
            gradients.append(master.grad)
        return gradients

    @torch.no_grad()
    def update(self, lr: float | None = None) -> None:
        """One step with the gradients that were taken; `lr` from now on, if given."""
        for group in self.inner.param_groups if lr is not None else ():
            group["lr"] = lr
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            local(parameter.detach()).copy_(master)

    def step(self) -> None:
        self.take_gradients()
        self.update()
