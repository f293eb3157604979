"""`python -m echo_pg bench floors`: from records of times to what links and memory would allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_pg.__main__ import main
from echo_pg.bench import floors

BASELINE = Path(__file__).resolve().parent.parent / "ci" / "baseline"


def record(ranks: int = 2, wire_bytes: int = 0, **options: Any) -> dict[str, Any]:
    return {"options": options, "ranks": ranks, "bytes": 1 << 30, "dtype": "bfloat16", "wire_bytes": wire_bytes}


def test_bytes_of_memory() -> None:
    size = 1 << 30
    assert floors.memory_bytes(record(feedback=False)) == (2 * size, 0)
    # Two ranks: half of the codes come from the peer and whole ones are gathered, each stored and loaded.
    assert floors.memory_bytes(record(feedback=False, wire_bytes=1000))[0] == 2 * size + 3 * 1000
    # Eight: seven eighths of the codes are pushed and whole ones gathered, and 7/4 of them are sent.
    assert floors.memory_bytes(record(ranks=8, feedback=False, wire_bytes=7000))[0] == 2 * size + (14 + 16) / 8 * 4000
    one = floors.memory_bytes(record(state_dtype="int8"))[0] - 2 * size
    assert one == pytest.approx(2 * (size / 2) * (1 + 2 / 128), rel=1e-3), "a byte per element and a scale per group"
    assert floors.memory_bytes(record(state_dtype="tensor")) == (2 * size + 2 * size, 0)


def test_bytes_of_an_update_after_its_call() -> None:
    size = 1 << 30
    group = {"state_dtype": "tensor", "residual": "group"}
    # The call: the tensor read and written, a copy kept, c read. The update: the copy read, the state read and written.
    assert floors.memory_bytes(record(**group)) == (3 * size + size, size + 2 * size)
    two = {"a": 0.35, "beta2": 0.3}
    assert floors.memory_bytes(record(**group, **two)) == (3 * size + size, size + 4 * size)
    # Of 1000 bytes of codes half are kept besides; the update reads all.
    in_call, after = floors.memory_bytes(record(wire_bytes=1000, **group))
    assert (in_call, after) == (4 * size + 3 * 1000 + 500, 3 * size + 1000)
    small = record(**group) | {"bytes": 1 << 20}
    assert floors.memory_bytes(small) == (3 * (1 << 20) + 2 * (1 << 20), 0), "in one kernel"


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = BASELINE / "bench_allreduce_h200x2.jsonl"
    assert main(["bench", "floors", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "4 bits, no feedback" in shown and "NCCL" not in shown
    assert main(["bench", "floors", str(kept), "--link", "1"]) == 0
    assert capsys.readouterr().out != shown
    assert main(["bench", "floors", str(kept), "--size", "3KiB"]) == 2
    assert "no row of 3KiB" in capsys.readouterr().err
    assert main(["bench", "floors", str(kept), "--copy", "0"]) == 2
    assert "--copy 0" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text(json.dumps({"bench": "theory"}))
    assert main(["bench", "floors", str(tmp_path / "other.jsonl")]) == 2
    assert main(["bench", "floors", str(tmp_path / "missing.jsonl")]) == 2
