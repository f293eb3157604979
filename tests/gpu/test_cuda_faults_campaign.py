"""The campaign of faults on device tensors, over peer memory and over the wire: two or three ranks, which share GPUs
where there are fewer. `--injections N` sets how many, `--fault-seed` which."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "faults"))

import campaign

JOBS = 6  # at a time: most of an injection is starting and waiting


def test_every_fault_ends_in_an_error_that_names_it(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    numbers = list(range(request.config.getoption("--injections")))
    lines = campaign.campaign(numbers, request.config.getoption("--fault-seed"), "cuda", JOBS, None)
    summary = campaign.summarise(lines)
    for name in ("injections", "failed", "worst_latency_after_exit_s", "worst_latency_beyond_time_out_s"):
        record_property(name, summary[name])
    failed = [line for line in lines if line["problems"]]
    text = [f"{line['action']}, {line['stage']}, {line['fabric']}: {line['problems']}" for line in failed]
    assert not failed, "\n".join(text)
