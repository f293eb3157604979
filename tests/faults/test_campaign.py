"""A part of the campaign of faults: `--injections N` sets how many, `--fault-seed` which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import campaign
import injections
import pytest
from participant import Outcome, diary_of
from ranks import RankError

from echo_pg import build

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


def test_a_rank_that_returned_nothing_is_told_with_what_it_was_doing(tmp_path: Path) -> None:
    """A rank that hangs, and one whose error came late: both are found, with their words and seconds."""
    it = next(it for it in (injections.choose(n, 1) for n in range(500)) if it.action == "kill" and it.size == 3)
    survivors = [rank for rank in range(3) if rank != it.victim]
    outcomes: list[Any] = [RankError("ended with exit code -9 and no result")] * 3
    outcomes[survivors[0]] = RankError("did not finish in time")
    text = f"rank {survivors[1]} of 3: quantized all_reduce number 1 failed: the process of rank {it.victim} has exited"
    outcomes[survivors[1]] = Outcome(0, text, seconds=it.timeout)
    Outcome(0, diary=diary_of(str(tmp_path), survivors[0])).begin("call 1")
    unfinished = {rank: campaign.last_seen(str(tmp_path), rank) for rank in (survivors[0], it.victim)}
    assert unfinished[survivors[0]][0] == "call 1" and unfinished[it.victim] == ("starting", 0.0)
    hung, late = sorted(campaign.judge(it, outcomes, unfinished), key=lambda problem: "instead of" in problem)
    assert re.fullmatch(rf"rank {survivors[0]}: did not finish in time; call 1 since \d+\.\d s", hung), hung
    assert late == f"rank {survivors[1]}: 60.0 s instead of 5.0: {text}"


def test_a_decision_that_an_error_keeps_to_itself_is_found() -> None:
    """Where ranks decide differently each error names both decisions: what is left out is told."""
    it = next(it for it in (injections.choose(n, 1) for n in range(500)) if it.action == "forward" and it.size == 2)
    other = 1 - it.victim
    quantized = f"rank {other} of 2: quantized all_reduce number 0 failed: rank {it.victim} did not come"
    exact = f"rank {it.victim} of 2: exact all_reduce number 0 failed: timed out"
    for own, theirs, missing in ((quantized, exact, "forwarded"), (exact, quantized, "who quantized")):
        assert not campaign.missing_decisions(it, other, f"{own}; rank 1 reports: {theirs}")
        (found,) = campaign.missing_decisions(it, other, f"{own}; rank 1 reports nothing")
        assert missing in found, found


def test_each_stage_of_a_call_on_a_device_is_struck() -> None:
    """Over peer memory and the wire, by every action that can strike there; once, in what a campaign tries first."""
    kinds = injections.combinations("cuda")
    first = [injections.choose(number, 5, "cuda") for number in range(len(kinds))]
    assert {(it.action, it.stage, it.fabric, it.diagnostics) for it in first} == set(kinds)
    for fabric, stages in (
        ("peer", {*injections.DEVICE_STEPS, "creating", "before", "within", "waiting"}),
        ("wire", {*injections.STEPS, "creating", "before", "within", "waiting"} - set(injections.MAKING)),
    ):
        for action in injections.ACTIONS:
            skipped = {"closing", "within", "waiting"} if action == "throw" else set()
            struck = {it.stage for it in first if (it.action, it.fabric) == (action, fabric)}
            assert struck == stages - skipped, (fabric, action)
    late = [it for it in first if it.is_updated_later]
    assert late and all((it.bits, it.residual, it.dtype) == (4, "group", "bfloat16") and it.call > 0 for it in late)
    assert all(it.numel * 2 >= build.extension().testing.deferred_update_bytes for it in late)
