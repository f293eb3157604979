"""A program that names echo for CPU tensors on a machine with GPUs: nothing of CUDA is started before it uses CUDA.
GPUs and NCCL are imitated; tests/gpu/test_cuda_untouched.py looks at real ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_backend import contribution, is_close

from echo_pg import Options, alias, creation, inner_backends

CPU = torch.device("cpu")


def imitate_gpus() -> list[str]:
    """Returns what is asked of CUDA or made of NCCL from now on."""
    asked: list[str] = []

    class Nccl:
        class Options:
            pass

    def nccl(place: Any, role: str, inner_options: Any) -> Any:
        asked.append(f"NCCL for {role}")
        return inner_backends.make_gloo(place, role, "cuda")

    def count() -> int:
        asked.append("device_count")
        return 2

    creation._may_have_gpus = lambda: True
    inner_backends.nccl_class = lambda: Nccl
    inner_backends.make_nccl = nccl
    torch.cuda.device_count = count
    torch.cuda.is_available = lambda: count() > 0
    torch.cuda._lazy_init = lambda: asked.append("_lazy_init")
    return asked


def start(rank: int, size: int, place: str, name: str = "echo") -> Any:
    store = dist.FileStore(f"{place}/store", size)
    options = Options(policy="all", min_bytes=0)
    dist.init_process_group(
        name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30), pg_options=options
    )
    return dist.distributed_c10d._get_default_group()._get_backend(CPU)


def run_cpu_program(rank: int, size: int, place: str) -> list[str]:
    asked = imitate_gpus()
    backend = start(rank, size, place)
    tensor = contribution(rank)
    dist.all_reduce(tensor)
    assert is_close(tensor, size)
    exact = torch.full((5,), rank)
    dist.all_reduce(exact)
    assert exact[0] == sum(range(size))
    dist.barrier()
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    received = torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received[0] == 1 - rank and backend.supports_coalescing
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    return asked


def test_a_program_of_cpu_tensors_asks_nothing_of_cuda(tmp_path: Any) -> None:
    assert run_ranks(run_cpu_program, 2, str(tmp_path), backend=None) == [[], []]


def run_first_use(rank: int, size: int, place: str) -> None:
    """What the group was told before its CUDA side was made holds for that, too."""
    asked = imitate_gpus()
    backend = start(rank, size, place)
    backend._set_default_timeout(timedelta(seconds=17))
    with pytest.raises(ValueError, match="no backend for xpu"):
        backend._inner("xpu")
    assert asked == []
    inner = backend._inner("cuda")
    assert asked == ["NCCL for pass"] and backend._inner("cuda") is inner
    assert inner.options._timeout == timedelta(seconds=17)
    tensor = torch.full((4,), float(rank))
    inner.allreduce([tensor]).wait()
    assert tensor[0] == sum(range(size))
    dist.destroy_process_group()


def test_the_first_use_of_cuda_makes_its_group(tmp_path: Any) -> None:
    run_ranks(run_first_use, 2, str(tmp_path), backend=None)


def run_shown(rank: int, size: int, place: str, name: str) -> list[str]:
    asked = imitate_gpus()
    alias.install(["nccl"])
    torch.cuda.is_initialized = lambda: name == "echo"
    start(rank, size, place, name)
    return asked


@pytest.mark.parametrize("name", ["nccl", "echo"])
def test_a_program_that_has_shown_that_it_uses_cuda_gets_its_group_at_once(name: str, tmp_path: Any) -> None:
    """By asking for NCCL, or by having used CUDA already."""
    assert run_ranks(run_shown, 2, str(tmp_path), name, backend=None) == [["NCCL for pass"]] * 2
