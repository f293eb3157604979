"""`python -m echo_pg bench recompute` and `bench hooks`: tiny runs from end to end, and what the first one shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from echo_pg.__main__ import main
from echo_pg.bench import hooks, transformer


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands set this for their ranks; here it would reach those of later tests."""
    monkeypatch.setenv("ECHO_LOG", "off")


def test_what_recomputed_sums_do_to_gradients(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "recompute", "--steps", "3", "--out", str(tmp_path)]) == 0, capfd.readouterr()
    (path,) = tmp_path.iterdir()
    made = json.loads(path.read_text())
    rows = {(row["recompute"], row["feedback"]): row for row in made["rows"]}
    # Identical to the bit: sums that are kept, and sums that are rounded alike because no state tells them apart.
    for identical in ("saved", True), ("saved", False), ("plain", False):
        assert rows[identical]["gradient_relative_error"] == rows[identical]["loss_difference"] == 0.0
    # Else the gradient is taken near by: farther than nothing, nearer than what quantization itself does to it.
    quantization = {entry["feedback"]: entry["gradient_relative_error"] for entry in made["quantization"]}
    for way, feedback in ("feedback", True), ("plain", True), ("exact", True), ("exact", False):
        assert 0.0 < rows[way, feedback]["gradient_relative_error"] < quantization[feedback]
    # Four layers: 8 sums forward, 16 backward; each checkpoint sums once more, and stops before the second sum.
    calls = {key: row["quantized_calls_per_step"] for key, row in rows.items()}
    assert all(calls[key] == (28 if key[0] in ("feedback", "plain") else 24) for key in calls)
    assert "saved" in capfd.readouterr().out


@pytest.mark.parametrize(
    "bad", [["recompute", "--ranks", "9"], ["recompute", "--segment", "3"], ["hooks", "--turns", "0"]]
)
def test_arguments_that_make_no_sense(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *bad]) == 2
    assert bad[1] in capsys.readouterr().err


def test_hooks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hooks.json"
    assert main(["bench", "hooks", "--turns", "2", "--out", str(path)]) == 0, capfd.readouterr()
    said, made = capfd.readouterr().out, json.loads(path.read_text())
    assert "22 module calls a step" in said and "hooks alone" in said
    assert (made["module_calls"], made["turns"]) == (22, 2)
    assert 0 < made["hooks_alone_percent"] < 5 and made["step_wall_ms"] > 1
    for name in ("difference_wall", "difference_cpu", "by_chance_wall", "by_chance_cpu"):
        low, high = made[f"{name}_interval_percent"]
        assert low <= made[f"{name}_percent"] <= high


def test_interval_of_a_median() -> None:
    assert hooks.median_interval([3.0, 1.0, 2.0]) == (1, 3)
    values = [float(i) for i in range(100)]
    assert hooks.median_interval(values[::-1]) == (40, 59), "order statistics 41 and 60 of 100"


def test_text_is_english_and_batches_repeat() -> None:
    data = transformer.text()
    assert data.dtype == torch.uint8 and len(data) > 100_000 and b"the" in bytes(data[:1000].tolist())
    (tokens, targets), (again, _) = (next(transformer.batches(data, 2, 8)) for _ in range(2))
    assert torch.equal(tokens, again) and torch.equal(tokens[:, 1:], targets[:, :-1])
