"""The command `python -m echo_pg bench report`: one page of HTML, plots inside, from the records of all benches; or,
with --plots, the plots of README and docs/ alone.

A bench gets a section by one entry in SECTIONS; a section without records is left out. Records are found in the files
*.jsonl (one record a line) and *.json (a record, or a list of them) of a folder, by their field "bench".
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__
from . import (
    accuracy_plot,
    accuracy_results,
    end_to_end_report,
    figures,
    plot,
    recompute,
    results,
    tasks_report,
    theory_report,
    train_report,
)

Record = dict[str, Any]


@dataclass
class Content:
    """What a section shows: titled texts in columns, and paths of PNG files."""

    tables: list[tuple[str, str]] = field(default_factory=list)
    plots: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """`bench` is the field of the records; render(records, folder, stem, draws) makes the content from the records of
    one file, writing plots to folder/STEM-*.png, and none where `draws` is false."""

    bench: str
    title: str
    render: Callable[[list[Record], Path, str, bool], Content]


def _accuracy(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    plots = accuracy_plot.draw(made, folder, stem) if draws else []
    return Content(accuracy_results.tables(made), plots)


def _allreduce(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    tables = [("machine and rows", f"{results.header(made[0])}\n{results.legend(made)}")]
    tables += [("speed-up", results.summary(group)) for group in results.by(made, "dtype", "ranks")]
    return Content(tables, plot.draw(made, folder, stem) if draws else [])


def _end_to_end(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    made = end_to_end_report.whole(made)
    tables = [("machine", end_to_end_report.header(made[0])), *end_to_end_report.tables(made)]
    tables.append(("what is reached", "\n".join(end_to_end_report.verdicts(made))))
    return Content(tables, end_to_end_report.draw(made, folder, stem) if draws else [])


def _train(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    plots = train_report.draw(made, folder, stem) if draws else []
    return Content([("training", train_report.text_of(made))], plots)


def _tasks(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    return Content(tasks_report.tables(made), tasks_report.draw(made, folder, stem) if draws else [])


def _theory(made: list[Record], folder: Path, stem: str, draws: bool) -> Content:
    plots = theory_report.draw(made, folder, stem) if draws else []
    return Content([("sums of errors and the paper's bounds", theory_report.text_of(made))], plots)


def _recompute(made: list[Record], _folder: Path, _stem: str, _draws: bool) -> Content:
    return Content([(record["repeat_with"], recompute.table(record)) for record in made])


# In the order of the page.
SECTIONS = (
    Section("accuracy", "Accuracy of a language model", _accuracy),
    Section("tasks", "Answers of a language model", _tasks),
    Section("train", "Training from scratch", _train),
    Section("theory", "What the paper proves", _theory),
    Section("allreduce", "Time of one all-reduce", _allreduce),
    Section("ttft", "Time to first token of a whole model", _end_to_end),
    Section("step", "Time of a training step of a whole model", _end_to_end),
    Section("recompute", "Activation checkpointing", _recompute),
)

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { font: 12px/1.45 ui-monospace, monospace; background: #f6f6f6; padding: .8rem; overflow-x: auto; }
img { max-width: 100%; display: block; margin: 1rem 0; } h2 { border-top: 1px solid #ccc; padding-top: 1.2rem; }
nav a { margin-right: 1.2rem; } summary { cursor: pointer; margin: .5rem 0; }"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "One self-contained HTML page from the records of all benches."
    parser.add_argument("--data", type=Path, default=Path("ci/baseline"), metavar="DIR", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench-out/report.html"), metavar="FILE.html")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write the plots of README and docs/ there as SVG, and no page"
    )


def main(chosen: argparse.Namespace) -> int:
    """0 if the page was written, 2 if there is nothing to write it from."""
    if chosen.plots is not None:
        return write_plots(chosen.data, chosen.plots)
    try:
        found = collect(chosen.data)
        if not found:
            raise ValueError(f"{chosen.data} holds no records of {', '.join(section.bench for section in SECTIONS)}")
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        problem = plot.why_not()
        with tempfile.TemporaryDirectory() as folder:
            chosen.out.write_text(page(found, Path(folder), draws=problem is None), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    if problem:
        print(problem)
    print(chosen.out)
    return 0


def write_plots(data: Path, folder: Path) -> int:
    """0 if every plot was written, 2 if one could not be."""
    if problem := plot.why_not():
        print(f"bench report: {problem}", file=sys.stderr)
        return 2
    try:
        written, left_out = figures.write(data, folder)
    except (ValueError, OSError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    for reason in left_out:
        print(f"bench report: no plot {reason}", file=sys.stderr)
    return 2 if left_out else 0


def collect(folder: Path) -> dict[str, dict[str, list[Record]]]:
    """bench -> file name -> records, of the benches that have a section. Raises ValueError for a file that cannot be
    read."""
    known = {section.bench for section in SECTIONS}
    found: dict[str, dict[str, list[Record]]] = {}
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.json"))):
        for record in _records(path):
            if isinstance(record, dict) and record.get("bench") in known:
                found.setdefault(record["bench"], {}).setdefault(path.name, []).append(record)
    return found


def _records(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        made = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    return made if isinstance(made, list) else [made]


def page(found: dict[str, dict[str, list[Record]]], folder: Path, draws: bool) -> str:
    """The whole page; `folder` is for plots on their way into it."""
    sections = [section for section in SECTIONS if section.bench in found]
    links = "".join(f'<a href="#{section.bench}">{html.escape(section.title)}</a>' for section in sections)
    body = "\n".join(_section(section, found[section.bench], folder, draws) for section in sections)
    made = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>echo-pg: measurements</title>'
        f"<style>\n{_STYLE}\n</style></head><body>\n<h1>echo-pg: measurements</h1>\n"
        f"<p>Version {html.escape(__version__)}, {made}. Made by <code>python -m echo_pg bench report</code>.</p>\n"
        f"<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _section(section: Section, files: dict[str, list[Record]], folder: Path, draws: bool) -> str:
    lines = [f'<h2 id="{section.bench}">{html.escape(section.title)}</h2>']
    for name, made in files.items():
        content = section.render(made, folder, Path(name).stem, draws)
        lines.append(f"<h3>{html.escape(name)}</h3>\n<p>{html.escape(_made_with(made))}</p>")
        for path in content.plots:
            encoded = base64.b64encode(path.read_bytes()).decode()
            lines.append(f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{encoded}">')
        for title, text in content.tables:
            lines.append(
                f"<details open><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
            )
    return "\n".join(lines)


def _made_with(made: list[Record]) -> str:
    """Where and with what; several, if the records of a file differ."""
    parts = []
    for name in ("device_name", "torch", "transformers", "commit", "date"):
        values = sorted({str(record[name])[: 10 if name == "date" else None] for record in made if record.get(name)})
        if values:
            parts.append(f"{name.replace('_name', '')} {', '.join(values)}")
    return "; ".join(parts)
