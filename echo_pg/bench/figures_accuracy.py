"""Plots of README and docs that show what a model makes of the rounded sums; the overview has the speed, too."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from . import train_report
from .accuracy_results import gap_of
from .accuracy_rows import REFERENCE
from .figures_speed import (
    BLUE,
    EIGHT,
    GREY,
    MAIN,
    ONE,
    ORANGE,
    PAPER,
    PLAIN,
    SHIPPED,
    SKY,
    VERMILION,
    Curve,
    baseline,
    curves,
)
from .results import by

Record = dict[str, Any]

HELD_OUT, TUNED_ON = "prose-heldout", "technical-tune"
# Which row of `bench accuracy` is the way to round that a row of `bench allreduce` times.
MEASURED_AS = {
    EIGHT[0]: "paper 8-bit no feedback",
    PLAIN[0]: "4-bit plain",
    ONE[0]: "4-bit one average, decay 0, eta 0.9",
    PAPER[0]: "paper 4-bit",
    SHIPPED[0]: "4-bit default",
}
# Of the plot of gaps closed: (row of `bench accuracy`, what it is called, colour).
_GAPS = (
    ("paper 4-bit", "the paper's method", PAPER[2]),
    ("4-bit two averages", "two averages", GREY),
    ("4-bit one average, decay 0, eta 0.9", "one average", ONE[2]),
    ("4-bit rotation, no feedback", "rotation, no feedback", SKY),
    ("4-bit rotation", "rotation, two averages", GREY),
    ("4-bit default", "as shipped: rotation, one average", SHIPPED[2]),
    ("4-bit g=64, rotation", "rotation, two averages, groups of 64", GREY),
    ("4-bit early 8-bit 25%, rotation", "rotation, two averages,\nfirst quarter in 8 bits", GREY),
)
# Of the plot of trainings: (row of `bench train`, what it is called, colour, line).
_TRAININGS = (
    ("4bit-plain", "4 bits, plain", BLUE, "-"),
    ("4bit", "4 bits, two averages", GREY, "--"),
    ("4bit-rot-one", "4 bits, as shipped", VERMILION, "-"),
    ("4bit-one", "4 bits, feedback", ONE[2], "--"),
    ("8bit", "8 bits, two averages", ORANGE, "-"),
)


def scores_of(made: list[Record]) -> dict[str, Record]:
    """By row, the first of each."""
    found: dict[str, Record] = {}
    for record in made:
        if record["part"] == "scores":
            found.setdefault(record["row"], record)
    return found


def perplexity(record: Record, text: str = HELD_OUT) -> float:
    return float(record["scores"][text]["perplexity"])


def overview(speed: list[Record], accuracy: list[Record]) -> Any:
    """Left: times as fast as NCCL against size; right: perplexity on the held-out text of the same ways to round."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=(1.15, 1), gridspec_kw={"wspace": 0.06}
    )
    curves(left, speed, MAIN)
    baseline(left, "NCCL")
    left.set_title("Speed of one all-reduce, two H200s over NVLink")
    left.legend(loc="upper left")
    scores = scores_of(accuracy)
    _bars(right, scores, MAIN)
    right.set_title("Perplexity of SmolLM2-135M, held-out essays")
    return figure


def _bars(axis: Any, scores: dict[str, Record], chosen: Sequence[Curve]) -> None:
    """Perplexity of each row, with the 16-bit model's as a line."""
    exact = perplexity(scores[REFERENCE])
    for place, (name, _, colour, _) in enumerate(chosen):
        value = perplexity(scores[MEASURED_AS[name]])
        axis.barh(place, value, height=0.62, color=colour)
        axis.annotate(
            f"{value:.2f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.axvline(exact, color="#000000", linewidth=1.4, linestyle="--")
    axis.annotate(
        f"16 bits: {exact:.2f}", (exact, -0.55), xytext=(4, 0), textcoords="offset points", va="bottom", fontsize=9,
    )  # fmt: skip
    axis.set_ylim(len(chosen) - 0.5, -1.0)
    axis.set_yticks(range(len(chosen)), labels=[label for _, label, *_ in chosen])
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1.12 * max(perplexity(scores[MEASURED_AS[name]]) for name, *_ in chosen))
    axis.set_xlabel("perplexity (lower is better)")


