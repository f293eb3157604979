"""Barriers for which nobody names a device: every rank takes the same way, whatever it has done with CUDA by then."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

SLEEP_CYCLES = 400_000_000  # a fifth of a second, on GPUs of 2 GHz
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_unequal(rank: int, size: int) -> None:
    dist.barrier()  # nobody uses CUDA
    if rank == 0:
        torch.ones(1, device="cuda")
    dist.barrier()  # one does
    torch.ones(1, device=torch.device("cuda", rank % torch.cuda.device_count()))
    dist.barrier()  # all do, and those with another than the current device, too


def test_ranks_that_use_cuda_and_ranks_that_do_not() -> None:
    run_ranks(run_unequal, 2, backend="echo", group_timeout=20, timeout=60)


def run_waiting(rank: int, size: int) -> bool:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        assert not stream.query()
        dist.barrier()
        return stream.query()


def test_a_barrier_waits_for_the_current_stream() -> None:
    assert run_ranks(run_waiting, 2, backend="echo", timeout=60) == [True, True]


def run_in_the_place_of_nccl(rank: int, size: int, folder: str) -> tuple[str, list[str], int]:
    from echo_pg import alias

    alias.install(["nccl"])
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    where = dist.distributed_c10d._get_object_coll_device()
    dist.barrier()
    if rank == 0:  # a rank may talk to itself alone once a barrier has connected all
        sent, received = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        operations = [dist.P2POp(dist.irecv, received, 0), dist.P2POp(dist.isend, sent, 0)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received.item() == 1
    objects = [""] * size
    dist.all_gather_object(objects, f"from {rank}")
    return where, objects, dist.get_world_size(dist.new_group())


@needs_two_gpus
def test_what_is_called_nccl_keeps_barriers_and_objects_on_the_gpu(tmp_path: Path) -> None:
    for found in run_ranks(run_in_the_place_of_nccl, 2, str(tmp_path), backend=None, timeout=90):
        assert found == ("cuda", ["from 0", "from 1"], 2)
