"""`python -m echo_pg bench train`: tiny trainings from end to end, what they compare, the report of fixed records."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from echo_pg.__main__ import main
from echo_pg.bench import progress, results, train, train_rank, train_report, transformer

TINY = ["--layers", "2", "--batch", "2", "--steps", "3", "--seeds", "1"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its ranks; here it would reach those of later tests."""
    monkeypatch.setenv("ECHO_LOG", "off")


def test_trainings_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = "16bit@3e-4,off@3e-4,4bit@3e-4,4bit-plain@3e-4"
    arguments = ["bench", "train", *TINY, "--rows", rows, "--out", str(tmp_path)]
    assert main([*arguments, "--at-most", "2"]) == 0, capfd.readouterr()
    path = tmp_path / "train-small-cpu.jsonl"
    assert [record["row"] for record in results.read(path, "train")] == ["16bit", "off"]
    assert main(arguments) == 0, capfd.readouterr()  # the others, and those alone
    made = {record["row"]: record for record in results.read(path, "train")}
    assert len(made) == len(path.read_text().splitlines()) == 4

    # Switched off, echo is Gloo to the bit. Quantized, the first loss has met quantized sums already.
    exact, off = made["16bit"], made["off"]
    assert off["curve"] == exact["curve"] and off["tail_loss"] == exact["tail_loss"]
    assert made["4bit"]["first_loss"] != exact["first_loss"] != made["4bit-plain"]["first_loss"]
    assert abs(made["4bit"]["first_loss"] - exact["first_loss"]) < 0.1 < exact["first_loss"] - 5
    for record in made.values():
        quantized = record["row"] in ("4bit", "4bit-plain")
        assert record["quantized_per_step"] == (8 if quantized else 0)  # 2 layers, 2 sums each, forward and backward
        # One sum is 2 x 64 x 128 elements; of it a rank sends 4.25 bits an element (P = 2: half of it twice).
        assert record["wire_bytes_per_step"] == pytest.approx(8 * 2 * 64 * 128 * 4.25 / 8 if quantized else 0, rel=0.02)
        assert not record["diverged"] and len(record["curve"]) == 3 and record["commit"] is not None
    said = capfd.readouterr().out
    assert "4 bits, no feedback" in said and "2 trainings of 3 steps to do" in said
    assert main([*arguments]) == 0 and "0 trainings" in capfd.readouterr().out
    assert (tmp_path / "train-small-cpu.png").read_bytes().startswith(b"\x89PNG")


def split_and_whole(rank: int, size: int) -> tuple[list[float], list[list[float]]]:
    """Losses and first weights of a training over two ranks (exact sums), and of one over a group of one."""
    plan = {
        "model": train.PRESETS["small"].model | {"layers": 2}, "length": 16, "lr_scale": 8.0, "warmup": 1, "steps": 3,
    }  # fmt: skip
    run = {"row": "16bit", "lr": 3e-4, "seed": 0, "options": None}
    place = train_rank.Place(rank, size, torch.device("cpu"), "gloo", dist.group.WORLD)
    training = train_rank.Training(place, plan, run)
    batches = transformer.batches(transformer.text(), 4, 16)
    losses = [training.step(number, *next(batches)).item() for number in range(3)]
    kinds = dict(zip((name for name, _ in training.model.named_parameters()), training.kinds, strict=True))
    alike = [p.detach().float().sum().item() for n, p in training.model.named_parameters() if kinds[n] != "split"]
    assert sorted(set(kinds.values())) == ["alike", "split", "summed"]
    return losses, [alike]


def test_a_split_model_learns_what_a_whole_one_does() -> None:
    (losses, alike), (other_losses, other_alike) = run_ranks(split_and_whole, 2)
    assert losses == other_losses and alike == other_alike
    ((whole, _),) = run_ranks(split_and_whole, 1)
    # bfloat16 sums of two halves are rounded once more than whole ones: 2^-8 of a value at each of 8 sums.
    assert losses == pytest.approx(whole, rel=8 * 2.0**-8) and losses[2] < losses[0]


def test_the_schedule_is_the_papers() -> None:
    rates = [train_rank.learning_rate(step, 3e-4, 3e-5, 4, 40) for step in range(40)]
    assert rates[:4] == pytest.approx([0.75e-4, 1.5e-4, 2.25e-4, 3e-4])
    assert max(rates) == 3e-4 and rates[39] == pytest.approx(3e-5)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert train_rank.learning_rate(22, 3e-4, 3e-5, 5, 40) == pytest.approx((3e-4 + 3e-5) / 2)


def record(row: str, seed: int, tail: float, **changes: Any) -> dict[str, Any]:
    common = {
        "bench": "train", "preset": "small", "device": "cpu", "device_name": "a processor", "ranks": 2, "batch": 8,
        "length": 64, "steps": 4, "tail": 2, "lr_scale": 8.0, "text_hash": "x", "torch": "2.13.0", "echo": "0.1.0",
        "commit": "abc", "model": {"layers": 2, "width": 128}, "lr": 3e-4, "diverged": False, "ms_per_step": 100.0,
        "wire_bytes_per_step": 0.0, "curve_every": 1, "curve": [5.0, 4.0, 3.0, tail],
    }  # fmt: skip
    return common | {"row": row, "seed": seed, "tail_loss": tail} | changes


