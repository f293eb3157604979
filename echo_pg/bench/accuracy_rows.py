"""The rows of `bench accuracy`: which options are measured, in which sets, and what each row is compared with.

Every row is `Options` with a few fields changed; rows of the paper's method are `Options.paper()` changed alike. What
two sets have in common is one row with both names in `sets`, so nothing is measured twice.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any

from .methods import ONE_AVERAGE, ROTATED, UNROTATED_TWO

REFERENCE = "16-bit"
# What a row is measured against: the same bits, sent plainly (g = 128, zero_aware, no rotation, no feedback).
PLAIN = "4-bit plain"
PAPER_PLAIN = {4: "paper 4-bit no feedback", 8: "paper 8-bit no feedback"}
SETS = ("main", "paper-table8", "local", "group-size", "rotation", "scale-tau-clip", "early")


@dataclass(frozen=True)
class Row:
    """A line of the table. `changes` are fields of Options; `paper` starts from Options.paper() instead of Options().

    plain: the row without feedback that the gap is taken from, empty where closing a gap means nothing. greedy: also
    measured by default on generated text.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    paper: bool = False
    greedy: bool = False
    plain: str = ""

    def settings(self) -> dict[str, Any]:
        """The fields that the row gives to Options; every element of every site is quantized unless it says else."""
        from ..options import Options

        if self.name == REFERENCE:
            return {"policy": "off"}
        fields = {"min_bytes": 0} | self.changes
        if not self.paper:
            return fields
        paper = Options.paper()
        names = (
            "bits", "group_size", "quantizer", "rotation", "scale_dtype", "clip", "feedback", "residual", "eta", "a",
            "beta1", "beta2", "state_dtype", "rescale",
        )  # fmt: skip
        return {name: getattr(paper, name) for name in names} | fields


def _local(name: str, *sets: str, greedy: bool = False, **changes: Any) -> Row:
    """Residual "local"; what `changes` leave open has two averages, and no rotation."""
    plain = PLAIN if changes.get("bits", 4) == 4 and name != PLAIN else ""
    label = f"{changes.get('bits', 4)}-bit {name}" if name != PLAIN else name
    return Row(label, UNROTATED_TWO | changes, sets, False, greedy, plain)


def _shipped(name: str, *sets: str, greedy: bool = False, **changes: Any) -> Row:
    """4 bits with the options as shipped but for `changes`."""
    return Row(f"4-bit default, {name}", changes, sets, False, greedy, PLAIN)


def _main() -> list[Row]:
    best: dict[str, Any] = ROTATED | ONE_AVERAGE | {"clip": 0.95}
    default = "4-bit default"
    return [
        Row(REFERENCE, {}, SETS, greedy=True),
        Row(default, {}, ("main", "local", "group-size", "rotation", "early"), greedy=True, plain=PLAIN),
        _shipped("min_bytes as shipped", "main", greedy=True, min_bytes="auto"),
        Row("8-bit default", {"bits": 8}, ("main", "group-size"), greedy=True),
        _local("two averages", "main", "local", "group-size", "rotation", "scale-tau-clip", "early", greedy=True),
        _local("two averages", "main", "group-size", bits=8),
        _local("plain", "main", bits=8, feedback=False),
        _local(PLAIN, "main", "local", "group-size", "rotation", "scale-tau-clip", greedy=True, feedback=False),
        _local("rotation", "main", "rotation", "scale-tau-clip", greedy=True, rotation="hadamard"),
        _local("rotation, no feedback", "main", "rotation", greedy=True, rotation="hadamard", feedback=False),
        _local("rotation, one average, clip 0.95", "main", "local", greedy=True, **best),
        _local("rotation", "main", bits=8, rotation="hadamard"),
    ]


def _paper_table8() -> list[Row]:
    variants: dict[str, dict[str, Any]] = {
        "full method": {},
        "symmetric": {"quantizer": "symmetric"},
        "naive zero-point": {"quantizer": "asymmetric"},
        "symmetric g=256": {"quantizer": "symmetric", "group_size": 256},
        "naive zero-point g=256": {"quantizer": "asymmetric", "group_size": 256},
        "no feedback": {"feedback": False},
        "one average": {"beta1": 0.7, "beta2": 0.7},
        "one average, decay 0.3": {"beta1": 0.3, "beta2": 0.3},
        "eta 0.7": {"eta": 0.7},
        "eta 0.9": {"eta": 0.9},
        "eta 1": {"eta": 1.0},
        "a 0.2": {"a": 0.2},
        "a 0.5": {"a": 0.5},
        "a 0.65": {"a": 0.65},
        "betas 0.6, 0.2": {"beta1": 0.6, "beta2": 0.2},
        "betas 0.8, 0.4": {"beta1": 0.8, "beta2": 0.4},
        "betas 0.9, 0.3": {"beta1": 0.9, "beta2": 0.3},
    }
    rows = []
    for bits in (4, 8):
        for name, changes in variants.items():
            main = bits == 4 and name in ("full method", "no feedback")
            sets = ("paper-table8", "main") if main else ("paper-table8",)
            plain = PAPER_PLAIN[bits] if name != "no feedback" else ""
            label = f"paper {bits}-bit" + ("" if name == "full method" else f" {name}")
            rows.append(Row(label, {"bits": bits} | changes, sets, True, main and name == "full method", plain))
    return rows


