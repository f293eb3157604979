"""Ranks that end, or come late, where codes of CUDA tensors travel through NCCL. NCCL refuses two ranks on one GPU.

What ends a wait there is NCCL's affair, as in every program of NCCL's: with TORCH_NCCL_BLOCKING_WAIT=1 its time-out is
an error, which echo then explains; without, torch's watchdog ends the process.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from test_cuda_peer import contribution
from test_faults import error_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TIMEOUT = 6.0  # seconds, of the groups under test
PATIENCE = 5.0
WATCHDOG = 60.0  # seconds; it writes down what it knows before it ends the process
NUMEL = 100_000
ENDED_BY_WATCHDOG = "exit code -6"


def wire_group() -> Any:
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric="wire", timeout=TIMEOUT)
    return dist.new_group(backend="echo", timeout=timedelta(seconds=TIMEOUT), pg_options=options)


def run_without_rank_1(rank: int, size: int, fault: str, folder: str) -> tuple[str, float]:
    """One good call, then one to which rank 1 does not come. What the survivor is told, and after how long."""
    torch.cuda.set_device(rank)
    group = wire_group()
    tensor = contribution(rank, size, NUMEL, 0, 0).cuda()
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    assert not tensor.isnan().any()
    if rank == 1:
        if fault == "exit":
            os._exit(3)
        time.sleep(TIMEOUT + WATCHDOG)
        return "", 0.0
    tensor = contribution(rank, size, NUMEL, 0, 1).cuda()
    before = tensor.clone()
    start = time.monotonic()
    text, _ = error_of(lambda: wait_for(tensor, group, Path(folder)))
    seconds = time.monotonic() - start
    assert tensor.isnan().all() or torch.equal(tensor, before), "never a number that is no sum"
    again, _ = error_of(lambda: dist.all_reduce(tensor, group=group))
    assert "does not resume" in again, again
    assert (torch.ones(1, device="cuda") + 1).item() == 2
    return text, seconds


def wait_for(tensor: torch.Tensor, group: Any, folder: Path) -> None:
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    (folder / "delivered").touch()


@pytest.mark.parametrize("fault", ["exit", "late"])
def test_with_blocking_waits_it_is_an_error_in_time(fault: str, tmp_path: Path) -> None:
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    limit = 2 * TIMEOUT + 2 * WATCHDOG
    results = run_ranks(run_without_rank_1, 2, fault, str(tmp_path), timeout=limit, check=False, env=env)
    assert not isinstance(results[0], RankError), results[0]
    text, seconds = results[0]
    assert "rank 0 of 2: quantized all_reduce number 1" in text and "waiting for" in text, text
    known = "the process of rank 1 has exited" if fault == "exit" else "rank 1 reports nothing"
    assert known in text and seconds < TIMEOUT + PATIENCE, (seconds, text)


def test_without_them_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    start = time.monotonic()
    results = run_ranks(run_without_rank_1, 2, "exit", str(tmp_path), timeout=TIMEOUT + 2 * WATCHDOG, check=False)
    assert isinstance(results[0], RankError) and ENDED_BY_WATCHDOG in str(results[0]), results[0]
    assert time.monotonic() - start < TIMEOUT + WATCHDOG + 30  # two processes start in less
    assert not (tmp_path / "delivered").exists(), "never a number that is no sum"
