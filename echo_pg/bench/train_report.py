"""Tables and plots of `bench train`, from its records alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plot, results
from .results import Record, by

LABELS = {
    "16bit": "16 bits, exact",
    "off": "echo switched off",
    "8bit": "8 bits",
    "4bit": "4 bits, two averages",
    "4bit-plain": "4 bits, no feedback",
    "4bit-rot": "4 bits, two averages, rotation",
    "4bit-one": "4 bits, one average",
    "4bit-rot-one": "4 bits, as shipped",
    "4bit-rot64-one": "4 bits, as shipped, rotated in runs of 64",
    "4bit-rot32-one": "4 bits, as shipped, rotated in runs of 32",
    "4bit-rot-plain": "4 bits, rotation, no feedback",
    "4bit-paper": "4 bits, the paper's method",
}
BASELINE, UNCOMPENSATED = "16bit", "4bit-plain"
MOST_PERCENT = 0.9  # what the paper's 4-bit run ends above its 16-bit run
DISCRIMINATES = 3.0  # standard deviations
_SAME = ("preset", "device", "ranks", "model", "batch", "length", "steps", "lr_scale", "text_hash", "device_name")


def campaigns(made: list[Record]) -> list[list[Record]]:
    """Records that may be compared: of one model, text and schedule."""
    parts: dict[str, list[Record]] = {}
    for record in made:
        parts.setdefault(json.dumps([record[name] for name in _SAME]), []).append(record)
    return list(parts.values())


def sd(values: Sequence[float]) -> float | None:
    """Of a sample; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def exact_runs(made: list[Record]) -> list[Record]:
    """The exact trainings that others are held against: of the peak rate that has the most of them."""
    return max(by([record for record in made if record["row"] == BASELINE], "lr"), key=len, default=[])


def summary(made: list[Record]) -> list[dict[str, Any]]:
    """A line per row and rate of one campaign, the exact rows first. Percentages are of `exact_runs`' mean tail.

    difference: mean over the seeds that both have of tail minus the exact run's tail of the same seed, with
    difference_sd over seeds, None for the exact runs themselves; exact_sd: of the exact runs' own tails.
    """
    held_against = exact_runs(made)
    exact = {record["seed"]: record["tail_loss"] for record in held_against}
    mean_exact = statistics.fmean(exact.values()) if exact else None
    lines = []
    for group in by(made, "row", "lr"):
        tails = {record["seed"]: record["tail_loss"] for record in group}
        seeds = sorted(tails.keys() & exact.keys()) if group != held_against else []
        paired = [tails[seed] - exact[seed] for seed in seeds]
        difference = statistics.fmean(paired) if paired else None
        lines.append(
            {
                "row": group[0]["row"],
                "lr": group[0]["lr"],
                "seeds": len(tails),
                "tail": statistics.fmean(tails.values()),
                "tail_sd": sd(list(tails.values())),
                "bits_per_byte": statistics.fmean(tails.values()) / math.log(2),
                "difference": difference,
                "difference_sd": sd(paired),
                "percent": 100 * difference / mean_exact if difference is not None and mean_exact else None,
                "exact_sd": sd(list(exact.values())),
                "diverged": any(record["diverged"] for record in group),
                "ms_per_step": statistics.median(record["ms_per_step"] for record in group),
                "sent_mib": statistics.median(record["wire_bytes_per_step"] for record in group) / 2**20,
            }
        )
    return sorted(lines, key=lambda line: (line["row"] != BASELINE, line["row"] == "8bit", line["row"], line["lr"]))


def _ratio(value: float | None, spread: float | None) -> float | None:
    return value / spread if value is not None and spread else None


HEAD = (
    "row", "peak lr", "seeds", "tail loss", "s.d.", "bits/byte", "- 16 bits", "s.d.", "%", "diff / s.d. of 16 bits",
    "diff / its s.d.", "ms/step",
)  # fmt: skip


def table(made: list[Record]) -> str:
    """Of one campaign. The last two ratios hold a row's distance against the spread of exact trainings over seeds, and
    against its own spread where both trainings of a pair have the same seed."""
    lines = [list(HEAD)]
    for line in summary(made):
        cells = [LABELS[line["row"]] + (" DIVERGED" if line["diverged"] else ""), f"{line['lr']:.1e}"]
        cells += [str(line["seeds"]), f"{line['tail']:.4f}", _cell(line["tail_sd"], ".4f")]
        cells += [f"{line['bits_per_byte']:.3f}", _cell(line["difference"], "+.4f")]
        cells += [_cell(line["difference_sd"], ".4f"), _cell(line["percent"], "+.2f")]
        cells += [_cell(_ratio(line["difference"], line[spread]), "+.1f") for spread in ("exact_sd", "difference_sd")]
        lines.append([*cells, f"{line['ms_per_step']:.0f}"])
    return f"{title(made[0])}\n{results.grid(lines)}"


def _cell(value: float | None, shape: str) -> str:
    return "-" if value is None else format(value, shape)