def _local_feedback() -> list[Row]:
    rows = [_local(f"eta {eta:g}", "local", eta=eta) for eta in (0.5, 0.6, 0.9, 1.0)]
    rows += [_local(f"one average, decay {beta:g}", "local", beta1=beta, beta2=beta) for beta in (0.7, 0.3)]
    rows += [_local(f"one average, decay 0, eta {eta:g}", "local", a=0.0, beta2=0.0, eta=eta) for eta in (0.75, 0.9)]
    rows += [_local(f"state {dtype}", "local", state_dtype=dtype) for dtype in ("float32", "tensor")]
    rotated: dict[str, Any] = {"rotation": "hadamard"}
    rows += [_local(f"rotation, eta {eta:g}", "local", **rotated, eta=eta) for eta in (0.5, 0.9, 1.0)]
    one = ROTATED | ONE_AVERAGE
    rows += [
        _local(f"rotation, one average, decay 0, eta {eta:g}", "local", **(one | {"eta": eta})) for eta in (0.75, 1.0)
    ]
    rows += [
        _local(f"rotation {size}, one average, decay 0, eta 0.9", "local", **one, rotation_size=size)
        for size in (16, 32, 64)
    ]
    rows += [_local("rotation, state float32", "local", **rotated, state_dtype="float32")]
    rows += [_local("rotation, group residual", "local", **rotated, residual="group")]
    rows += [_shipped(f"state {dtype}", "local", state_dtype=dtype) for dtype in ("float32", "tensor")]
    return rows


def _group_size() -> list[Row]:
    rows = []
    for size in (32, 64, 256):
        rows.append(_local(f"g={size}", "group-size", group_size=size))
        rows.append(_local(f"g={size}, no feedback", "group-size", group_size=size, feedback=False))
        rows.append(_local(f"g={size}, rotation", "group-size", group_size=size, rotation="hadamard"))
        rows.append(_shipped(f"g={size}", "group-size", group_size=size))
    return rows


def _rotation() -> list[Row]:
    short = {"zero_aware": "", "asymmetric": " asymmetric", "symmetric": " symmetric"}
    rows = []
    for size in (0, 16, 32, 64, 128):
        for quantizer, label in short.items():
            for feedback in (True, False):
                if quantizer == "zero_aware" and size in (0, 128):
                    continue  # rows of the main set
                turned = {"rotation": "hadamard", "rotation_size": size} if size else {}
                name = (f"rotation {size}" if size else "no rotation") + label
                changes: dict[str, Any] = {**turned, "quantizer": quantizer, "feedback": feedback}
                rows.append(_local(name + ("" if feedback else ", no feedback"), "rotation", **changes))
    return rows


def _scale_tau_clip() -> list[Row]:
    name = "scale-tau-clip"
    rotated: dict[str, Any] = {"rotation": "hadamard"}
    rows = [_local("fp16 scales", name, scale_dtype="float16")]
    rows += [_local("rotation, fp16 scales", name, **rotated, scale_dtype="float16")]
    rows += [_local(f"tau {tau:g}", name, tau=tau) for tau in (0.0, 0.0625, 0.25, 0.5, 1.0)]
    rows += [_local(f"clip {clip:g}", name, clip=clip) for clip in (0.98, 0.95, 0.9, 0.85)]
    rows += [_local(f"rotation, clip {clip:g}", name, **rotated, clip=clip) for clip in (0.98, 0.95, 0.9, 0.85)]
    rows += [_shipped("fp16 scales", name, scale_dtype="float16")]
    rows += [_shipped(f"tau {tau:g}", name, tau=tau) for tau in (0.0, 1.0)]
    rows += [_shipped(f"clip {clip:g}", name, clip=clip) for clip in (0.98, 0.9)]
    return rows


def _early() -> list[Row]:
    rows = []
    for share in (0.25, 0.5, 0.75):
        rows.append(_shipped(f"early 8-bit {share:.0%}", "early", greedy=share == 0.5, early_sites=share))
        rows.append(_local(f"early 8-bit {share:.0%}", "early", early_sites=share))
        rows.append(_local(f"early 8-bit {share:.0%}, rotation", "early", early_sites=share, rotation="hadamard"))
    return rows


ROWS = tuple(_main() + _paper_table8() + _local_feedback() + _group_size() + _rotation() + _scale_tau_clip() + _early())


def choose(names: str | None, sets: str | None) -> tuple[Row, ...]:
    """The rows whose names match one of the globs `names` (a semicolon between them: names hold commas) and that are in
    one of the `sets` (a comma between them); the reference and the rows that others are compared with come first.
    Raises ValueError for a set that is unknown or a glob that matches nothing."""
    chosen = ROWS
    if sets is not None:
        wanted = [name.strip() for name in sets.split(",") if name.strip()]
        if unknown := [name for name in wanted if name not in SETS]:
            raise ValueError(f"--set {', '.join(unknown)}: known are {', '.join(SETS)}")
        chosen = tuple(row for row in chosen if set(row.sets) & set(wanted))
    if names is not None:
        globs = [part.strip() for part in names.split(";") if part.strip()]
        for glob in globs:
            if not any(fnmatch.fnmatchcase(row.name, glob) for row in ROWS):
                raise ValueError(f"--rows {glob!r} matches no row; --list shows them")
        chosen = tuple(row for row in chosen if any(fnmatch.fnmatchcase(row.name, glob) for glob in globs))
    needed = {REFERENCE} | {row.plain for row in chosen}
    first = [row for row in ROWS if row.name in needed]
    return tuple(first + [row for row in chosen if row.name not in needed])
