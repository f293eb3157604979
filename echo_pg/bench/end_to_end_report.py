"""Tables, verdicts and plots of `bench ttft` and `bench step`, from their records alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .. import log
from . import plot, results
from .results import Record, by

LEAST_SHARE = 0.05  # below it noise decides how much of the gain is reached
LEAST_REACHED = 0.8
_TITLES = {
    "prefill": "time to first token",
    "step": "training step",
    "decode": "one token per sequence",
    "alone": "all-reduce",
}
# A run is told by its date: rows are compared where they were timed in turn, and nowhere else.
_SAME_RUN = (
    "date", "shape", "model", "ranks", "device_name", "length", "torch", "transformers", "commit", "variables",
)  # fmt: skip
_SAME_ROW = (*_SAME_RUN, "load", "phase", "batch", "sum_bytes", "row")


def whole(made: list[Record]) -> list[Record]:
    """One record of each row, phase, size and load: samples joined, and all that follows from them. The same again for
    what is whole already."""
    joined = [_joined(group) for group in by(made, *_SAME_ROW)]
    return [record for group in by(joined, *_SAME_RUN, "load") for record in complete(group)]


def complete_file(path: Path, bench: str) -> None:
    """Write the records of a run anew, whole; a reader never sees part of them."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    results.append(new, whole(results.read(path, bench)))
    new.replace(path)


def _joined(group: list[Record]) -> Record:
    samples = [sample for record in group for sample in record["samples_ms"]]
    moved = statistics.fmean(record["load_gbps"] for record in group)
    shares = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    told = {name: results.percentile(samples, share) for name, share in shares.items()}
    return group[0] | {
        "samples_ms": samples, "iterations": len(samples), "mean_ms": statistics.fmean(samples), "load_gbps": moved
    } | told | _apart(group)  # fmt: skip


def _apart(group: list[Record]) -> Record:
    """Of passes with a clock at each sum: the samples, and mean ms of a sum and of all else. Empty where there are
    none."""
    sums, passes = (
        [sample for record in group for sample in record.get(name, ())]
        for name in ("sum_samples_ms", "apart_samples_ms")
    )
    if not passes:
        return {}
    each = statistics.fmean(sums)
    rest = statistics.fmean(passes) - group[0]["sums"] * each
    return {"sum_samples_ms": sums, "apart_samples_ms": passes, "sum_ms": each, "rest_ms": rest}


def time_of(record: Record) -> float:
    """What rows are compared by, in ms: the mean of training steps, else the median."""
    return float(record["mean_ms" if record["phase"] == "step" else "median_ms"])


def share_of(baseline: float, without: float) -> float:
    """Of the time with the exact backend, what the all-reduce takes: 1 - without / baseline, at least 0."""
    return max(0.0, 1 - without / baseline)


def reachable(share: float, ratio: float) -> float:
    """Times faster a model can be in which `share` of the time is `ratio` times faster."""
    return 1 / (1 - share * (1 - 1 / ratio))


def complete(made: list[Record]) -> list[Record]:
    """Joined records of one run under one load with what follows from them together. speedup: over the exact backend,
    with its standard error over iterations; r: that of the all-reduce alone at the model's size (None where it was not
    measured); share, reachable, bound, reached."""
    alone = {(record["row"], record["sum_bytes"]): record for record in made if record["phase"] == "alone"}
    whole = []
    for group in by(made, "phase", "batch", "sum_bytes"):
        baseline = next(record for record in group if record["kind"] == "inner")
        nothing = next((record for record in group if record["kind"] == "nothing"), None)
        share = share_of(time_of(baseline), time_of(nothing)) if nothing is not None else None
        for record in group:
            speedup = time_of(baseline) / time_of(record)
            own, other = (alone.get((name, record["sum_bytes"])) for name in (record["row"], baseline["row"]))
            r = time_of(other) / time_of(own) if own is not None and other is not None else None
            more: Record = {"speedup": speedup, "share": share, "r": r, "reachable": None, "reached": None}
            more["speedup_error"] = _standard_error(baseline["samples_ms"], record["samples_ms"])
            more["bound"] = 1 / (1 - share) if share is not None else None
            if share is not None and r is not None and record["kind"] == "echo":
                more["reachable"] = reachable(share, r)
                gain = more["reachable"] - 1
                more["reached"] = (speedup - 1) / gain if share >= LEAST_SHARE and gain > 0 else None
            whole.append(record | more)
    return whole


