"""What NCCL refuses is refused in its own words: tests/test_forwarding.py asks that of Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_cuda_peer import GPUS, use_gpu


def refused_calls(group: Any) -> dict[str, Callable[[], Any]]:
    """Calls that NCCL refuses on each rank alone, before it talks to others."""
    x = torch.ones(4, 4, device="cuda")
    return {
        "message from anyone": lambda: group.recv_anysource([x], 0).wait(),
        "bits of floats": lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        "average of truth values": lambda: dist.all_reduce(x.bool(), dist.ReduceOp.AVG, group=group),
        "not contiguous": lambda: dist.all_reduce(x.t()[:2], group=group),
        "several dtypes": lambda: group.allreduce_coalesced([x, x.bfloat16()]).wait(),
    }


def run_refused(rank: int, size: int) -> tuple[dict[str, tuple[str, str]], list[float]]:
    """Per call how NCCL refuses it, and how echo does; then what a sum over each group gives."""
    import echo_pg

    use_gpu(rank)
    groups = {
        "inner": dist.new_group(backend="nccl"),
        "echo": dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0)),
    }
    texts: dict[str, tuple[str, str]] = {}
    for name in refused_calls(groups["inner"]):
        found = []
        for group in groups.values():
            try:
                refused_calls(group)[name]()
                found.append("no error")
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        texts[name] = (found[0], found[1])
    sums = []
    for group in groups.values():
        x = torch.full((), float(rank + 1), device="cuda")
        dist.all_reduce(x, group=group)
        sums.append(x.item())
    return texts, sums


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_what_nccl_refuses_is_refused_in_its_words() -> None:
    size = min(2, GPUS)  # NCCL wants a GPU for each rank
    for texts, sums in run_ranks(run_refused, size):
        for name, (inner, outer) in texts.items():
            assert inner != "no error", name
            assert inner == outer, name
        assert sums == [size * (size + 1) / 2] * 2, "groups go on after it"
