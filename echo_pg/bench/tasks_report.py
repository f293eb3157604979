"""Records of `bench tasks`: the tests that compare two rows, tables and a plot.

A record is one task of one row. It holds for every document whether the answer was right, so all comparisons are
computed when a table is made, from records of the same circumstances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plot, results
from .accuracy_rows import REFERENCE
from .results import by, grid

Record = dict[str, Any]
LEVEL = 0.05  # of the paper's test, two-sided
# What must be equal for two records to belong to one table.
SAME_RUN = (
    "device", "device_name", "gpus", "ranks", "dtype", "batch", "limit", "model", "texts", "torch", "transformers",
    "lm_eval", "datasets", "seed", "source", "commit", "variables",
)  # fmt: skip


def key_of(record: Record) -> str:
    """Equal for records of one measurement: circumstances, row, task and options."""
    return results.key(record, (*SAME_RUN, "row", "task", "backend", "options"))


# --- what compares two rows ---


def standard_error(accuracy: float, documents: int) -> float:
    """Binomial."""
    return math.sqrt(accuracy * (1 - accuracy) / documents)


def unpaired(a: float, b: float, documents: int) -> float:
    """The paper's test: the two-sided p of two accuracies being equal, from the binomial standard error of each. It
    treats the rows as if they had been asked different documents, and so finds less than `paired`."""
    error = math.hypot(standard_error(a, documents), standard_error(b, documents))
    if error == 0:  # each row is right everywhere or nowhere
        return 1.0 if a == b else 0.0
    return math.erfc(abs(a - b) / error / math.sqrt(2))


def flips(correct: str, reference: str) -> tuple[int, int]:
    """Documents that the reference alone has right, and that the other alone has right."""
    pairs = list(zip(correct, reference, strict=True))
    return pairs.count(("0", "1")), pairs.count(("1", "0"))


def paired(lost: int, won: int) -> float:
    """McNemar's test, exact and two-sided: if the rows are equally good, each document on which they differ is lost or
    won with equal chance."""
    count = lost + won
    tail = sum(math.comb(count, k) for k in range(min(lost, won) + 1))
    return min(1.0, tail / 2 ** (count - 1)) if count else 1.0


# --- tables ---


def tables(made: list[Record]) -> list[tuple[str, str]]:
    """(title, text) for every run in `made`: accuracies in short, then every task."""
    found = []
    for run in by(made, *SAME_RUN):
        found.append((heading(run[0]), summary(run)))
        found += [(f"{group[0]['task']}, {_shots(group[0])}", table(group)) for group in by(run, "task")]
    return found


def heading(record: Record) -> str:
    limit = f", first {record['limit']} documents of each" if record["limit"] else ""
    texts = "".join(f", text {name}" for name in record["texts"])
    return f"{record['model']['name']}, {record['ranks']} ranks on {record['device_name']}{texts}{limit}"


def _shots(record: Record) -> str:
    return f"{record['documents']} documents, {record['shots']} examples in the prompt"


def metric_names(made: list[Record]) -> list[tuple[str, str]]:
    """(task, metric), in the order of the records."""
    return list(dict.fromkeys((record["task"], metric) for record in made for metric in record["metrics"]))


def _find(made: list[Record], row: str, task: str, metric: str) -> dict[str, Any] | None:
    for record in made:
        if (record["row"], record["task"]) == (row, task):
            found: dict[str, Any] | None = record["metrics"].get(metric)
            return found and found | {
                "digest": record["digest"],
                "backend": record["backend"],
                "plain": record["plain"],
            }
    return None


def _comparable(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    return bool(one and other and "correct" in one and "correct" in other and one["digest"] == other["digest"])


def summary(made: list[Record]) -> str:
    """Rows against metrics: percent right (or a perplexity), marked where the paper's test tells it from 16 bits."""
    names = metric_names(made)
    lines = [["row", *(f"{task} {metric}" for task, metric in names)]]
    for row in dict.fromkeys(record["row"] for record in made):
        line = [row]
        for task, metric in names:
            mine, reference = _find(made, row, task, metric), _find(made, REFERENCE, task, metric)
            if mine is None:
                line.append("")
            elif "correct" not in mine:
                line.append(f"{mine['value']:.3f}")
            else:
                p = _p(mine, reference) if row != REFERENCE and _comparable(mine, reference) else 1.0
                line.append(f"{100 * mine['value']:.2f}" + ("*" if p < LEVEL else " "))
        lines.append(line)
    return grid(lines)


