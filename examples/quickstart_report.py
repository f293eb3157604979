"""What the quickstart shows and leaves behind: progress, table, plot, results.json."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

MB = 1e6


class Progress:
    """A progress bar on a terminal with `rich`, otherwise one line of dots per row. Silent unless `shown`."""

    def __init__(self, shown: bool):
        self.shown = shown
        self.bar = None
        self.task = None
        if not shown or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.bar = Bar(*columns, console=Console(stderr=True), refresh_per_second=4)
        self.bar.start()

    def start(self, label: str, steps: int) -> None:
        self.began = time.perf_counter()
        if self.bar:
            self.task = self.bar.add_task(label, total=steps)
        elif self.shown:
            print(f"{label:44} ", end="", file=sys.stderr, flush=True)

    def step(self) -> None:
        if self.bar:
            self.bar.advance(self.task)
        elif self.shown:
            print(".", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.bar:
            self.bar.stop_task(self.task)
        elif self.shown:
            print(f" {time.perf_counter() - self.began:.1f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def table(rows: list[dict]) -> str:
    """The rows side by side as plain text; the first row is what the others are compared with."""
    base = rows[0]
    head = ("", "perplexity", "sent per rank", "times less", "quantized", "evaluation", "generation")
    body = [
        (
            row["label"],
            f"{row['perplexity']:.2f}",
            f"{row['sent_bytes'] / MB:.1f} MB",
            f"{base['sent_bytes'] / row['sent_bytes']:.2f}",
            f"{row['quantized_per_forward']} of {row['all_reduces_per_forward']}",
            f"{row['evaluation_s']:.1f} s",
            f"{row['tokens_per_s']:.1f} tok/s",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *numbers])

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, body)])


def generations(rows: list[dict], prompt: str) -> str:
    """The greedy continuations, one line each, with the line breaks of the text shown as /."""
    width = max(len(row["label"]) for row in rows)
    shown = (f"{row['label']:{width}}  {' / '.join(row['generated'].split(chr(10)))}" for row in rows)
    return f'Greedy continuation of "{prompt}":\n' + "\n".join(shown)


def plot(rows: list[dict], title: str, path: Path) -> None:
    """Perplexity and bytes sent, one bar per row, saved as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [row["label"] for row in rows]
    colours = ["#7f7f7f"] + ["#1f77b4"] * (len(rows) - 1)
    panels = (
        ("Perplexity (lower is better)", [row["perplexity"] for row in rows], "{:.2f}"),
        ("Sent per rank for all-reduces, MB (lower is better)", [row["sent_bytes"] / MB for row in rows], "{:.0f}"),
    )
    height = 1.6 + 0.5 * len(rows)
    figure, axes = pyplot.subplots(1, 2, figsize=(12, height), sharey=True, constrained_layout=True)
    for axis, (name, values, shape) in zip(axes, panels, strict=True):
        bars = axis.barh(labels, values, color=colours, height=0.62)
        axis.bar_label(bars, labels=[shape.format(value) for value in values], padding=4, fontsize=10)
        axis.set_title(name, fontsize=11)
        axis.axvline(values[0], color="#7f7f7f", linewidth=1, linestyle=":")
        axis.set_xlim(0, 1.14 * max(values))
        axis.tick_params(labelsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=12)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def machine(device) -> dict:
    """Where and with what the numbers were made."""
    import torch

    packages = ("torch", "transformers", "echo-pg")
    cpu_names = re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = cpu_names[0] if cpu_names else platform.machine()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save(results: dict, path: Path) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n")