def some_records(plain: float = 0.05, scatter: float = 0.0) -> list[dict[str, Any]]:
    """Exact tails 1.99, 2.00, 2.01 (s.d. 0.01); others at a distance that differs by 0.001 from seed to seed."""
    made = []
    for seed in range(3):
        tail = 1.99 + 0.01 * seed
        made.append(record("16bit", seed, tail))
        made.append(record("4bit-plain", seed, tail + plain + 0.001 * (seed - 1) + scatter * (-1) ** seed))
        made.append(record("4bit", seed, tail + 0.01 + 0.001 * (seed - 1)))
    return made


def test_the_report_pairs_seeds() -> None:
    lines = {line["row"]: line for line in train_report.summary(some_records())}
    assert lines["16bit"]["tail_sd"] == pytest.approx(0.01) and lines["16bit"]["difference"] is None
    assert lines["4bit"]["percent"] == pytest.approx(0.5) and lines["4bit"]["difference_sd"] == pytest.approx(0.001)
    assert lines["4bit"]["bits_per_byte"] == pytest.approx(2.01 / math.log(2))
    said = "\n".join(train_report.verdicts(some_records()))
    assert "5.0 s.d. of 16 bits over seeds, 50.0 s.d. of the difference" in said and "run discriminates\n" in said
    assert "4 bits, two averages at 3.0e-04: +0.50 %, within 0.9 %, 80 % of the gap" in said


def test_exact_runs_at_other_rates_are_rows_like_any(tmp_path: Path) -> None:
    slow = [record(row, 0, tail, lr=2e-4) for row, tail in (("16bit", 2.2), ("4bit", 2.3))]
    made = [*slow, *some_records()]
    lines = {(line["row"], line["lr"]): line for line in train_report.summary(made)}
    assert lines["16bit", 3e-4]["difference"] is None
    assert lines["16bit", 2e-4]["difference"] == pytest.approx(2.2 - 1.99)
    assert lines["4bit", 3e-4] == {line["row"]: line for line in train_report.summary(some_records())}["4bit"]
    assert train_report.verdicts(made) == train_report.verdicts(some_records()), "lower rates are no contest"
    assert len(train_report.draw(made, tmp_path, "some")) == 1


def test_nothing_is_claimed_that_the_run_does_not_show() -> None:
    assert "discriminates between equal seeds only" in "\n".join(train_report.verdicts(some_records(plain=0.02)))
    assert "does not discriminate" in "\n".join(train_report.verdicts(some_records(plain=0.02, scatter=0.02)))
    assert "one seed gives no spread" in "\n".join(train_report.verdicts(some_records()[:3]))
    assert "nothing can be concluded" in "\n".join(train_report.verdicts(some_records()[:1]))
    worse = [record("16bit", 0, 2.0), record("4bit-plain", 0, 2.3), record("4bit", 0, 2.1, diverged=True)]
    said = "\n".join(train_report.verdicts(worse))
    assert "+5.00 %, NOT within 0.9 %" in said and "diverged: 4 bits, two averages" in said


def test_what_differs_in_more_than_the_row_is_not_compared() -> None:
    made = [*some_records(), record("16bit", 0, 2.0, steps=8)]
    assert [len(part) for part in train_report.campaigns(made)] == [9, 1]


def test_a_file_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.jsonl"
    results.append(path, some_records())
    assert main(["bench", "train", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "some.png").stat().st_size > 10_000
    assert train_report.table(some_records()) in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "train", "--report-only", str(path)]) == 0
    assert "echo-pg[bench]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad", [["--rows", "4bits@1"], ["--rows", "4bit"], ["--ranks", "3"], ["--steps", "0"], ["--text", "/nowhere"]]
)
def test_arguments_that_make_no_sense(bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *bad, "--out", str(tmp_path)]) == 2
    assert bad[0 if bad[1] == "0" else 1] in capsys.readouterr().err


def test_rows() -> None:
    assert train.choose_rows("rates")[0] == ("4bit", 2e-4)
    assert train.choose_rows("main,rates,4bit@3.0e-4") == train.choose_rows("main,4bit@2e-4,4bit@2.5e-4")


def test_a_bar_ends_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = progress.Bar("learning", 2)
    bar.step("loss 3")
    bar.step()
    bar.done()
    said = capsys.readouterr().err
    assert "[############............] 1/2 loss 3" in said and f"[{'#' * 24}] 2/2" in said


def test_records_are_plain_json() -> None:
    plan = dict.fromkeys(train.IDENTITY) | {"row": "4bit"}
    run = train._run(plan, "4bit", 3e-4, 0, {"allow_shared_gpu": True})
    assert json.loads(json.dumps(run["identity"])) == run["identity"]
    assert run["identity"]["options"]["allow_shared_gpu"] is True and run["options"]["min_bytes"] == 0
