"""A program that names echo for CPU tensors on a machine with GPUs opens nothing of CUDA's driver, whose start costs
seconds and memory and takes CUDA away from forked children. As a program it says which step does:

    python tests/gpu/test_cuda_untouched.py

Barriers are those of the group: torch's own dist.barrier asks for an accelerator, with any backend, and that opens it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from ranks import run_ranks


def opened() -> list[str]:
    """What this process has open of the driver."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and "/dev/nvidia" in (name := os.readlink(link)):
            found.append(name)
    return sorted(found)


def all_reduce(dtype: torch.dtype, group: Any, rank: int) -> None:
    tensor = torch.full((20_000,), float(rank), dtype=dtype)
    dist.all_reduce(tensor, group=group)
    assert tensor.isfinite().all()


def run_steps(rank: int, size: int) -> dict[str, list[str]]:
    """What was open after each step; the default group of Gloo is there before the first."""
    steps = {"import torch, init_process_group('gloo')": opened()}

    def after(step: str) -> None:
        steps[step] = opened()

    import echo_pg

    after("import echo_pg")
    for fabric in ("peer", "wire"):
        options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
        group = dist.new_group(backend="echo", pg_options=options)
        after(f"{fabric}: new_group")
        all_reduce(torch.bfloat16, group, rank)
        after(f"{fabric}: quantized all_reduce")
        all_reduce(torch.float64, group, rank)
        after(f"{fabric}: forwarded all_reduce")
        group.barrier().wait()
        after(f"{fabric}: barrier")
        dist.destroy_process_group(group)
        after(f"{fabric}: destroy_process_group")
    return steps


def run_default_group(rank: int, size: int) -> list[str]:
    all_reduce(torch.bfloat16, None, rank)
    dist.distributed_c10d._get_default_group().barrier().wait()
    return opened()


def run_forked_child(rank: int, size: int) -> str:
    """Of a process that used echo: whether a child that it forks can use CUDA."""
    import echo_pg

    group = dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0))
    all_reduce(torch.bfloat16, group, rank)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            text = f"{(torch.ones(2, device='cuda') + 1).sum().item()}"
        except Exception as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 10_000).decode()
    os.waitpid(child, 0)
    return text


def run_first_cuda_tensor(rank: int, size: int) -> tuple[list[str], float]:
    """The same group serves CUDA tensors once they come."""
    before = opened()
    tensor = torch.full((1000,), float(rank + 1), device=torch.device("cuda", rank), dtype=torch.float64)
    dist.all_reduce(tensor)
    return before, tensor[0].item()


def test_cpu_tensors_open_nothing() -> None:
    for rank, steps in enumerate(run_ranks(run_steps, 2)):
        assert not any(steps.values()), (rank, next((step, held) for step, held in steps.items() if held))


def test_cpu_tensors_open_nothing_where_echo_is_the_default_group() -> None:
    assert run_ranks(run_default_group, 2, backend="echo") == [[], []]


def test_a_forked_child_can_use_cuda() -> None:
    assert run_ranks(run_forked_child, 2) == ["4.0", "4.0"]


def test_the_first_cuda_tensor_makes_its_group() -> None:
    size = min(2, torch.cuda.device_count())
    total = float(sum(range(1, size + 1)))
    assert run_ranks(run_first_cuda_tensor, size, backend="echo") == [([], total)] * size


if __name__ == "__main__":
    for step, held in run_ranks(run_steps, 2)[0].items():
        print(f"{step}: {', '.join(held) or 'nothing'}")
