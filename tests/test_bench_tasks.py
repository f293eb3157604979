"""`python -m echo_pg bench tasks`: what it asks, what it makes of the answers, and its ranks from end to end, asked by
lm-evaluation-harness itself.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from ranks import run_ranks
from tiny_model import LAYERS

from echo_pg.__main__ import main
from echo_pg.bench import results, tasks_harness, tasks_list, tasks_rank, tasks_report
from echo_pg.bench.accuracy_rows import PLAIN, REFERENCE, ROWS, Row
from echo_pg.bench.tasks_list import LOCAL

OFF = Row("switched off", {"policy": "off"})
TEXT = "\n\n".join(" ".join(f"{kind}{number}x{place}" for place in range(50)) for kind in "abc" for number in range(8))


def sample(number: int, kind: str = "none", **metrics: Any) -> dict[str, Any]:
    return {"doc_id": number, "filter": kind, "metrics": list(metrics), "doc_hash": f"d{number}", **metrics}


def test_from_end_to_end_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.txt").write_text(TEXT)
    path, limit = tmp_path / "tasks-cpu.jsonl", 12
    plan = {
        "device": "cpu", "exact": "", "tasks": LOCAL, "limit": limit, "rows": rows_named(REFERENCE, PLAIN),
        "text": str(tmp_path), "text_name": "some", "model": str(tiny_model.save(tmp_path / "model")), "hub": "",
        "batch": 4, "fabric": "auto", "dtype": "bfloat16", "commit": "", "path": str(path),
        "packages": (tasks_harness.PACKAGE, "datasets"),
    }  # fmt: skip
    plan["rows"] = (*plan["rows"], OFF)
    run_ranks(tasks_rank.run_rank, 2, str(tmp_path / "first"), plan, backend=None)
    made = {(record["row"], record["task"]): record for record in results.read(path, "tasks")}
    assert len(made) == len(path.read_text().splitlines()) == 6
    for (row, task), record in made.items():
        assert record["backend"] == ("gloo" if row == REFERENCE else "echo")
        # A pass for 4 choices; one for each token of the longest of 4 answers, which may be of 48.
        least, most = (limit, limit) if task == "next_words" else (limit // 4 + 1, limit // 4 * 48)
        assert least <= record["forwards"] <= most
        assert record["calls_quantized"] == (record["forwards"] * 2 * LAYERS if row == PLAIN else 0)
        assert record["documents"] == limit and record["shots"] == (0 if task == "next_words" else 2)
        assert record["lm_eval"] and record["datasets"]
        assert record["digest"] == made[REFERENCE, task]["digest"] and record["seed"] == [0, 1234, 1234, 1234]
    correct = {row: made[row, "next_words"]["metrics"]["acc"]["correct"] for row in (REFERENCE, PLAIN, OFF.name)}
    assert correct[OFF.name] == correct[REFERENCE] and len(correct[PLAIN]) == limit
    # Random weights guess: right everywhere or nowhere happens once in 30 texts (0.75^12).
    assert 0 < correct[REFERENCE].count("1") < limit
    assert made[PLAIN, "copy_words"]["metrics"]["exact_match,stripped"]["correct"] == "0" * limit

    before = path.read_text()
    more = plan | {"rows": rows_named(REFERENCE, "4-bit default")}
    run_ranks(tasks_rank.run_rank, 2, str(tmp_path / "second"), more, backend=None)
    added = [record["row"] for record in results.read(path, "tasks")[6:]]
    assert path.read_text().startswith(before) and added == ["4-bit default"] * 2, "the other rows were there already"

    assert main(["bench", "tasks", "--report-only", str(path), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "next_words, 12 documents, 0 examples" in told and "switched off" in told and PLAIN in told
    assert (tmp_path / "tasks-cpu-0.png").read_bytes().startswith(b"\x89PNG")


def rows_named(*names: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.name in names)


def test_the_papers_test() -> None:
    # GSM8K of Llama-3-8B in the paper: 46.17 against 49.81 of 1,319 problems.
    a, b, count = 0.4617, 0.4981, 1319
    error = math.sqrt(a * (1 - a) / count + b * (1 - b) / count)
    expected = 2 * (1 - statistics.NormalDist().cdf((b - a) / error))
    assert tasks_report.unpaired(a, b, count) == pytest.approx(expected, rel=1e-9) and 0.05 < expected < 0.07
    assert tasks_report.unpaired(b, a, count) == tasks_report.unpaired(a, b, count)
    assert (tasks_report.unpaired(1, 1, 9), tasks_report.unpaired(0, 1, 9)) == (1.0, 0.0)


def test_the_paired_test() -> None:
    assert tasks_report.flips("0011", "0101") == (1, 1) and tasks_report.flips("1110", "0001") == (1, 3)
    assert tasks_report.paired(1, 9) == 2 * (1 + 10) / 2**10 == tasks_report.paired(9, 1)
    assert tasks_report.paired(0, 0) == tasks_report.paired(3, 3) == 1.0
    # Eight of 100 documents lost and none won: the paper's test cannot tell, not seeing that the rest is equal.
    assert tasks_report.paired(8, 0) == 2 / 2**8 and tasks_report.unpaired(0.6, 0.52, 100) > 0.25
    # If nothing differs it must call for a difference in at most 5 % of the cases, whatever the number of flips.
    for count in range(1, 80):
        called = [k for k in range(count + 1) if tasks_report.paired(k, count - k) < tasks_report.LEVEL]
        assert sum(math.comb(count, k) for k in called) <= tasks_report.LEVEL * 2**count
        assert bool(called) == (count > 5)  # 2 / 2^5 is above 5 %, 2 / 2^6 below


def record(row: str, correct: str, digest: str = "x") -> dict[str, Any]:
    metrics = {
        "acc": {"value": correct.count("1") / len(correct), "correct": correct},
        "perplexity": {"value": 9.87654},
    }
    return {
        "row": row, "task": "some", "backend": "echo", "plain": "" if row == PLAIN else PLAIN, "digest": digest,
        "metrics": metrics, "documents": len(correct), "shots": 5, "model": {"name": "M"}, "ranks": 4, "texts": {},
        "device_name": "D", "limit": None,
    }  # fmt: skip


def test_tables() -> None:
    worse, better = "1" * 40 + "0" * 60, "1" * 80 + "0" * 20
    made = [record(REFERENCE, better), record(PLAIN, worse), record("other text", worse, "y")]
    (title, short), (about, table) = tasks_report.tables(made)
    assert title == "M, 4 ranks on D" and about == "some, 100 documents, 5 examples in the prompt"
    assert short.splitlines()[3].split() == ["4-bit", "plain", "40.00*", "9.877"]
    assert short.splitlines()[4].split() == ["other", "text", "40.00", "9.877"], "other documents are not compared"
    cells = next(line for line in table.splitlines() if line.startswith(PLAIN)).split()
    # sqrt(0.4 * 0.6 / 100) = 4.90 %; p = erfc(0.4 / 0.0632 / sqrt 2); 2 * 2^-40.
    assert cells[2:10] == ["echo", "acc", "40.00", "4.90", "-40.00", "3e-10*", "40", "0"] and cells[10] == "2e-12*"


def test_documents_are_cut_from_the_text() -> None:
    paragraphs = [paragraph.split() for paragraph in TEXT.split("\n\n")]
    asked = tasks_list.next_words(TEXT)
    assert len(asked) == len(paragraphs) and [document["label"] for document in asked[:5]] == [0, 1, 2, 3, 0]
    for document in asked:
        words = next(words for words in paragraphs if words[0] == document["context"].split()[0])
        assert document["context"].split() + document["choices"][document["label"]].split() == words[:30]
        assert sorted(" ".join(document["choices"]).split()) == sorted(words[24:48])
    for document in tasks_list.copy_words(TEXT):
        words = document["passage"].split()
        assert document["start"].split() + document["rest"].split() == words and len(words) == 16
        assert any(sorted(words) == sorted(paragraph[:16]) and words != paragraph[:16] for paragraph in paragraphs)
    # The first ones are a sample: they come from all over the text, and more text does not shuffle them.
    assert {document["context"][0] for document in asked[:12]} == set("abc")
    longer = [document["context"] for document in tasks_list.next_words(f"{TEXT}\n\n{TEXT.replace('a', 'd')}")]
    assert [context for context in longer if "d" not in context] == [document["context"] for document in asked]
    split = tasks_list.parts(asked)
    assert split["train"] + split["test"] == asked and len(split["train"]) == 8
    with pytest.raises(ValueError, match="8 documents"):
        tasks_list.parts(asked[:8])


def test_answers_of_the_harness() -> None:
    first = [
        sample(number, kind, exact_match=right)
        for kind, right in (("strict", 0.0), ("flexible", 1.0))
        for number in (1, 0)
    ]
    first[0]["exact_match"] = 1.0
    parts = {"b": first, "a": [sample(0, "strict", exact_match=True), sample(0, "flexible", exact_match=False)]}
    found = tasks_harness.outcome_of("whole", {"samples": parts, "n-shot": {"a": 5, "b": 5}})
    assert (found.documents, found.shots) == (3, 5)
    assert found.metrics["exact_match,strict"] == {"value": 2 / 3, "correct": "101"}
    assert found.metrics["exact_match,flexible"] == {"value": 2 / 3, "correct": "011"}

    rolled = {"samples": {"t": [sample(0, word_perplexity=(-9.5, 4))]}, "n-shot": {"t": 0}}
    assert tasks_harness.outcome_of("t", rolled | {"results": {"t": {"word_perplexity,none": 10.75}}}).metrics == {
        "word_perplexity": {"value": 10.75}
    }
    with pytest.raises(ValueError, match="word_perplexity"):
        tasks_harness.outcome_of("t", rolled | {"results": {}})


def test_the_papers_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tasks", "--tasks", "paper,boolq", "--list"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "examples" in line)
    assert told["gsm8k"] == told["mmlu_pro"] == "5 examples" and told["mmlu"] == told["hellaswag"] == "0 examples"
    assert told["boolq"] == "the harness's own number of examples" and len(told) == 11


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", ","], "no task"),
        (["--backend", "nccl"], "--device cuda"),
        (["--limit", "0"], "--limit 0"),
        (["--rows", "no such*"], "no such"),
        (["--text", "nowhere"], "pip install 'echo-pg[tasks]'"),
    ],
)
def test_what_makes_no_sense(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_harness, "PACKAGE", "a_harness_that_is_not_there")
    assert main(["bench", "tasks", *arguments]) == 2
    assert said in capsys.readouterr().err