def _standard_error(baseline: list[float], own: list[float]) -> float | None:
    """Of the mean of what neighbours in time give."""
    ratios = [one / other for one, other in zip(baseline, own, strict=False)]  # fewer where a run was killed
    return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def tables(made: list[Record]) -> list[tuple[str, str]]:
    """(title, text) of each part: model phases per batch and load, then the all-reduce alone with its slowdown."""
    parts = []
    for group in by([record for record in made if record["phase"] != "alone"], *_SAME_RUN, "phase", "batch", "load"):
        parts.append((_title(group[0]), _model_table(group)))
    for group in by([record for record in made if record["phase"] == "alone"], *_SAME_RUN, "sum_bytes"):
        first = group[0]
        size = log.byte_size(first["sum_bytes"])
        title = f"all-reduce of {size} alone, {first['ranks']} ranks: median ms, times slower than without load"
        parts.append((title, _alone_table(group)))
    return parts


def tables_of(made: list[Record]) -> str:
    return "\n\n".join(f"{title}\n{text}" for title, text in tables(made))


def _title(first: Record) -> str:
    graph = ", CUDA graph" if first.get("graph") else ", eager" if first["phase"] == "decode" else ""
    length = first["cached"] if first["phase"] == "decode" else first["length"]
    moved = f" ({first['load_gbps']:.0f} GB/s)" if first["load"] else ""
    share = f", share of communication {100 * first['share']:.1f} %" if first["share"] is not None else ""
    return (
        f"{first['shape']}, {_TITLES[first['phase']]}{graph}: {first['batch']} x {length} tokens, "
        f"{first['ranks']} ranks, {first['sums']} sums of {log.byte_size(first['sum_bytes'])}, "
        f"background copies {first['load']} %{moved}{share}"
    )


def _model_table(group: list[Record]) -> str:
    statistic = "mean" if group[0]["phase"] == "step" else "median"
    baseline = next(record for record in group if record["kind"] == "inner")
    head = [
        "row",
        f"{statistic} ms",
        "p10",
        "p90",
        f"x {baseline['row']}",
        "+-",
        "r alone",
        "reachable",
        "reached",
        "bound",
        "a sum ms",
        "rest ms",
    ]
    lines = [[*head, "quantized"]]
    for record in group:
        times = [f"{time_of(record):.3f}", f"{record['p10_ms']:.3f}", f"{record['p90_ms']:.3f}"]
        ours = record["kind"] == "echo"
        cells = [_cell(record[name] if ours else None, ".3f") for name in ("r", "reachable")]
        cells.append(_cell(100 * record["reached"] if record["reached"] is not None else None, ".0f", " %"))
        cells.append(_cell(record["bound"] if ours else None, ".3f"))
        apart = "rest_ms" in record and record["kind"] != "nothing"
        cells.append(_cell(record["sum_ms"] if apart else None, ".3f"))
        cells.append(_cell(record.get("rest_ms"), ".1f"))
        gain = [f"{record['speedup']:.3f}", _cell(record["speedup_error"], ".3f")]
        lines.append([record["row"], *times, *gain, *cells, "yes" if record["quantized"] else "no"])
    return results.grid(lines)


def _alone_table(group: list[Record]) -> str:
    loads = sorted({record["load"] for record in group})
    found = {(record["row"], record["load"]): record["median_ms"] for record in group}
    lines = [["row", *(f"{load} %" for load in loads), *(f"x at {load} %" for load in loads if load)]]
    for name in dict.fromkeys(record["row"] for record in group):
        idle = found.get((name, 0))
        slower = [
            _cell(found[name, load] / idle if idle and (name, load) in found else None, ".2f") for load in loads if load
        ]
        lines.append([name, *(_cell(found.get((name, load)), ".3f") for load in loads), *slower])
    return results.grid(lines)


def _cell(value: float | None, shape: str, unit: str = "") -> str:
    return "-" if value is None else format(value, shape) + unit


def verdicts(made: list[Record]) -> list[str]:
    """Whether rows reach what they can, and whether decoding is slowed down, in words."""
    said = []
    for record in made:
        if record["reached"] is None:
            continue
        met = "met" if record["reached"] >= LEAST_REACHED else "NOT met"
        error = record["speedup_error"]
        spread = "" if error is None else f" (+- {100 * error / (record['reachable'] - 1):.0f} %)"
        said.append(
            f"{record['shape']} {record['phase']}, load {record['load']} %, {record['row']}: "
            f"{100 * record['reached']:.0f} %{spread} of the reachable gain, at least {100 * LEAST_REACHED:.0f} % {met}"
        )
    for group in by([record for record in made if record["phase"] == "decode"], *_SAME_RUN, "load", "batch"):
        first, again = group[0], next(record["speedup"] for record in group if record["row"] == "again")
        speeds = ", ".join(
            f"{r['row']} {r['speedup']:.3f}" + (" SLOWER" if slower(r, again) else "")
            for r in group
            if r["kind"] == "echo"
        )
        said.append(
            f"{first['shape']} decoding {first['batch']}, load {first['load']} %: times the exact backend's speed: "
            f"{speeds}; itself, a second time: {again:.3f}"
        )
    return said


