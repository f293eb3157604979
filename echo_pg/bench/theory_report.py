"""Tables and plots of `bench theory`, from its records alone."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import plot, results
from .results import Record

LABELS = {
    "plain": "no feedback",
    "local": "local, eta 0.75",
    "local-eta1": "local, eta 1",
    "group": "group, eta 0.75",
    "group-eta1": "group, eta 1",
    "group-eta1-fp32": "group, eta 1, fp32 averages",
    "one": "local, one average, eta 0.9",
    "rot-plain": "rotation, no feedback",
    "rot-local": "rotation, local, eta 0.75",
    "rot-one": "as shipped: rotation, one average, eta 0.9",
}
PARTS = {
    "fresh": "synthetic, each site independent",
    "drift": "synthetic, each site much like the one before",
    "same": "synthetic, all sites alike",
    "forward": "real model, forward",
    "backward": "real model, backward",
}
# Norms are kept to six significant digits, so a ratio of two is off by 1e-5 of it at most.
SLACK = 1 + 1e-5


def weights(record: Record, count: int) -> list[float]:
    """w_r, the share of an error that is given back r + 1 sites later at eta = 1 (12)."""
    o = record["options"]
    a, b1, b2 = o["a"], o["beta1"], o["beta2"]
    return [a * (1 - b1) * b1**r + (1 - a) * (1 - b2) * b2**r for r in range(count)]


def mean_age(record: Record) -> float:
    """mu_w of (19)."""
    o = record["options"]
    return float(o["a"] * o["beta1"] / (1 - o["beta1"]) + (1 - o["a"]) * o["beta2"] / (1 - o["beta2"]))


def gain(record: Record) -> float:
    return float(record["options"]["eta"]) if record["options"]["feedback"] else 0.0


def bound(record: Record, sites: int) -> float:
    """Largest partial sum of `sites` errors over the largest error: equation 21, theorem 1 at eta = 1, N without
    feedback."""
    eta = gain(record)
    return min(float(sites), (1 - eta) * sites + eta * (1 + mean_age(record)))


def coefficients(record: Record, count: int) -> list[float]:
    """phi_m of (13): what is left in the partial sum of an error m sites old."""
    eta, left, made = gain(record), 1.0, []
    for weight in weights(record, count):
        made.append((1 - eta) + eta * left)
        left -= weight
    return made


def white(record: Record, sites: int) -> float:
    """Root mean square of the partial sum over that of the errors if these were alike in size and uncorrelated."""
    return math.sqrt(sum(phi**2 for phi in coefficients(record, sites)))


def share_of_bound(record: Record, norm: str) -> float:
    """The largest partial sum over the bound for the whole pass; norm "l2" or "max"."""
    return max(record[f"partial_{norm}"]) / (bound(record, record["sites_measured"]) * max(record[f"delta_{norm}"]))


def exceeds(record: Record) -> bool:
    """Whether any partial sum, in either norm, is above the bound for as many sites as it holds."""
    for norm in ("l2", "max"):
        largest = max(record[f"delta_{norm}"])
        for t, value in enumerate(record[f"partial_{norm}"], 1):
            if value > SLACK * bound(record, t) * largest:
                return True
    return False


HEAD = (
    "", "max |delta| / plain", "median |S| / plain", "max |S| / max |delta|", "if white", "bound", "share",
    "element-wise", "",
)  # fmt: skip


def source_table(made: list[Record], part: str) -> str:
    """Theorem 1 and equation 21 on the passes of one part."""
    rows = [record for record in made if record["part"] == part]
    plain = {record["options"]["rotation"]: record for record in rows if not record["options"]["feedback"]}
    lines = [list(HEAD)]
    for record in rows:
        largest, sites = max(record["delta_l2"]), record["sites_measured"]
        base = plain.get(record["options"]["rotation"])
        against = ["-", "-"]
        if base is not None:
            middle = statistics.median(record["partial_l2"]) / statistics.median(base["partial_l2"])
            against = [f"{largest / max(base['delta_l2']):.2f}", f"{middle:.2f}"]
        lines.append(
            [
                LABELS[record["row"]],
                *against,
                f"{max(record['partial_l2']) / largest:.2f}",
                f"{white(record, sites):.2f}",
                f"{bound(record, sites):.2f}",
                f"{share_of_bound(record, 'l2'):.3f}",
                f"{share_of_bound(record, 'max'):.3f}",
                "EXCEEDS THE BOUND" if exceeds(record) else "",
            ]
        )
    first = rows[0]
    return f"{PARTS[part]}: {first['sites_measured']} sites, {first['ranks']} ranks\n{results.grid(lines)}"


LEGEND = """|delta|: what a site lost; |S|: partial sum of what sites delivered beyond exact sums; 2-norms of tensors
plain: without feedback, same rotation; if white: max |S| / |delta| for uncorrelated errors of one size
bound, in units of max |delta|: N without feedback, (1 - eta) N + eta (1 + mu_w) with it (19, 21)
share: max |S| over bound x max |delta|; element-wise: the same with the largest magnitudes in place of 2-norms"""


def energy_table(made: list[Record]) -> str:
    """Theorem 2: the last hidden state and the last gradient, and how they grew."""
    lines = [["", "hidden state, per token", "all tokens", "/ qbar^2", "half way / end", "gradient, per token"]]
    backward = {record["row"]: record for record in made if record["part"] == "backward"}
    for record in made:
        if record["part"] != "forward":
            continue
        energy, sigma2 = record["energy"], record["sigma2"]
        qbar2 = q_bar2(record, sigma2)
        middle = record["energy_per_token"][len(energy) // 2] / record["energy_per_token"][-1]
        other = backward.get(record["row"])
        lines.append(
            [
                LABELS[record["row"]],
                f"{record['energy_per_token'][-1]:.2e}",
                f"{energy[-1]:.2e}",
                f"{energy[-1] / qbar2:.1e}",
                f"{middle:.2f}",
                "-" if other is None else f"{other['energy_per_token'][-1]:.2e}",
            ]
        )
    return "theorem 2: energy of the deviation over energy of the state, at the end of the pass\n" + results.grid(lines)


def q_bar2(record: Record, sigma2: list[float]) -> float:
    """(q / (sqrt(d) sigma_1))^2 with q the largest error of the pass and d its elements."""
    return float(max(record["delta_l2"]) ** 2 / (record["elements"] * sigma2[1]))


def backward_table(made: list[Record]) -> str:
    """Proposition 3: the partial sums as they reach the gradient of the hidden state, over q / sigma_1."""
    rows = [record for record in made if record["part"] == "backward"]
    sigma2 = rows[0]["sigma2"]
    falls = sum(after <= before for before, after in pairwise(sigma2))
    lines = [["", "max |S| sigma_1 / q", "at a quarter", "half", "end", "first term of the bound"]]
    for record in rows:
        unit = max(record["delta_l2"]) / math.sqrt(record["sigma2"][1])
        stream = [value / unit for value in record["stream_l2"]]
        count = len(stream)
        marks = [stream[count // 4 - 1], stream[count // 2 - 1], stream[-1]]
        lines.append(
            [
                LABELS[record["row"]],
                f"{max(stream):.3f}",
                *(f"{value:.4f}" for value in marks),
                f"{first_term(record):.2f}",
            ]
        )
    note = (
        f"largest weight of a norm {rows[0]['gamma']:.2f}; the hidden state's energy falls at {falls} of "
        f"{len(sigma2) - 1} sites" + (" (R1 supposes none)" if falls else "")
    )
    return f"proposition 3: {note}\n{results.grid(lines)}"


def first_term(record: Record) -> float:
    """gamma sqrt(2 c_delta) of the proof of proposition 3: the part of the bound that needs no smoothness constant. At
    eta < 1 and without feedback with the coefficients phi in place of the tails T."""
    sigma2 = record["sigma2"][: len(record["stream_l2"])]
    phi = coefficients(record, len(sigma2))
    largest = 0.0
    for t in range(len(sigma2)):
        largest = max(largest, sum(phi[s - t] ** 2 * sigma2[1] / sigma2[s] for s in range(t, len(sigma2))))
    return float(record["gamma"]) * math.sqrt(2 * largest)


def text_of(made: list[Record]) -> str:
    parts = [part for part in PARTS if any(record["part"] == part for record in made)]
    said = [source_table(made, part) for part in parts]
    if "forward" in parts:
        said.append(energy_table(made))
    if "backward" in parts:
        said.append(backward_table(made))
    return "\n\n".join(said)


def show(made: list[Record], path: Path, out: Path) -> int:
    print(results.header(made[0]))
    print(f"{LEGEND}\n\n{text_of(made)}")
    print(f"\n{path}")
    return plot.show(draw, made, out, path.stem)


def draw(made: list[Record], out: Path, stem: str) -> list[Path]:
    """source: partial sums and their bounds; energy: of the deviations; backward: in the hidden state's gradient."""
    import matplotlib

    matplotlib.use("Agg")
    parts = [part for part in PARTS if any(record["part"] == part for record in made)]
    paths = [_source(made, parts, out / f"{stem}-source.png")]
    if "forward" in parts:
        paths.append(_energy(made, out / f"{stem}-energy.png"))
    if "backward" in parts:
        paths.append(_backward(made, out / f"{stem}-backward.png"))
    return paths


