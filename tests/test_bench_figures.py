"""`bench report --plots`: the SVG files of README and docs/, and that those in the repository are of its records."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib import pyplot

from echo_pg.__main__ import main
from echo_pg.bench import accuracy_results, figures, figures_accuracy, figures_speed, results, train_report
from echo_pg.bench.cases import MIB

ROOT = Path(__file__).resolve().parent.parent
BASELINE, KEPT = ROOT / "ci" / "baseline", ROOT / "docs" / "plots"
REDRAW = "run `python -m echo_pg bench report --plots docs/plots`, and see to the tables"
MOST_BYTES = 100_000
SPEED, ACCURACY, TRAINING = (
    results.read(BASELINE / f"{name}.jsonl", bench)
    for name, bench in (
        ("bench_allreduce_h200x2", "allreduce"),
        ("bench_accuracy_h200x2", "accuracy"),
        ("train_small_cpu_2_cores", "train"),
    )
)


@pytest.fixture
def closing():
    yield
    pyplot.close("all")


def test_the_command_writes_every_plot_and_the_same_bytes_again(tmp_path: Path, capsys) -> None:
    for name in ("one", "two"):
        assert main(["bench", "report", "--data", str(BASELINE), "--plots", str(tmp_path / name)]) == 0
    told = capsys.readouterr().out.split()
    for plot in figures.PLOTS:
        first, second = (plot.path(tmp_path / name) for name in ("one", "two"))
        assert str(first) in told
        assert first.read_bytes() == second.read_bytes(), plot.name
        text = first.read_text()
        assert len(text) < MOST_BYTES, f"{plot.name}: {len(text)} bytes"
        assert "<dc:date>" not in text
        assert figures.source(plot, BASELINE) in text
        # A background of its own: a white patch as large as the page, before all else that is drawn.
        page = ElementTree.fromstring(text)
        _, _, width, height = (float(part) for part in page.attrib["viewBox"].split())
        patch = next(part for part in page.iter() if part.tag.endswith("}path") and "style" in part.attrib)
        assert "fill: #ffffff" in patch.attrib["style"]
        assert f"{width:g} {height:g}" in " ".join(patch.attrib["d"].split())


def test_the_plots_in_the_repository_are_of_its_records() -> None:
    assert {path.name for path in KEPT.iterdir()} == {f"{plot.name}.svg" for plot in figures.PLOTS}
    for plot in figures.PLOTS:
        text = plot.path(KEPT).read_text()
        assert figures.source(plot, BASELINE) in text, f"{plot.name} is older than its records: {REDRAW}"
        assert len(text) < MOST_BYTES


def test_every_plot_is_shown_on_a_page() -> None:
    pages = [(path, path.read_text()) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    for plot in figures.PLOTS:
        assert any(plot.path(KEPT) == (page.parent / link).resolve() for page, text in pages
                   for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)), plot.name  # fmt: skip


def test_plots_without_their_records_are_named(tmp_path: Path, capsys) -> None:
    name = "train_small_cpu_2_cores.jsonl"
    (tmp_path / name).write_bytes((BASELINE / name).read_bytes())
    assert main(["bench", "report", "--data", str(tmp_path), "--plots", str(tmp_path / "plots")]) == 2
    told = capsys.readouterr()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"training.svg"}
    assert f"overview: {tmp_path} has no bench_allreduce_h200x2.jsonl, bench_accuracy_h200x2.jsonl" in told.err


@pytest.mark.parametrize("content", ("", "[1, 2", '{"bench": "accuracy"}\n'))
def test_records_that_cannot_be_read(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "train_small_cpu_2_cores.jsonl").write_text(content)
    assert main(["bench", "report", "--data", str(tmp_path), "--plots", str(tmp_path / "plots")]) == 2
    assert "train_small_cpu_2_cores.jsonl" in capsys.readouterr().err


def test_the_overview_shows_what_was_measured(closing) -> None:
    figure = figures_accuracy.overview(SPEED, ACCURACY)
    left, right = figure.axes
    drawn = {line.get_label(): line for line in left.lines}
    assert sum(not label.startswith("_") for label in drawn) <= 5, "more would not be told apart"
    for name, label, *_ in figures_speed.MAIN:
        expected = {
            record["bytes"] / MIB: record["speedup"]
            for record in SPEED
            if record["row"] == name and record["bytes"] >= MIB
        }
        assert dict(zip(*drawn[label].get_data(), strict=True)) == expected
    scores = figures_accuracy.scores_of(ACCURACY)
    bars = [bar.get_width() for bar in right.patches]
    assert bars == [
        scores[figures_accuracy.MEASURED_AS[name]]["scores"]["prose-heldout"]["perplexity"]
        for name, *_ in figures_speed.MAIN
    ]


def test_a_forwarded_call_is_hollow(closing) -> None:
    made = [record | {"forwarded": "too small"} if record["bytes"] == MIB else record for record in SPEED]
    axis = pyplot.figure().subplots()
    figures_speed.curves(axis, made, (figures_speed.SHIPPED,))
    hollow = [line for line in axis.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[1.0]]
    with pytest.raises(ValueError, match="no record of the row default"):
        figures_speed.curves(axis, [record for record in SPEED if record["row"] == "nccl"], (figures_speed.SHIPPED,))


def test_differences_of_trainings_are_those_of_equal_seeds(closing) -> None:
    right = figures_accuracy.training(TRAINING).axes[1]
    line = next(line for line in right.lines if line.get_label() == "4 bits, plain")
    at = {(record["row"], record["seed"]): record["curve"] for record in TRAINING if record["lr"] == 3e-4}
    seeds = [seed for row, seed in at if row == "16bit"]
    middle = len(line.get_ydata()) // 2
    near = range(middle - 4, middle + 5)  # it is smoothed over nine points
    mean = sum(at["4bit-plain", seed][i] - at["16bit", seed][i] for seed in seeds for i in near) / len(seeds) / 9
    assert line.get_ydata()[middle] == pytest.approx(mean)
    assert len(seeds) == 3


def test_gaps_and_gains_are_those_that_the_tables_tell(closing) -> None:
    scores = figures_accuracy.scores_of(ACCURACY)
    axis = figures_accuracy.gap_closed(ACCURACY).axes[0]
    for row, text, marker in (("4-bit default", "prose-heldout", "o"), ("paper 4-bit", "technical-tune", "s")):
        share, _ = accuracy_results.gap_of(scores[row], text, scores)
        drawn = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == marker and len(line.get_xdata())]
        assert any(value == pytest.approx(100 * share) for value in drawn), (row, drawn)

    prefill, step = (results.read(BASELINE / f"bench_{what}_llama3_8b_h200x2.jsonl", what) for what in ("ttft", "step"))
    heights = [bar.get_height() for bar in figures_speed.whole_model(prefill, step).axes[0].patches]
    # docs/speed.md, "A whole model": S of the first run, plain and as shipped, for both loads of both phases.
    expected = (1.047, 1.058, 1.026, 1.038, 1.019, 1.025, 1.012, 1.016)
    assert heights == pytest.approx([100 * (gain - 1) for gain in expected], abs=0.05)


# README's row, the row of `bench allreduce`, the row of `bench train`.
_ROWS = (
    ("8 bits, plain", "echo8", None),
    ("**4 bits, as shipped**", "default", "4bit-rot-one"),
    ("4 bits, feedback", "local1", "4bit-one"),
    ("4 bits, paper's method", "group", None),
    ("4 bits, plain", "echo4", "4bit-plain"),
)


@pytest.mark.parametrize(("label", "row", "trained"), _ROWS)
def test_the_main_table_of_the_readme_is_of_the_records(label: str, row: str, trained: str | None) -> None:
    line = next(text for text in (ROOT / "README.md").read_text().splitlines() if text.startswith(f"| {label} |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
    scores = figures_accuracy.scores_of(ACCURACY)
    score = scores[figures_accuracy.MEASURED_AS[row]]
    speedups = {record["bytes"]: record["speedup"] for record in SPEED if record["row"] == row}
    share, error = accuracy_results.gap_of(score, "prose-heldout", scores)
    lines = {(line["row"], line["lr"]): line for line in train_report.summary(TRAINING)}
    gap = f"{100 * share:.0f} ± {max(1, round(100 * error))} %" if row in ("default", "local1", "group") else ""
    assert cells == [
        f"{accuracy_results.times_less(score):.2f}",
        *(f"{speedups[size * MIB]:.2f}" for size in (16, 64, 1024)),
        f"{figures_accuracy.perplexity(score):.2f}",
        "0" if row == "echo4" else gap,
        f"{lines[trained, 3e-4]['percent']:+.2f} %" if trained else "",
    ], REDRAW