def slower(record: Record, again: float) -> bool:
    """Whether a row is slower than the exact backend by more than that one differs from itself (again: its speed the
    second time) and by more than two standard errors."""
    return 1 - record["speedup"] > max(abs(1 - again), 2 * (record["speedup_error"] or 0.0))


def header(record: Record) -> str:
    return (
        f"{record['device_name']} x {record['ranks'] if record['device'] == 'cuda' else 1}, torch {record['torch']}, "
        f"transformers {record['transformers']}, echo {record['echo']} {record['commit']}; {record['date']}\n"
        f"exact backend {record['inner']}; background: {record['load_what']}"
    )


def show(made: list[Record], path: Path, out: Path) -> int:
    """All tables and plots of a file, of a run that was ended too soon as well."""
    made = whole(made)
    print(f"\n{header(made[0])}\n\n{tables_of(made)}\n")
    print("\n".join(verdicts(made)))
    print(f"\n{path}")
    return plot.show(draw, made, out, path.stem)


def draw(made: list[Record], folder: Path, stem: str) -> list[Path]:
    """For each run whose model was timed `folder`/`stem`-SHAPE-N.png. Left: speed-up against load, with what is
    reachable; right: how loads slow the fixed all-reduce down. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for number, run in enumerate(by(whole(made), *_SAME_RUN)):
        model = [record for record in run if record["phase"] in ("prefill", "step")]
        if not model:
            continue
        alone = [record for record in run if record["phase"] == "alone"]
        largest = max(record["sum_bytes"] for record in alone)
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
        _draw_speedups(left, model)
        _draw_times(right, [record for record in alone if record["sum_bytes"] == largest])
        first = model[0]
        left.set_title(
            f"{_TITLES[first['phase']]}, {first['batch']} x {first['length']} tokens", fontsize=10, loc="left"
        )
        right.set_title(f"all-reduce of {log.byte_size(largest)} alone", fontsize=10, loc="left")
        left.margins(y=0.15)  # not from 0: models gain a few percent
        right.set_ylim(bottom=0)
        for axis in (left, right):
            axis.set_xlabel("background copies, % of the time")
            axis.grid(color="#e0e0e0", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(fontsize=9, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        figure.suptitle(f"{first['shape']}, {first['ranks']} ranks, {first['device_name']}, torch {first['torch']}")
        paths.append(folder / f"{stem}-{first['shape']}-{number}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    return paths


def _draw_speedups(axis: Any, made: list[Record]) -> None:
    for number, group in enumerate(by([record for record in made if record["kind"] != "inner"], "row")):
        group = sorted(group, key=lambda record: record["load"])
        loads = [record["load"] for record in group]
        colour = plot.COLOURS[number % len(plot.COLOURS)]
        line = {"color": colour, "linewidth": 1.6, "marker": "o"}
        if group[0]["kind"] == "nothing":
            line |= {"linestyle": ":", "label": "bound: free communication"}
        else:
            line |= {"label": group[0]["label"]}
            axis.plot(
                loads, [record["reachable"] or float("nan") for record in group], color=colour, linestyle="none",
                marker="o", markerfacecolor="white", markersize=8,
            )  # fmt: skip
        axis.plot(loads, [record["speedup"] for record in group], **line)
    axis.axhline(1, color="#7f7f7f", linewidth=1.2, linestyle=(0, (1, 1)))
    axis.set_ylabel("times faster than the exact backend; hollow: reachable")


def _draw_times(axis: Any, made: list[Record]) -> None:
    for number, group in enumerate(by(made, "row")):
        group = sorted(group, key=lambda record: record["load"])
        colour = "#7f7f7f" if group[0]["kind"] == "inner" else plot.COLOURS[number % len(plot.COLOURS)]
        axis.plot(
            [record["load"] for record in group], [record["median_ms"] for record in group], color=colour,
            linewidth=1.6, marker="o", label=group[0]["label"],
        )  # fmt: skip
    axis.set_ylabel("median, ms")