def _style(record: Record) -> dict[str, Any]:
    """Rotation is dashed, in the colour of the same row without it; fp32 averages likewise dotted."""
    name = record["row"]
    same = name.removeprefix("rot-").removesuffix("-fp32")
    names = [other for other in LABELS if not other.startswith("rot-") and not other.endswith("-fp32")]
    line = "--" if name.startswith("rot-") else "-." if name.endswith("-fp32") else "-"
    return {"color": plot.COLOURS[names.index(same)], "label": LABELS[name], "linestyle": line}


def _finish(figure: Any, axes: Any, path: Path, made: list[Record]) -> Path:
    from matplotlib import pyplot

    for axis in axes:
        axis.grid(color="#e0e0e0", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    first = made[0]
    figure.suptitle(
        f"4 bits, {first['ranks']} ranks, torch {first['torch']}, echo {first['echo']} {first['commit']}", fontsize=10
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _source(made: list[Record], parts: list[str], path: Path) -> Path:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, len(parts), figsize=(4.6 * len(parts) + 3, 4.6), constrained_layout=True, squeeze=False
    )
    for axis, part in zip(grid[0], parts, strict=True):
        for record in made:
            if record["part"] != part:
                continue
            largest = max(record["delta_l2"])
            sites = range(1, record["sites_measured"] + 1)
            style = _style(record)
            axis.plot(sites, [value / largest for value in record["partial_l2"]], linewidth=1.5, **style)
            axis.plot(sites, [bound(record, t) for t in sites], linewidth=0.8, linestyle=":", color=style["color"])
        axis.set(yscale="log", xlabel="site", title=PARTS[part])
    grid[0][0].set_ylabel("|S| / max |delta|; dotted: bound")
    return _finish(figure, grid[0], path, made)


def _energy(made: list[Record], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(15, 4.8), constrained_layout=True)
    for axis, part, what in zip(axes, ("forward", "backward"), ("hidden state", "its gradient"), strict=True):
        for record in made:
            if record["part"] == part:
                energy = record["energy_per_token"]
                axis.plot(range(1, len(energy)), energy[1:], linewidth=1.5, **_style(record))
        axis.set(yscale="log", xlabel="sites passed", title=f"{what}: energy of the deviation, mean over tokens")
    return _finish(figure, axes, path, made)


def _backward(made: list[Record], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 4.8), constrained_layout=True)
    for record in made:
        if record["part"] == "backward":
            unit = max(record["delta_l2"]) / math.sqrt(record["sigma2"][1])
            axis.plot([value / unit for value in record["stream_l2"]], linewidth=1.5, **_style(record))
    axis.set(
        yscale="log",
        xlabel="backward site",
        ylabel="|S| sigma_1 / q",
        title="proposition 3: partial sums in the gradient of the hidden state",
    )
    return _finish(figure, [axis], path, made)
