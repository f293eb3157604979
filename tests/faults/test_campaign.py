"""A part of the campaign of faults: `--injections N` sets how many, `--fault-seed` which."""

from __future__ import annotations

from typing import Any

import campaign
import pytest

JOBS = 6  # at a time; most of an injection is waiting for a time-out


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    numbers = list(range(request.config.getoption("--injections")))
    return campaign.campaign(numbers, request.config.getoption("--fault-seed"), "cpu", JOBS, None)


def test_every_fault_ends_in_an_error_that_names_it(lines: list[dict[str, Any]]) -> None:
    failed = [line for line in lines if line["problems"]]
    text = [
        f"{line['number']} {line['action']}, {line['stage']}, {line['fabric']}: {line['problems']}" for line in failed
    ]
    assert not failed, "\n".join(text)


def test_the_part_is_varied(lines: list[dict[str, Any]]) -> None:
    """That nothing passes because nothing was injected."""
    assert len({(line["action"], line["stage"], line["fabric"]) for line in lines}) >= 0.8 * min(len(lines), 100)
    assert sum(line["right_results"] for line in lines) > len(lines)
