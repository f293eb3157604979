"""Ranks that take a call for exact on one side and quantized on the other must fail, whatever the order of calls."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def run_crossed(rank: int, size: int, fabric: str) -> str:
    """Rank 0 forwards A and quantizes B; rank 1 quantizes A and forwards B: each exchange finds a partner."""
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
    group = dist.new_group(backend="echo", pg_options=options)
    a, b = torch.ones(64, 64, dtype=torch.bfloat16), torch.full((64, 64), 100.0, dtype=torch.bfloat16)
    try:
        if rank == 0:
            with echo_pg.exact():
                pending = dist.all_reduce(a, group=group, async_op=True)
            dist.all_reduce(b, group=group)
        else:
            dist.all_reduce(a, group=group)
            with echo_pg.exact():
                pending = dist.all_reduce(b, group=group, async_op=True)
        pending.wait()
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fabric", ("wire", "peer"))
def test_exact_on_one_rank_and_quantized_on_the_other(fabric: str) -> None:
    texts = run_ranks(run_crossed, 2, fabric, timeout=90)
    for text in texts:
        assert "disagree" in text or "another call" in text, text
    assert any("after 1 exact ones" in text and "after 0 exact ones" in text for text in texts), texts


def run_absent(rank: int, size: int, fabric: str) -> tuple[float, str]:
    import echo_pg

    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric, timeout=2.0)
    group = dist.new_group(backend="echo", pg_options=options)
    start = time.monotonic()
    if rank != 1:
        try:
            dist.all_reduce(torch.ones(64, 64, dtype=torch.bfloat16), group=group)
        except dist.DistBackendError as error:
            return time.monotonic() - start, str(error)
    time.sleep(4)
    return time.monotonic() - start, ""


@pytest.mark.parametrize("fabric", ("wire", "peer"))
def test_a_rank_that_never_comes_to_the_first_call_is_named(fabric: str) -> None:
    outcomes = run_ranks(run_absent, 3, fabric, timeout=90)
    for rank in (0, 2):
        waited, text = outcomes[rank]
        assert waited < 8
        assert "rank 1 did not come within 2000 ms" in text, text