def gap_closed(made: list[Record]) -> Any:
    """For both texts, the share of the gap in perplexity between 16 bits and plain 4 bits that each row closes."""
    from matplotlib import pyplot

    scores = scores_of(made)
    figure, axis = pyplot.subplots(figsize=(8.5, 4.6))
    for place, (name, _, colour) in enumerate(_GAPS):
        for text, marker, shift in ((HELD_OUT, "o", -0.14), (TUNED_ON, "s", 0.14)):
            share, error = gap_of(scores[name], text, scores)
            axis.errorbar(
                100 * share, place + shift, xerr=100 * error, fmt=marker, color=colour, markersize=7,
                markerfacecolor=colour if text == HELD_OUT else "white",
            )  # fmt: skip
    axis.set_yticks(range(len(_GAPS)), labels=[label for _, label, _ in _GAPS])
    axis.set_ylim(len(_GAPS) - 0.4, -0.6)
    axis.set_xlim(0, 104)
    axis.set_xlabel("gap in perplexity between plain 4 bits (0) and 16 bits (100) that is closed, %")
    marks = [
        axis.plot([], [], marker=marker, linestyle="none", color="#444444", markerfacecolor=face, label=label)[0]
        for marker, face, label in (("o", "#444444", "held-out essays"), ("s", "white", "manual, options chosen by it"))
    ]
    axis.legend(handles=marks, loc="lower left")
    first = scores[REFERENCE]
    tokens = first["texts"][HELD_OUT]["tokens"]
    figure.suptitle(f"SmolLM2-135M on two H200s, 4 bits, {tokens:,} tokens of each text, bars: standard error")
    return figure


def training(made: list[Record]) -> Any:
    """Left: loss of the exact trainings and of those in 4 bits as shipped; right: differences to the exact training of
    the same seed, mean over seeds and its standard deviation."""
    from matplotlib import pyplot

    held_against = train_report.exact_runs(made)
    exact = {record["seed"]: record["curve"] for record in held_against}
    rate = held_against[0]["lr"]
    groups = {group[0]["row"]: group for group in by([record for record in made if record["lr"] == rate], "row")}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.3))
    for name, label, colour, line in (
        (train_report.BASELINE, "16 bits, exact", "#000000", "-"),
        *(row for row in _TRAININGS if row[0] in ("4bit-plain", "4bit-rot-one")),
    ):
        means = _over_seeds([record["curve"] for record in groups[name]], statistics.fmean)
        left.plot(_steps(groups[name][0], means), means, color=colour, linestyle=line, label=label, linewidth=1.4)
    for name, label, colour, line in _TRAININGS:
        pairs = [
            [own - other for own, other in zip(record["curve"], exact[record["seed"]], strict=True)]
            for record in groups[name]
            if record["seed"] in exact
        ]
        middle = train_report.smooth(_over_seeds(pairs, statistics.fmean))
        steps = _steps(groups[name][0], middle)
        right.plot(steps, middle, color=colour, linestyle=line, label=label)
        if len(pairs) > 1 and line == "-":
            spread = train_report.smooth(_over_seeds(pairs, statistics.stdev))
            low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
            right.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0)
    right.axhline(0, color=GREY, linewidth=1.4, linestyle="--")
    left.set(xlabel="step", ylabel="training loss, nats per byte", title="Loss")
    right.set(xlabel="step", ylabel="nats per byte", title="Loss above 16 bits at the same seed")
    left.legend(loc="upper right")
    right.legend(loc="upper left", ncols=2)
    right.set_ylim(top=1.35 * right.get_ylim()[1])
    first = held_against[0]
    model = f"{first['model']['layers']} layers of width {first['model']['width']}"
    figure.suptitle(
        f"Training from scratch, {model}, {first['ranks']} processes on {first['device_name']}, {len(exact)} seeds, "
        f"peak rate {rate:.1e}, {first['date'][:10]}"
    )
    return figure


def _over_seeds(lines: list[list[float]], merge: Any) -> list[float]:
    return [merge(values) for values in zip(*lines, strict=True)]


def _steps(record: Record, values: Sequence[float]) -> list[float]:
    """The middle of the steps that each value of a curve is the mean of."""
    return [(index + 0.5) * record["curve_every"] for index in range(len(values))]
