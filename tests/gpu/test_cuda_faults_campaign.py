"""The campaign of faults on device tensors over peer memory: two ranks, which share a GPU if there is only one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "faults"))

import campaign
import injections


def test_every_fault_ends_in_an_error_that_names_it() -> None:
    """Each kind once, two at a time: most of an injection is starting and waiting."""
    numbers = list(range(len(injections.combinations("cuda"))))
    failed = [line for line in campaign.campaign(numbers, 1, "cuda", 2, None) if line["problems"]]
    assert not failed, "\n".join(f"{line['action']}, {line['stage']}: {line['problems']}" for line in failed)
