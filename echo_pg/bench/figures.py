"""The plots of README and docs/: SVG files, drawn from the records of a folder such as ci/baseline.

Equal records and an equal matplotlib give equal bytes: no date, ids from a fixed salt, text as outlines. Each file
names the records that it was drawn from, with a hash of each, so that a test can tell a plot that is older than its
records.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import figures_accuracy, figures_speed, results

Record = dict[str, Any]

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "figure.facecolor": "white",  # readable on a dark page, too
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # looks alike whatever fonts a reader has
    "svg.hashsalt": "echo-pg",
}


@dataclass(frozen=True)
class Plot:
    """`draw` gets the records of each file of `sources`, in that order, and returns a matplotlib figure."""

    name: str
    sources: tuple[tuple[str, str], ...]  # (file, field "bench" of its records)
    draw: Callable[..., Any]

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.svg"

    def missing(self, data: Path) -> list[str]:
        return [name for name, _ in self.sources if not (data / name).is_file()]


_SPEED_H200 = ("bench_allreduce_h200x2.jsonl", "allreduce")
_ACCURACY_H200 = ("bench_accuracy_h200x2.jsonl", "accuracy")
PLOTS = (
    Plot("overview", (_SPEED_H200, _ACCURACY_H200), figures_accuracy.overview),
    Plot("speed_h200x2", (_SPEED_H200,), figures_speed.over_nvlink),
    Plot("speed_cpu", (("bench_allreduce_cpu_2_cores.jsonl", "allreduce"),), figures_speed.on_cpu),
    Plot(
        "whole_model",
        (("bench_ttft_llama3_8b_h200x2.jsonl", "ttft"), ("bench_step_llama3_8b_h200x2.jsonl", "step")),
        figures_speed.whole_model,
    ),
    Plot("accuracy", (_ACCURACY_H200,), figures_accuracy.gap_closed),
    Plot("training", (("train_small_cpu_2_cores.jsonl", "train"),), figures_accuracy.training),
)


def write(data: Path, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw every plot whose records are in the folder `data`; needs matplotlib. Returns the paths that were written,
    and what was left out for want of which file. Raises ValueError for a file that cannot be read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written, left_out = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        if missing := plot.missing(data):
            left_out.append(f"{plot.name}: {data} has no {', '.join(missing)}")
            continue
        records = [results.read(data / name, bench) for name, bench in plot.sources]
        with matplotlib.rc_context(_STYLE):
            figure = plot.draw(*records)
            made = io.StringIO()
            about = {"Date": None, "Creator": "python -m echo_pg bench report --plots", "Source": source(plot, data)}
            figure.savefig(made, format="svg", metadata=about)
            pyplot.close(figure)
        plot.path(folder).write_text(_short(made.getvalue()), encoding="utf-8")
        written.append(plot.path(folder))
    return written, left_out


def source(plot: Plot, data: Path) -> str:
    """What a plot was drawn from: "FILE HASH, ..."; a plot without it in its file is older than the records."""
    hashes = {name: hashlib.sha256((data / name).read_bytes()).hexdigest() for name, _ in plot.sources}
    return ", ".join(f"{name} {hashed[:16]}" for name, hashed in hashes.items())


def _short(svg: str) -> str:
    """With coordinates of paths and marks in hundredths of a point, and no blanks at ends of lines: a third less."""
    places = re.compile(r'(?<= )(d|x|y)="[^"]*"')
    short = places.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    return re.sub(r"[ \t]+$", "", short, flags=re.MULTILINE)
