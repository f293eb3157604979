"""With ECHO_LOG=debug every all-reduce is one event and one line that says what was decided, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent / "frameworks"))
from harness import DEBUG, record, table


def run_logged(rank: int, size: int) -> tuple[Any, list[str]]:
    recorder = record()
    import echo_pg

    group = dist.new_group(backend="echo", group_desc="tp", pg_options=echo_pg.Options(min_bytes=64))
    activation = torch.ones(8, 16, dtype=torch.bfloat16)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=group)
            return x

    Layer()(activation)
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce_coalesced([torch.ones(2, 2), torch.ones(3)], group=group)
    calls = recorder.take()
    return table(calls), [call["line"] for call in calls]


def test_each_call_is_an_event_and_a_line() -> None:
    (calls, lines), _ = run_ranks(run_logged, 2, env=DEBUG)
    assert calls == {
        ("forward", "SUM", "bfloat16", "[8, 16]", "quantized"): 1,
        ("none", "MAX", "float32", "[2]", "not a SUM"): 1,
        ("none", "SUM", "float32", "[2, 2]", "several tensors"): 1,
    }
    assert lines[0] == "group tp: all_reduce SUM bfloat16 [8, 16] in forward: quantized"
    assert lines[2] == "group tp: all_reduce SUM float32 [2, 2] and 1 more outside a pass: several tensors"


def run_silent(rank: int, size: int) -> list[Any]:
    recorder = record()
    group = dist.new_group(backend="echo")
    dist.all_reduce(torch.ones(2), group=group)
    return recorder.take()


def test_calls_are_no_events_otherwise() -> None:
    assert run_ranks(run_silent, 2) == [[], []]
