"""Plots of `bench accuracy`: perplexity over that of 16 bits for every row, and what happens from site to site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .accuracy_results import SAME_RUN, Record, growth_of, parts_of
from .accuracy_rows import REFERENCE
from .results import by

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")


def draw(made: list[Record], folder: Path, stem: str) -> list[Path]:
    """Writes folder/STEM-pRANKS-SET.png for every set and -sites.png; needs matplotlib. Returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    paths = []
    for number, run in enumerate(by(made, *SAME_RUN)):
        name = f"{stem}-p{run[0]['ranks']}" + (f"-{number}" if number else "")
        scores: dict[str, Record] = {}
        for record in run:
            if record["part"] == "scores":
                scores.setdefault(record["row"], record)
        for chosen, named in parts_of(scores) if REFERENCE in scores else ():
            if rows := [row for row in named if row != REFERENCE]:
                paths.append(folder / f"{name}-{chosen.replace(' ', '-')}.png")
                _rows(rows, scores, chosen, paths[-1])
        growth = [record for record in run if record["part"] == "growth"]
        if growth:
            paths.append(folder / f"{name}-sites.png")
            _sites(growth, paths[-1])
    return paths


def _title(record: Record) -> str:
    return f"{record['model']['name']}, {record['ranks']} ranks, {record['device_name']}, {record['date'][:10]}"


def _rows(rows: list[str], scores: dict[str, Record], chosen: str, path: Path) -> None:
    """A dot per row and text: by how many percent perplexity is above that of 16 bits, on a logarithmic axis."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 1.6 + 0.27 * len(rows)), constrained_layout=True)
    places = range(len(rows))
    exact = scores[REFERENCE]["scores"]
    smallest = 0.01  # percent; what is below, or better than 16 bits, is drawn at the edge
    for (text, best), colour in zip(exact.items(), _COLOURS, strict=False):
        above = [100 * (scores[row]["scores"][text]["perplexity"] / best["perplexity"] - 1) for row in rows]
        label = f"{text} (16-bit: {best['perplexity']:.2f})"
        axis.plot([max(value, smallest) for value in above], places, "o", color=colour, label=label, markersize=6)
    axis.set_xscale("log")
    axis.set_xlim(left=smallest * 0.8)
    axis.set_yticks(places, labels=rows, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(f"perplexity above that of 16 bits, % (at the left edge: less than {smallest})")
    axis.grid(color="#e0e0e0", linewidth=0.8, which="both", axis="x")
    axis.grid(color="#f0f0f0", linewidth=0.8, axis="y")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=9, loc="outside lower left", ncols=2, frameon=False)
    axis.set_title(f"{_title(scores[REFERENCE])}: {chosen}", fontsize=11, loc="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _sites(made: list[Record], path: Path) -> None:
    """Three panels over sites: growth of x' (where it is known), size of each error, size of their partial sum."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    for number, record in enumerate(made):
        colour = _COLOURS[number % len(_COLOURS)]
        sites, label = record["sites"], record["row"].removeprefix("growth: ")
        style: dict[str, Any] = {"color": colour, "label": label, "linewidth": 1.6}
        if growth_of(sites[0], "x") is not None:
            axes[0].plot([growth_of(site, "x") for site in sites], **style)
        for axis, name in ((axes[1], "delta_rms"), (axes[2], "partial_rms")):
            axis.plot([site[name] for site in sites], **style)
    for axis, title in zip(axes, ("rms of x' over that of x", "rms of delta", "rms of the partial sum"), strict=True):
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xlabel("site")
        axis.grid(color="#e0e0e0", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    axes[2].legend(fontsize=9, frameon=False)
    figure.suptitle(f"{_title(made[0])}: site by site", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
