"""CUDA tensors against the reference, byte for byte, over NCCL; one GPU per rank."""

from __future__ import annotations

import contextlib

import covering
import data
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from test_allreduce import check_row, digest, run_rows
from test_cuda_peer import needs_two_gpus

SIZES = [size for size in covering.FACTORS["size"] if size <= torch.cuda.device_count()]


@pytest.mark.parametrize("size", SIZES)
def test_every_pair_of_options_equals_the_reference(size: int) -> None:
    # Rows made for more ranks than there are GPUs run too, over as many as there are.
    rows = [row | {"size": size} for row in covering.pairwise() if row["size"] == size or row["size"] not in SIZES]
    outcomes = run_ranks(run_rows, size, rows, "wire", "cuda", timeout=280)
    for index, row in enumerate(rows):
        check_row(row, [outcome[index] for outcome in outcomes], "wire")


def run_async(rank: int, size: int, numel: int) -> list[torch.Tensor]:
    """Two calls in flight, each in a lane of its own, then a site that follows them; side streams change no bit."""
    import echo_pg

    torch.cuda.set_device(rank)
    group = dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0, fabric="wire"))
    found = []
    for step in range(4):
        tensors = [x.cuda() for x in async_inputs(size, numel, step, rank)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        last = data.contributions("activations", size, numel, torch.bfloat16, seed=9, site=step)[rank].cuda()
        dist.all_reduce(last, group=group)
        found += [x.cpu() for x in (*tensors, last)]
    return found


def async_inputs(size: int, numel: int, step: int, rank: int) -> list[torch.Tensor]:
    return [
        data.contributions("activations", size, numel, torch.bfloat16, seed=lane, site=step)[rank] for lane in (1, 2)
    ]


@needs_two_gpus
def test_calls_in_flight_have_lanes_of_their_own() -> None:
    size, numel = 2, 3_000_001
    outcomes = run_ranks(run_async, size, numel, timeout=200)
    group = RefGroup(size)
    index = 0
    for step in range(4):
        for lane, seed in ((0, 1), (1, 2), (0, 9)):
            given = data.contributions("activations", size, numel, torch.bfloat16, seed=seed, site=step)
            expected = group.all_reduce(given, lane=lane).output
            for outcome in outcomes:
                assert digest(outcome[index]) == digest(expected), (step, lane)
            index += 1


def run_mismatch(rank: int, size: int) -> tuple[bool, str]:
    import echo_pg

    torch.cuda.set_device(rank)
    group = dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0, fabric="wire"))
    if rank == 1:
        echo_pg.new_pass("backward", group)
    x = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.get_future().wait()
    is_nan = bool(x.isnan().all().item())
    with contextlib.suppress(dist.DistBackendError):  # the host may know of it by now
        work.wait()
    try:
        dist.all_reduce(torch.ones(4096, device="cuda", dtype=torch.bfloat16), group=group)
    except dist.DistBackendError as error:
        return is_nan, str(error)
    return is_nan, ""


@needs_two_gpus
def test_ranks_in_different_calls_get_nan_then_an_error() -> None:
    for is_nan, text in run_ranks(run_mismatch, 2, timeout=120):
        assert is_nan
        assert "disagree" in text and "backward" in text
