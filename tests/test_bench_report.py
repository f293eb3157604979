"""`python -m echo_pg bench report` and the text that benches read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_pg.__main__ import main
from echo_pg.bench import page, text

BASELINE = Path(__file__).resolve().parent.parent / "ci" / "baseline"


def test_a_page_from_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = next(line for line in (BASELINE / "bench_allreduce_cpu_2_cores.jsonl").open())
    second = json.loads(recorded) | {"row": "<other>", "speedup": 2.0}
    (tmp_path / "times.jsonl").write_text(f"{recorded}{json.dumps(second)}\n")
    (tmp_path / "else.json").write_text('{"bench": "unheard of"}')
    out = tmp_path / "made" / "report.html"
    assert main(["bench", "report", "--data", str(tmp_path), "--out", str(out)]) == 0, capsys.readouterr()
    made = out.read_text()
    assert 'id="allreduce"' in made and "times.jsonl" in made and 'src="data:image/png;base64,' in made
    assert 'id="accuracy"' not in made, "a section without records is left out"
    assert "&lt;other&gt;" in made and "<other>" not in made
    assert "http" not in made.replace("http-equiv", ""), "the page needs nothing from elsewhere"


def test_every_record_kept_in_the_repository_can_be_shown(tmp_path: Path) -> None:
    found = page.collect(BASELINE)
    assert {"allreduce", "recompute"} <= set(found)
    made = page.page(found, tmp_path, draws=False)
    assert all(f'id="{bench}"' in made for bench in found)


@pytest.mark.parametrize(
    ("bench", "name"),
    (
        ("accuracy", "bench_accuracy_cpu_2_cores"),
        ("allreduce", "bench_allreduce_cpu_2_cores"),
        ("step", "bench_step_llama3_8b_h200x2"),
        ("tasks", "tasks_cpu_2_cores"),
        ("theory", "theory_cpu_2_cores"),
        ("train", "train_small_cpu_2_cores"),
    ),
)
def test_a_run_shown_again_is_drawn_where_it_is_told_and_not_beside_its_records(
    bench: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records" / f"{name}.jsonl"
    records.parent.mkdir()
    records.write_bytes((BASELINE / records.name).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main(["bench", bench, "--report-only", str(records)]) == 0
    assert list(records.parent.iterdir()) == [records]
    assert {path.suffix for path in (tmp_path / "bench-out").iterdir()} == {".png"}


@pytest.mark.parametrize("content", ["", "[1, 2", '{"bench": "unheard of"}'])
def test_nothing_to_show(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.json").write_text(content or "{}")
    assert main(["bench", "report", "--data", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_sentences_of_a_page() -> None:
    source = """<html><head><title>No</title></head><body><div class="related">no</div>
    <p>One <b>two</b>
    three &amp; four.</p><pre>no()</pre><ul><li>Five<li>Six</ul><table><tr><td>no</table>
    <p>Seven<a class="headerlink" href="#">no</a><br>eight<script>no()</script></p></body></html>"""
    assert text.sentences(source).split("\n\n") == ["One two three & four.", "Five", "Six", "Seven", "eight"]


def test_pages_are_divided_for_good() -> None:
    parts = [text.part_of(f"library/{i}.html") for i in range(1000)]
    assert text.part_of("library/argparse.html") == text.part_of("library/argparse.html")
    # Binomial(1000, 0.1): standard deviation 9.5, so 60 is more than four of them from 100.
    assert all(abs(parts.count(part) - 100) < 40 for part in ("tune", "heldout"))