def _p(mine: dict[str, Any], other: Any) -> float:
    return unpaired(mine["value"], other["value"], len(mine["correct"]))


def table(made: list[Record]) -> str:
    """Of one task: every row against 16 bits and against the same bits sent plainly."""
    head = ["row", "backend", "metric", "right, %", "± s.e.", "- 16 bits", "p", "lost", "won", "p paired"]
    lines = [[*head, "- plain", "p", "p paired"]]
    for record in made:
        for metric in record["metrics"]:
            mine = _find(made, record["row"], record["task"], metric)
            assert mine is not None
            if "correct" not in mine:
                lines.append([record["row"], record["backend"], metric, f"{mine['value']:.4f}", *[""] * 9])
                continue
            line = [record["row"], record["backend"], metric, f"{100 * mine['value']:.2f}"]
            line.append(f"{100 * standard_error(mine['value'], len(mine['correct'])):.2f}")
            reference = _find(made, REFERENCE, record["task"], metric) if record["row"] != REFERENCE else None
            plain = _find(made, record["plain"], record["task"], metric)
            line += _against(mine, reference)
            against_plain = _against(mine, plain)
            lines.append([*line, *against_plain[:2], against_plain[4]])
    return grid(lines)


def _against(mine: dict[str, Any], other: Any) -> list[str]:
    if not _comparable(mine, other):
        return ["-"] * 5
    lost, won = flips(mine["correct"], other["correct"])
    difference = 100 * (mine["value"] - other["value"])
    return [f"{difference:+.2f}", _level(_p(mine, other)), str(lost), str(won), _level(paired(lost, won))]


def _level(p: float) -> str:
    return (f"{p:.3f}" if p >= 0.001 else f"{p:.0e}") + ("*" if p < LEVEL else " ")


def show(made: list[Record], path: Path, out: Path) -> int:
    """All tables and the plot of a file."""
    for title, text in tables(made):
        print(f"\n{title}\n{text}")
    print(
        "\n*: below 0.05. p: the paper's test, two-sided, from the binomial standard error of each accuracy;\n"
        "p paired: exact McNemar's test over the same documents; lost, won: documents that 16 bits alone, and this\n"
        f"row alone, has right; plain: the same bits without feedback or rotation\n{path}"
    )
    return plot.show(draw, made, out, path.stem)


# --- plot ---


def draw(made: list[Record], folder: Path, stem: str) -> list[Path]:
    """Writes folder/STEM-N.png for every run that has something to compare; needs matplotlib. Returns the paths."""
    paths = []
    for number, run in enumerate(by(made, *SAME_RUN)):
        names = [
            (task, metric)
            for task, metric in metric_names(run)
            if "correct" in (_find(run, REFERENCE, task, metric) or {})
        ]
        rows = [row for row in dict.fromkeys(record["row"] for record in run) if row != REFERENCE]
        if names and rows:
            paths.append(folder / f"{stem}-{number}.png")
            _draw(run, names, rows, paths[-1])
    return paths


def _draw(run: list[Record], names: Sequence[tuple[str, str]], rows: Sequence[str], path: Path) -> None:
    """Differences of accuracy to 16 bits with the 95 % interval of the paper's test; an interval that leaves out zero
    is significant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 1.6 + 0.24 * len(rows) * len(names)), constrained_layout=True)
    for number, row in enumerate(rows):
        places, differences, errors = [], [], []
        for place, (task, metric) in enumerate(names):
            mine, reference = _find(run, row, task, metric), _find(run, REFERENCE, task, metric)
            if mine is None or reference is None or not _comparable(mine, reference):
                continue
            count = len(mine["correct"])
            both = [standard_error(found["value"], count) for found in (mine, reference)]
            places.append(place + 0.7 * ((number + 0.5) / len(rows) - 0.5))
            differences.append(100 * (mine["value"] - reference["value"]))
            errors.append(100 * 1.96 * math.hypot(*both))
        colour = plot.COLOURS[number % len(plot.COLOURS)]
        axis.errorbar(differences, places, xerr=errors, fmt="o", color=colour, label=row, markersize=5, capsize=3)
    axis.axvline(0, color="#444444", linewidth=1)
    axis.set_yticks(range(len(names)), labels=[f"{task}\n{metric}" for task, metric in names], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(
        "accuracy minus that of 16 bits, percent of the documents, with the 95 % interval of the paper's test"
    )
    axis.grid(color="#e0e0e0", linewidth=0.8, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.set_title(heading(run[0]), fontsize=11, loc="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
