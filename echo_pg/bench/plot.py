"""Speed-up over the baseline against size, a PNG for each dtype and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cases import MATMUL, MIB
from .results import Record, by

# Okabe and Ito's colours, told apart with any kind of colour vision; dashes and markers tell apart what shares one.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", ":")
_MARKERS = "osD^vPX*<>h"


def why_not() -> str | None:
    """Why nothing can be drawn, with the cure; None if it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "no plot: matplotlib is missing. Get it with\n    pip install matplotlib   (the extra echo-pg[bench])"
    return None


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
        for axis, part in zip(axes[:, 0], panels, strict=True):
            _panel(axis, part)
        figure.suptitle(
            f"all-reduce of {first['dtype']} over {first['ranks']} ranks against {first['baseline'].upper()}\n"
            f"{first['device_name']}, {first['isa']}, torch {first['torch']}, {first['date'][:10]}",
            fontsize=12,
        )
        paths.append(folder / f"{stem}-{first['dtype']}-p{first['ranks']}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    return paths


def _is_curve(record: Record) -> bool:
    return record["row"] not in (MATMUL, record["baseline"], f"{record['baseline']}+mm")


def _panel(axis: Any, made: list[Record]) -> None:
    sizes = sorted({record["bytes"] for record in made})
    curves = by([record for record in made if _is_curve(record)], "row")
    for number, curve in enumerate(curves):
        points = sorted((record["bytes"], record["speedup"]) for record in curve if record["speedup"] is not None)
        axis.plot(
            [size / MIB for size, _ in points],
            [speedup for _, speedup in points],
            label=curve[0]["label"],
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_DASHES[number // len(_COLOURS) % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=6,
            linewidth=1.6,
        )
    axis.axhline(1, color="#7f7f7f", linewidth=1.2, linestyle=(0, (1, 1)))
    axis.annotate(
        made[0]["baseline"].upper(), (1, 1), xycoords=axis.get_yaxis_transform(), xytext=(-4, 4),
        textcoords="offset points", ha="right", color="#5f5f5f", fontsize=9,
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks([size / MIB for size in sizes], labels=[_mib(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("size of the tensor, MiB")
    after = " (a matrix multiplication follows; its own time subtracted)" if made[0]["then_matmul"] else ""
    axis.set_ylabel(f"times faster than {made[0]['baseline'].upper()}{after and ', net'}")
    axis.set_title(f"median of {made[0]['iterations']} interleaved iterations, slowest rank{after}", fontsize=10)
    axis.set_ylim(bottom=0)
    axis.grid(axis="both", color="#e0e0e0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)


def _mib(size: int) -> str:
    """1/16, 1/4, 1, 4, ...: MiB, as a fraction where less than one and the fraction is simple."""
    if size >= MIB:
        return f"{size / MIB:g}"
    return f"1/{MIB // size}" if MIB % size == 0 else f"{size / MIB:.2g}"
