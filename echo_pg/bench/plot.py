"""Speed-up over the baseline against size, a PNG for each dtype and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import MATMUL, MIB
from .results import Record, by

# Okabe and Ito's colours, told apart with any kind of colour vision. A row keeps its colour in all its variants; what
# differs is the line. With more rows than colours the next round is drawn dash-dotted.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_VARIANTS = {"-d0": "--", "-rot": ":"}
_MARKERS = "osD^vPX*<>h"
_NAMES = {"gloo": "Gloo", "nccl": "NCCL"}


def why_not() -> str | None:
    """Why nothing can be drawn, with the cure; None if it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "no plot: matplotlib is missing. Get it with\n    pip install matplotlib   (the extra echo-pg[bench])"
    return None


def show(draw: Callable[[list[Record], Path, str], list[Path]], made: list[Record], out: Path, stem: str) -> int:
    """Draw into the folder `out` and print the paths, or why nothing can be drawn. 0: either way the run was good."""
    if problem := why_not():
        print(problem)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for drawn in draw(made, out, stem):
        print(drawn)
    return 0


def draw(made: list[Record], folder: Path, stem: str) -> list[Path]:
    """Writes `folder`/`stem`-DTYPE-pRANKS.png; needs matplotlib. Returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for group in by(made, "dtype", "ranks"):
        first = group[0]
        panels = [part for part in by(group, "then_matmul") if any(_is_curve(record) for record in part)]
        rows = max(len(by([record for record in part if _is_curve(record)], "row")) for part in panels) if panels else 0
        if not rows:
            continue
        height = max(5.0, 1.2 + 0.27 * rows)
        figure, axes = pyplot.subplots(
            len(panels), 1, figsize=(11.5, height * len(panels)), constrained_layout=True, squeeze=False
        )
        families = list(dict.fromkeys(_family(record["row"])[0] for record in group if _is_curve(record)))
        for axis, part in zip(axes[:, 0], panels, strict=True):
            _panel(axis, part, families)
        machine = first["device_name"] + (f", {first['isa']}" if first["device"] == "cpu" else "")
        figure.suptitle(
            f"all-reduce of {first['dtype']} over {first['ranks']} ranks against {_NAMES[first['baseline']]}\n"
            f"{machine}, torch {first['torch']}, {first['date'][:10]}",
            fontsize=12,
        )
        paths.append(folder / f"{stem}-{first['dtype']}-p{first['ranks']}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    return paths


def _is_curve(record: Record) -> bool:
    return record["row"] not in (MATMUL, record["baseline"], f"{record['baseline']}+mm")


def _panel(axis: Any, made: list[Record], families: list[str]) -> None:
    """Curves of all rows, the baseline as a line at 1; the legend in the order of the curves' right ends.

    families: what has a colour of its own, the same in all panels.
    """
    sizes = sorted({record["bytes"] for record in made})
    baseline = _NAMES[made[0]["baseline"]]
    curves = by([record for record in made if _is_curve(record)], "row")
    drawn = []
    for curve in curves:
        points = sorted(
            (record["bytes"] / MIB, record["speedup"], bool(record["forwarded"]))
            for record in curve
            if record["speedup"] is not None
        )
        if points:
            family, variant = _family(curve[0]["row"])
            number = families.index(family)
            style = _style(number, variant) | {"marker": _MARKERS[number % len(_MARKERS)]}
            drawn.append((points[-1][1], _curve(axis, curve[0]["label"].removesuffix(", then matmul"), points, style)))
    axis.axhline(1, color="#7f7f7f", linewidth=1.2, linestyle=(0, (1, 1)))
    axis.annotate(
        baseline, (1, 1), xycoords=axis.get_yaxis_transform(), xytext=(5, 0), textcoords="offset points",
        va="center", color="#5f5f5f", fontsize=9,
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks([size / MIB for size in sizes], labels=[_mib(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("size of the tensor, MiB")
    after = "\na matrix multiplication follows; its own time is subtracted" if made[0]["then_matmul"] else ""
    hollow = "; hollow: forwarded unchanged" if any(record["forwarded"] for record in made) else ""
    axis.set_ylabel(f"times faster than {baseline}")
    axis.set_title(
        f"median of {made[0]['iterations']} interleaved iterations, slowest rank{hollow}{after}",
        fontsize=10,
        loc="left",
    )
    axis.set_ylim(bottom=0)
    axis.grid(axis="both", color="#e0e0e0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    lines = [line for _, line in sorted(drawn, key=lambda end: -end[0])]
    axis.legend(handles=lines, loc="center left", bbox_to_anchor=(1.06, 0.5), fontsize=9, frameon=False)


def _family(row: str) -> tuple[str, str]:
    """("local1", "-rot") of "local1-rot+mm"."""
    name = row.removesuffix("+mm")
    for variant in _VARIANTS:
        if name.endswith(variant):
            return name.removesuffix(variant), variant
    return name, ""


def _style(family: int, variant: str) -> dict[str, Any]:
    later_round = "-." if family >= len(COLOURS) else "-"
    return {"color": COLOURS[family % len(COLOURS)], "linestyle": _VARIANTS.get(variant, later_round)}


def _curve(axis: Any, label: str, points: list[tuple[float, float, bool]], style: dict[str, Any]) -> Any:
    """The line with its markers, and hollow markers over those of forwarded calls."""
    sizes, speedups, _ = zip(*points, strict=True)
    (line,) = axis.plot(sizes, speedups, label=label, markersize=6, linewidth=1.6, **style)
    hollow = [(size, speedup) for size, speedup, forwarded in points if forwarded]
    if hollow:
        face = {"linestyle": "none", "markerfacecolor": "white", "markersize": 6, "zorder": line.get_zorder() + 1}
        axis.plot(*zip(*hollow, strict=True), **(style | face))
    return line


def _mib(size: int) -> str:
    """1/16, 1/4, 1, 4, ...: MiB, as a fraction where less than one and the fraction is simple."""
    if size >= MIB:
        return f"{size / MIB:g}"
    return f"1/{MIB // size}" if MIB % size == 0 else f"{size / MIB:.2g}"
