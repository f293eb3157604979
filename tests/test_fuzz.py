"""A seeded slice of the fuzzing of options, environment and what a store holds; tests/fuzz/fuzz.py runs it for long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))
from fuzz import NAMES, mutate_for
from fuzz_targets import TARGETS


def test_the_long_run_leaves_no_target_out() -> None:
    assert set(NAMES) == set(TARGETS)


@pytest.mark.parametrize(
    ("target", "rounds"),
    [("options", 1500), ("environment", 1500), ("record", 8000), ("report", 4000), ("handle", 8000)],
)
def test_mutated_inputs_break_no_promise(target: str, rounds: int) -> None:
    found = mutate_for(target, rounds)
    assert found["inputs"] == rounds
    assert rounds / 100 < found["accepted"] < rounds, "mutation reaches both what is accepted and what is refused"
