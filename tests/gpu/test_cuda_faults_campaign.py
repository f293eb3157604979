"""The campaign of faults on device tensors over peer memory: two ranks, which share a GPU if there is only one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "faults"))

import campaign
import injections


def test_every_fault_ends_in_an_error_that_names_it(record_property: Callable[[str, object], None]) -> None:
    """Each kind once, two at a time: most of an injection is starting and waiting."""
    numbers = list(range(len(injections.combinations("cuda"))))
    lines = campaign.campaign(numbers, 1, "cuda", 2, None)
    summary = campaign.summarise(lines)
    for name in ("injections", "failed", "worst_latency_after_exit_s", "worst_latency_beyond_time_out_s"):
        record_property(name, summary[name])
    failed = [line for line in lines if line["problems"]]
    assert not failed, "\n".join(f"{line['action']}, {line['stage']}: {line['problems']}" for line in failed)
