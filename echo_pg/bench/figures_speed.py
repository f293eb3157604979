"""Plots of README and docs that show times: of one all-reduce, and of a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import end_to_end_report
from .cases import MIB
from .results import by

Record = dict[str, Any]

# Okabe and Ito's colours, told apart with any kind of colour vision; a way to round has the same one in every plot.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f",
)  # fmt: skip
# (row of `bench allreduce`, what it is called, colour, marker)
Curve = tuple[str, str, str, str]
EIGHT: Curve = ("echo8", "8 bits, plain", ORANGE, "s")
PLAIN: Curve = ("echo4", "4 bits, plain", BLUE, "o")
ONE: Curve = ("local1", "4 bits, feedback", GREEN, "^")
PAPER: Curve = ("group", "4 bits, paper's method", PURPLE, "v")
SHIPPED: Curve = ("default", "4 bits, as shipped", VERMILION, "D")
ROTATED: Curve = ("echo4-rot", "4 bits, rotation, no feedback", SKY, "P")
TWO: Curve = ("local2", "4 bits, feedback by two averages", BLACK, "X")
MAIN = (PLAIN, PAPER, ONE, SHIPPED, EIGHT)  # the least accurate first
_WITH_BAND = {PLAIN[0], SHIPPED[0]}  # five would hide each other
LEAST = MIB  # smaller calls are forwarded as shipped, on every device


def curves(axis: Any, made: list[Record], chosen: Sequence[Curve]) -> None:
    """Times as fast as the baseline against size, from 1 MiB on. Two rows have a band: the baseline's median over the
    10th and the 90th percentile of theirs. Hollow: forwarded, not quantized.

    made: records of one dtype and number of ranks.
    """
    sizes = sorted({record["bytes"] for record in made if record["bytes"] >= LEAST})
    for name, label, colour, marker in chosen:
        points = {record["bytes"]: record for record in made if record["row"] == name}
        own = [points[size] for size in sizes if size in points]
        if not own:
            raise ValueError(f"no record of the row {name}")
        places = [record["bytes"] / MIB for record in own]
        axis.plot(places, [record["speedup"] for record in own], color=colour, marker=marker, label=label)
        if name in _WITH_BAND:
            low, high = (
                [record["speedup"] * record["median_ms"] / record[end] for record in own]
                for end in ("p90_ms", "p10_ms")
            )
            axis.fill_between(places, low, high, color=colour, alpha=0.14, linewidth=0)
        hollow = [(record["bytes"] / MIB, record["speedup"]) for record in own if record["forwarded"]]
        if hollow:
            axis.plot(
                *zip(*hollow, strict=True), color=colour, marker=marker, linestyle="none", markerfacecolor="white"
            )
    axis.set_xscale("log", base=2)
    axis.set_xticks([size / MIB for size in sizes], labels=[size_text(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("size of the bfloat16 tensor")
    axis.set_ylim(bottom=0)


def size_text(size: int) -> str:
    """1 MiB, 64 MiB, 1 GiB."""
    return f"{size // 2**30}\nGiB" if size >= 2**30 else f"{size // MIB}\nMiB"


def baseline(axis: Any, name: str) -> None:
    """The line at 1, named at its right end."""
    axis.axhline(1, color=GREY, linewidth=1.4, linestyle="--")
    axis.annotate(
        name, (1, 1), xycoords=axis.get_yaxis_transform(), xytext=(-2, -4), textcoords="offset points",
        ha="right", va="top", color="#5f5f5f", fontsize=9,
    )  # fmt: skip
    axis.set_ylabel(f"times as fast as {name}")


def over_nvlink(made: list[Record]) -> Any:
    """Left: rows without feedback; right: rows with it."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axis, title, chosen in (
        (left, "without feedback", (PLAIN, ROTATED, EIGHT)),
        (right, "with feedback", (ONE, PAPER, TWO, SHIPPED)),
    ):
        curves(axis, made, chosen)
        baseline(axis, "NCCL")
        axis.set_title(title)
        axis.legend(loc="upper left")
    right.set_ylabel("")
    figure.suptitle(heading("All-reduce between two H200s over NVLink", made))
    return figure