def title(first: Record) -> str:
    model = first["model"]
    return (
        f"preset {first['preset']}: {model['layers']} layers of width {model['width']}, {first['ranks']} ranks, "
        f"{first['steps']} steps of {first['batch']} x {first['length']} bytes, rates x {first['lr_scale']:g}, "
        f"tail: last {first['tail']} steps\n{first['device_name']}, torch {first['torch']}, "
        f"echo {first['echo']} {first['commit']}"
    )


def verdicts(made: list[Record]) -> list[str]:
    """What one campaign shows, in words; where it does not discriminate it says so."""
    lines = summary(made)
    diverged = [f"{LABELS[line['row']]} at {line['lr']:.1e}" for line in lines if line["diverged"]]
    said = [f"diverged: {', '.join(diverged)}" if diverged else "no training diverged"]
    plain = next((line for line in lines if line["row"] == UNCOMPENSATED), None)
    if plain is None or plain["difference"] is None:
        return [*said, "without the rows of 16 bits and of 4 bits without feedback nothing can be concluded"]
    said.append(f"4 bits without feedback ends {plain['percent']:+.2f} % from 16 bits" + _power(plain))
    for line in lines:
        if line["row"] in (BASELINE, UNCOMPENSATED) or line["percent"] is None or line["lr"] < plain["lr"]:
            continue
        within = "within" if line["percent"] < MOST_PERCENT else "NOT within"
        text = f"{LABELS[line['row']]} at {line['lr']:.1e}: {line['percent']:+.2f} %, {within} {MOST_PERCENT} %"
        if line["lr"] == plain["lr"] and plain["difference"] > 0:
            text += f", {100 * (1 - line['difference'] / plain['difference']):.0f} % of the gap without feedback closed"
        said.append(text)
    return said


def _power(plain: dict[str, Any]) -> str:
    """Whether the run tells 4 bits without feedback from 16 bits."""
    unpaired = _ratio(plain["difference"], plain["exact_sd"])
    paired = _ratio(plain["difference"], plain["difference_sd"])
    if unpaired is None or paired is None:
        return "; one seed gives no spread"
    verdict = "does not discriminate"
    if unpaired > DISCRIMINATES:
        verdict = "discriminates"
    elif paired > DISCRIMINATES:
        verdict = "discriminates between equal seeds only"
    return (
        f": {unpaired:.1f} s.d. of 16 bits over seeds, {paired:.1f} s.d. of the difference at equal seeds; "
        f"the run {verdict}"
    )


def text_of(made: list[Record]) -> str:
    """All campaigns of a file."""
    return "\n\n".join("\n".join([table(part), *verdicts(part)]) for part in campaigns(made))


def draw(made: list[Record], out: Path, stem: str) -> list[Path]:
    """out/STEM.png, and STEM-2.png and so on for further campaigns; needs matplotlib. Returns the paths."""
    return [
        _draw_campaign(part, out / (f"{stem}.png" if index == 0 else f"{stem}-{index + 1}.png"))
        for index, part in enumerate(campaigns(made))
    ]


def _draw_campaign(made: list[Record], path: Path) -> Path:
    """Left: loss against steps, mean over seeds. Right, at the rate of the exact runs alone, since other rates are
    further apart than ways to round: difference to 16 bits of the same seed, with its s.d."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), constrained_layout=True)
    held_against = exact_runs(made)
    exact = {record["seed"]: record["curve"] for record in held_against}
    for number, group in enumerate(by(made, "row", "lr")):
        first = group[0]
        label = f"{LABELS[first['row']]}, {first['lr']:.1e}"
        steps = [(index + 0.5) * first["curve_every"] for index in range(min(len(r["curve"]) for r in group))]
        style = {
            "color": plot.COLOURS[number % len(plot.COLOURS)],
            "linestyle": "-" if number < len(plot.COLOURS) else "--",
        }
        left.plot(
            steps,
            [statistics.fmean(values) for values in zip(*(r["curve"] for r in group), strict=False)],
            label=label,
            linewidth=1.3,
            **style,
        )
        pairs = [
            [a - b for a, b in zip(r["curve"], exact[r["seed"]], strict=False)] for r in group if r["seed"] in exact
        ]
        if first["row"] == BASELINE or not pairs or first["lr"] != held_against[0]["lr"]:
            continue
        middle = smooth([statistics.fmean(values) for values in zip(*pairs, strict=False)])
        right.plot(steps[: len(middle)], middle, label=label, linewidth=1.5, **style)
        if len(pairs) > 1:
            spread = smooth([statistics.stdev(values) for values in zip(*pairs, strict=False)])
            low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
            right.fill_between(steps[: len(middle)], low, high, alpha=0.12, linewidth=0, color=style["color"])
    left.set(xlabel="step", ylabel="training loss, nats per byte", title="loss")
    right.set(
        xlabel="step",
        ylabel="nats per byte",
        title="above 16 bits at equal rate and seed (mean, s.d. over seeds; smoothed)",
    )
    right.axhline(0, color="#7f7f7f", linewidth=1)
    for axis in (left, right):
        axis.grid(color="#e0e0e0", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=9, frameon=False)
    figure.suptitle(title(made[0]), fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def smooth(values: list[float], width: int = 9) -> list[float]:
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
