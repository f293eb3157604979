"""`python -m echo_pg bench ttft` and `bench step` on a tiny model, and what they derive from times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from echo_pg.__main__ import main
from echo_pg.bench import end_to_end, end_to_end_model, end_to_end_rank, end_to_end_report, page, results

LAYERS = 2


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its ranks; here it would reach those of later tests."""
    monkeypatch.setenv("ECHO_LOG", "off")


def test_first_tokens_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "echo4,default", "--loads", "0,50", "--decode", "2", "--fixed", "128KiB"]
    arguments += ["--parts", "0.25", "--pause", "0.01"]
    assert main(["bench", "ttft", *arguments, "--out", str(tmp_path)]) == 0, capfd.readouterr()
    (path,) = tmp_path.glob("ttft-tiny-cpu-*.jsonl")
    made = {(r["phase"], r["load"], r["row"], r["sum_bytes"]): r for r in results.read(path, "ttft")}
    own, rows = 2 * 2 * 32 * 64, {"gloo", "no-op", "echo4", "default"}
    for load in (0, 50):
        assert {key[2] for key in made if key[:2] == ("prefill", load)} == rows | {"gloo x 0.25"}
        part = made["prefill", load, "gloo x 0.25", own]
        assert part["kind"] == "part" and part["reached"] is None and part["sum_ms"] > 0 == part["quantized"]
        assert {key[2] for key in made if key[:2] == ("decode", load)} == rows | {"again"}
        # Small sums are quantized in the row that says so, and in decoding, where sizes are as shipped, nowhere.
        prefill = {row: made["prefill", load, row, own] for row in rows}
        assert {row for row in rows if prefill[row]["quantized"]} == {"echo4"}
        assert not any(made["decode", load, row, 2 * 2 * 64]["quantized"] for row in rows)
        assert {key[3] for key in made if key[:3] == ("alone", load, "echo4")} == {own, 128 << 10}
        r = made["alone", load, "gloo", own]["median_ms"] / made["alone", load, "echo4", own]["median_ms"]
        assert prefill["echo4"]["r"] == pytest.approx(r) and prefill["gloo"]["speedup"] == 1.0
        assert all(record["iterations"] == 3 and record["sums"] == 2 * LAYERS for record in prefill.values())
        for row, record in prefill.items():
            passes, sums = record["apart_samples_ms"], record["sum_samples_ms"]
            assert len(passes) == len(sums) == 2 and (record["sum_ms"] > 0) == (row != "no-op")
            assert record["rest_ms"] == pytest.approx(sum(passes) / 2 - 2 * LAYERS * sum(sums) / 2) and min(passes) > 0
            assert record["rest_ms"] > 0, "a pass is more than its sums"
        assert not any("rest_ms" in r for (phase, *_), r in made.items() if phase != "prefill")
    assert made["prefill", 50, "gloo", own]["load_gbps"] > 0 == made["prefill", 0, "gloo", own]["load_gbps"]
    assert {"device_name", "torch", "transformers", "commit", "seed", "ranks", "load_what"} <= prefill["gloo"].keys()
    assert len(made) == len(path.read_text().splitlines()), "one line of each once all is done"
    (plot,) = tmp_path.glob("*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    told = capfd.readouterr().out
    assert "reachable" in told and "x at 50 %" in told and "itself, a second time" in told and "rest ms" in told
    assert main(["bench", "ttft", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    assert 'id="ttft"' in page.page(page.collect(tmp_path), tmp_path, draws=False)


def run_steps(rank: int, size: int, folder: str) -> None:
    """What the command does on each rank, in processes that have torch already."""
    parser = argparse.ArgumentParser()
    end_to_end.STEP.add_arguments(parser)
    arguments = ["--rows", "echo4,paper", "--loads", "0", "--fixed", "16KiB", "--iterations", "2"]
    plan = end_to_end.make_plan("step", parser.parse_args(arguments), None)
    end_to_end.run_rank(rank, size, f"{folder}/steps-store", plan, f"{folder}/steps.jsonl")


def test_steps_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(run_steps, 2, str(tmp_path), backend=None, timeout=120)
    path = tmp_path / "steps.jsonl"
    assert main(["bench", "step", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    assert "training step: 2 x 32 tokens" in capsys.readouterr().out
    steps = {r["row"]: r for r in results.read(path, "step") if r["phase"] == "step"}
    assert set(steps) == {"gloo", "no-op", "echo4", "paper"}
    assert {row for row, record in steps.items() if record["quantized"]} == {"echo4", "paper"}
    assert all(record["sums"] == 4 * LAYERS for record in steps.values())
    assert steps["paper"]["options"]["scale_dtype"] == "float16" and steps["paper"]["options"]["residual"] == "group"


def tiny(size: int, rank: int, sums: Any) -> Any:
    shape = end_to_end_model.Shape(**end_to_end.SHAPES["tiny"])
    return end_to_end_model.make(shape, 64, size, rank, torch.device("cpu"), sums)


def train(rank: int, size: int) -> tuple[list[float], bool]:
    """Losses of two steps; whether weights are still what they were."""
    model = tiny(size, rank, end_to_end_model.Sums())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    training = end_to_end_model.Training(model, dist.group.WORLD)
    tokens = torch.arange(40).view(2, 20)
    losses = [training.step(tokens[:, :-1], tokens[:, 1:]) for _ in range(2)]
    moved = all(bool(state["exp_avg"].any()) for state in training.optimizer.inner.state.values())
    assert moved, "the optimizer did its work"
    return losses, all(map(torch.equal, before, model.parameters()))


def test_a_step_leaves_the_shared_weights_as_they_are() -> None:
    (((first, second), same),) = run_ranks(train, 1)
    assert first == second > 5 and same  # ln 256 is 5.5


def test_decoding_sees_the_whole_cache() -> None:
    """Against one forward pass over all tokens, without a cache. Random weights: the closest other token's logit is
    further away than bfloat16 rounds."""
    model = tiny(1, 0, end_to_end_model.Sums()).float()
    tokens = torch.arange(64).view(2, 32)
    decoding = end_to_end_model.Decoding(model, 2, 32, torch.device("cpu"))
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
        model(input_ids=tokens[:, :-1], use_cache=True, **{decoding.cache_name: decoding.cache})
    decoding.token = tokens[:, -1:]
    first = decoding.step()
    assert first.tolist() == whole.argmax(-1).tolist()
    decoding.rewind()
    assert decoding.step().tolist() == first.tolist(), "a step again at the same place is the same step"
    decoding.cache.layers[0].values.zero_()
    decoding.rewind()
    with torch.no_grad():
        changed = model(
            input_ids=decoding.token, position_ids=decoding.position, **{decoding.cache_name: decoding.cache}
        ).logits[:, -1]
    assert not torch.allclose(changed, whole, rtol=1e-3), "what the cache holds counts"


def record(phase: str, row: str, kind: str, *samples: float) -> dict[str, Any]:
    return {
        "phase": phase, "row": row, "kind": kind, "batch": None if phase == "alone" else 4, "sum_bytes": 1024,
        "samples_ms": list(samples), "load": 0, "load_gbps": 0.0, "bench": "step", "shape": "tiny", "label": row,
        "device": "cpu", "device_name": "D", "ranks": 2, "torch": "T", "transformers": "T", "echo": "E", "commit": "C",
        "date": "today", "inner": "gloo", "load_what": "none", "length": 8, "sums": 8, "quantized": kind == "echo",
    }  # fmt: skip


def test_what_follows_from_times() -> None:
    made = [
        record("alone", "nccl", "inner", 4.0), record("alone", "echo4", "echo", 1.0),
        record("step", "nccl", "inner", 9.0, 11.0, 10.0), record("step", "no-op", "nothing", 8.0, 8.0, 8.0),
        record("step", "echo4", "echo", 9.0, 11.0, 7.0),
    ]  # fmt: skip
    whole = {(r["phase"], r["row"]): r for r in end_to_end_report.whole(made)}
    found = whole["step", "echo4"]
    assert found["share"] == pytest.approx(0.2) and found["r"] == 4.0 and found["bound"] == pytest.approx(1.25)
    assert found["reachable"] == pytest.approx(1 / 0.85)
    assert found["speedup"] == pytest.approx(10 / 9)  # of means; that of medians is 10 / 9 too, of the fastest 9 / 7
    assert found["reached"] == pytest.approx((10 / 9 - 1) / (1 / 0.85 - 1))
    assert found["speedup_error"] == pytest.approx((10 / 7 - 1) / 3)  # of 1, 1 and 10/7: s.d. d / sqrt 3, over sqrt 3
    assert whole["step", "no-op"]["reached"] is None and whole["step", "no-op"]["speedup"] == found["bound"]

    little = [r if r["row"] != "no-op" else record("step", "no-op", "nothing", 9.6, 9.6, 9.6) for r in made]
    found = next(r for r in end_to_end_report.whole(little) if (r["phase"], r["row"]) == ("step", "echo4"))
    assert found["share"] == pytest.approx(0.04) and found["reached"] is None, "a share under 5 % says nothing"


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [record("alone", "nccl", "inner", 4.0), record("alone", "echo4", "echo", 1.0)]
    first, second = (
        [
            record("step", "nccl", "inner", a),
            record("step", "no-op", "nothing", 8.0),
            record("step", "echo4", "echo", b),
        ]
        for a, b in ((9.0, 9.0), (11.0, 7.0))
    )
    path = tmp_path / "killed.jsonl"
    results.append(path, alone)
    assert main(["bench", "step", "--report-only", str(path), "--out", str(tmp_path)]) == 0 and not list(
        tmp_path.glob("*.png")
    )
    assert "all-reduce of 1.0 KiB alone" in capsys.readouterr().out
    results.append(path, first + second)  # round by round
    whole = {(r["phase"], r["row"]): r for r in end_to_end_report.whole(results.read(path, "step"))}
    assert len(whole) == 5 and whole["step", "nccl"]["samples_ms"] == [9.0, 11.0]
    assert whole["step", "nccl"]["mean_ms"] == 10.0 and whole["step", "echo4"]["iterations"] == 2
    assert whole["step", "echo4"]["speedup"] == 10 / 8 and whole["step", "echo4"]["r"] == 4.0
    end_to_end_report.complete_file(path, "step")
    assert results.read(path, "step") == list(whole.values()) == end_to_end_report.whole(list(whole.values()))
    other = [it | {"date": "tomorrow", "samples_ms": [1.0]} for it in first]
    assert len(end_to_end_report.whole([*whole.values(), *other])) == 8, "runs are not mixed"


def test_slower_is_what_chance_does_not_explain() -> None:
    def slower(speedup: float, error: float | None, again: float) -> bool:
        return end_to_end_report.slower({"speedup": speedup, "speedup_error": error}, again)

    assert slower(0.97, 0.01, 1.01) and slower(0.9, None, 1.0)
    assert not slower(0.97, 0.02, 1.0) and not slower(0.97, 0.001, 1.04) and not slower(0.97, 0.001, 0.96)
    assert not slower(1.2, 0.001, 1.0)


class OutOfMemory:
    """In place of a model's pass: it fits up to 6 sequences."""

    def __call__(self, batch: int, joined: bool = True) -> Any:
        assert not joined, "a rank that waits for one without memory would wait for ever"
        return lambda: None if batch <= 6 else self.fail()

    def fail(self) -> None:
        raise torch.OutOfMemoryError("pretended")


def choose_batch(rank: int, size: int) -> int:
    bench = object.__new__(end_to_end_rank.Rank)
    bench.plan, bench.device, bench.training = {"batch": 64, "rows": (), "length": 1}, torch.device("cuda"), None
    bench.shape = end_to_end_model.Shape(**end_to_end.SHAPES["tiny"])
    bench.pass_of = OutOfMemory()  # type: ignore[method-assign]
    # The eighth is of the batch of 6: the second rank would keep less than has to stay free.
    free = iter([5 << 30] * 7 + [(5 if rank == 0 else 1) << 30] + [5 << 30])
    torch.cuda.mem_get_info = lambda _: (next(free), 0)
    torch.cuda.empty_cache = lambda: None
    return bench.choose_batch()


def test_the_largest_batch_that_fits_on_all_ranks() -> None:
    """64 down to 8 do not fit; 6 fits on the first rank alone."""
    assert run_ranks(choose_batch, 2) == [4, 4]


def test_batches_to_try() -> None:
    assert end_to_end_rank.batches_to_try(64) == [64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert end_to_end_rank.batches_to_try(5) == [5, 4, 3, 2, 1] and end_to_end_rank.batches_to_try(1) == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3"], "8 key/value heads"),
        (["--ranks", "1"], "--ranks 1"),
        (["--rows", "other"], "other"),
        (["--rows", "two4"], "two4"),
        (["--loads", "101"], "--loads"),
        (["--loads", ""], "--loads"),
        (["--batch", "0"], "--batch"),
        (["--parts", "0.5,1"], "--parts"),
        (["--pause", "-1"], "--pause"),
        (["--report-only", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_records_are_told_apart_by_their_bench(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"bench": "ttft"}) + "\n")
    assert main(["bench", "step", "--report-only", str(tmp_path / "one.jsonl")]) == 2