def on_cpu(made: list[Record]) -> Any:
    """A panel per number of processes."""
    from matplotlib import pyplot

    parts = by(made, "ranks")
    figure, axes = pyplot.subplots(1, len(parts), figsize=(11, 4.6), sharey=True, squeeze=False)
    for axis, part in zip(axes[0], parts, strict=True):
        curves(axis, part, MAIN)
        baseline(axis, "Gloo")
        axis.set_title(f"{part[0]['ranks']} processes")
    for axis in axes[0][1:]:
        axis.set_ylabel("")
    axes[0][0].legend(loc="upper center", ncols=2)
    top = max(record["speedup"] for record in made if record["row"] in {name for name, *_ in MAIN})
    axes[0][0].set_ylim(0, top)
    figure.suptitle(heading(f"All-reduce between processes on {made[0]['cores']} CPU cores", made))
    return figure


def heading(what: str, made: list[Record]) -> str:
    """What was measured, with what and when."""
    first = made[0]
    return (
        f"{what}, {first['date'][:10]}, {first['commit']}\n"
        f"median of {first['iterations']} interleaved calls; bands: 10th to 90th percentile; torch {first['torch']}"
    )


def whole_model(prefill: list[Record], step: list[Record]) -> Any:
    """Bars: how many times as fast the model is; open marks: what the all-reduce alone would allow; lines: if sums were
    free. One group of bars for each kind of pass and load, of the first run of each file."""
    from matplotlib import pyplot

    groups = []
    for made, phase, title in ((prefill, "prefill", "first token"), (step, "step", "training step")):
        run = [record for record in end_to_end_report.whole(made) if record["date"] == made[0]["date"]]
        for group in by([record for record in run if record["phase"] == phase], "load"):
            load = f"links busy {group[0]['load']} %" if group[0]["load"] else "links idle"
            groups.append((f"{title},\n{load}", {record["row"]: record for record in group}))
    figure, axis = pyplot.subplots(figsize=(8.5, 4.3))
    width = 0.3
    for number, (name, label, colour, marker) in enumerate((PLAIN, SHIPPED)):
        places = [place + width * (number - 0.5) for place in range(len(groups))]
        own = [group[name] for _, group in groups]
        gains = [100 * (record["speedup"] - 1) for record in own]
        axis.bar(places, gains, width * 0.92, color=colour, label=label)
        reachable = [100 * (record["reachable"] - 1) for record in own]
        axis.plot(
            places, reachable, linestyle="none", marker=marker, markerfacecolor="white", color=colour,
            label=f"{label}, reachable",
        )  # fmt: skip
        for place, gain in zip(places, gains, strict=True):
            axis.annotate(
                f"{gain:.1f}", (place, gain), xytext=(0, -3), textcoords="offset points", ha="center", va="top",
                color="white", fontsize=8,
            )  # fmt: skip
    bounds = [100 * (next(iter(group.values()))["bound"] - 1) for _, group in groups]
    edges = [place + sign * width for place in range(len(groups)) for sign in (-1, 1)]
    label = "free all-reduces"
    for number, bound in enumerate(bounds):
        axis.plot(edges[2 * number : 2 * number + 2], [bound, bound], color=BLACK, linewidth=1.4, label=label)
        label = ""  # once in the legend
    axis.set_xticks(range(len(groups)), labels=[title for title, _ in groups])
    axis.grid(visible=False, axis="x")
    axis.set_ylabel("faster than with NCCL, %")
    axis.set_ylim(0, 1.36 * max(bounds))
    lines, names = axis.get_legend_handles_labels()
    order = [names.index(name) for name in sorted(names, key=lambda name: ("free" in name, "reachable" in name))]
    axis.legend([lines[i] for i in order], [names[i] for i in order], loc="upper right", ncols=3, columnspacing=1.2)
    first = prefill[0]
    axis.set_title(f"Shape of Llama-3-8B on two H200s over NVLink, torch {first['torch']}, {first['date'][:10]}")
    return figure
