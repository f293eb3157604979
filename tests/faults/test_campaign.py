"""A part of the campaign of faults: `--injections N` sets how many, `--fault-seed` which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import campaign
import injections
import pytest
import words
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
    it = injection("kill", 3)
    survivors = [rank for rank in range(3) if rank != it.victim]
    outcomes: list[Any] = [RankError("ended with exit code -9 and no result")] * 3
    outcomes[survivors[0]] = RankError("did not finish in time")
    text = f"{call_of(survivors[1], 3)} (exchange): the process of rank {it.victim} has exited"
    outcomes[survivors[1]] = Outcome(0, text, seconds=it.timeout)
    Outcome(0, diary=diary_of(str(tmp_path), survivors[0])).begin("call 1")
    unfinished = {rank: campaign.last_seen(str(tmp_path), rank) for rank in (survivors[0], it.victim)}
    assert unfinished[survivors[0]][0] == "call 1" and unfinished[it.victim] == ("starting", 0.0)
    hung, late = sorted(campaign.judge(it, outcomes, unfinished), key=lambda problem: "instead of" in problem)
    assert re.fullmatch(rf"rank {survivors[0]}: did not finish in time; call 1 since \d+\.\d s", hung), hung
    assert late == f"rank {survivors[1]}: 60.0 s instead of 5.0: {text}"


def injection(action: str, size: int, **fields: Any) -> injections.Injection:
    """The first one of that kind."""
    wanted = {"action": action, "size": size, **fields}
    chosen = (injections.choose(number, 1) for number in range(2000))
    return next(it for it in chosen if all(getattr(it, name) == value for name, value in wanted.items()))


def call_of(rank: int, size: int, exact: bool = False) -> str:
    kind, reason = ("exact", "; exact()") if exact else ("quantized", "")
    return f"rank {rank} of {size}: {kind} all_reduce number 1 (58976 elements, float16{reason}) of group '2' failed"


DESCRIPTIONS = "(exchange): waiting for the ranks' descriptions of this call"
LATE = "[/gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
NOTHING = "reports nothing (it is late, stopped, or out of reach)"


def test_an_error_must_name_each_thing_in_its_place() -> None:
    """Who raises it, in what, waiting for what, by whose fault: what stands elsewhere or of another rank is nothing."""
    it = injection("stop", 3, stage="ended", fabric="wire", victim=0)
    own, other = call_of(1, 3), call_of(2, 3)
    good = f"{own} {DESCRIPTIONS}: {LATE}; rank 0 {NOTHING}; rank 2 reports: {other} {DESCRIPTIONS}: {LATE}"
    assert not words.missing_words(it, 1, good)
    assert not words.missing_words(
        it, 1, f"{own} (exchange): rank 2 reports: {other} {DESCRIPTIONS}: ?; rank 0 {NOTHING}"
    )
    failed, waited, at_fault = "its own rank 1 and operation", "what it waited for", "rank 0 as the one at fault"
    for found, missing in (
        (good.replace(own, "the call failed"), [failed, waited]),
        (good.replace("rank 1 of 3", "rank 1 of 4", 1), [failed, waited]),
        (good.replace(own, other), [failed, waited]),
        (good.replace(f"{DESCRIPTIONS}: {LATE}; rank 0", "(exchange): it failed; rank 0"), [waited]),
        (good.replace("the ranks' descriptions of this call", "something", 1), [waited]),
        (good.replace(f"{DESCRIPTIONS}: {LATE}; rank 0", f"(exchange): {LATE}; rank 0"), [waited]),
        (good.replace("rank 0 reports nothing", "rank 0 reports"), [at_fault]),
        (good.replace("rank 0 reports nothing", "rank 2 reports nothing"), [at_fault]),
    ):
        told = words.missing_words(it, 1, found)
        assert told == [f"rank 1: the error does not name {what}: {found}" for what in missing], told


def test_the_exit_that_an_error_names_must_be_the_right_one() -> None:
    it = injection("kill", 3, stage="pushed", fabric="peer", victim=2)
    place = "(rank 0 waited in gather, lane 0, expected ticket 35c82a1100000005, saw 9ead8c8000000002)"
    good = f"{call_of(0, 3)} (exchange): the process of rank 2 has exited {place}"
    assert not words.missing_words(it, 0, good)
    assert len(words.missing_words(it, 0, good.replace("process of rank 2", "process of rank 1"))) == 2
    assert len(words.missing_words(it, 0, good.replace("rank 0 waited in gather", "waited"))) == 1
    assert len(words.missing_words(it, 0, good.replace("has exited", "is late"))) == 2
    exact = f"{call_of(0, 3, exact=True)}: [/gloo/pair.cc:553] Connection closed by peer"
    assert not words.missing_words(it, 0, f"{exact}; the process of rank 2 has exited")
    assert len(words.missing_words(it, 0, f"{exact}; the process of rank 1 has exited; rank 2 {NOTHING}")) == 1


def test_a_decision_that_an_error_keeps_to_itself_is_found() -> None:
    """Where ranks decide differently each error names both decisions: what is left out is told."""
    it = injection("forward", 2)
    rank = it.victim  # of whose own error nothing else is asked
    quantized, exact = call_of(1 - rank, 2), call_of(rank, 2, exact=True)
    for own, theirs, missing in (
        (quantized, exact, f"that rank {rank} forwarded"),
        (exact, quantized, "who quantized"),
    ):
        assert not words.missing_words(it, rank, f"{own}: {LATE}; rank {1 - rank} reports: {theirs}: {LATE}")
        (found,) = words.missing_words(it, rank, f"{own}: {LATE}; rank {1 - rank} {NOTHING}")
        assert f"does not name {missing}:" in found, found
    decided = f"{quantized} {DESCRIPTIONS}: {LATE}; rank {rank}"
    assert not words.missing_words(it, 1 - rank, f"{decided} reports: {exact}: {LATE}")
    assert len(words.missing_words(it, 1 - rank, f"{decided} {NOTHING}")) == 1


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
