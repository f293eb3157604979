"""The command `python -m echo_pg bench train`: a Qwen3-shaped model learns real text from scratch, split over ranks,
once with exact all-reduces and once per way to quantize them, same weights and batches.

A record per training is appended to one file per preset as soon as it is done; what the file holds already is not run
again, so the command may be interrupted, or told to do a few trainings at a time.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import options
from . import launch, methods, plot, results, train_report

_TWO = methods.UNROTATED_TWO
_DTYPES: dict[str, Any] = {"dtypes": ("bfloat16",), "min_bytes": 0}
# Name -> what makes it, all else as shipped; None for the inner backend itself. Labels are in train_report.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "16bit": None,
    "off": {"policy": "off"},
    "8bit": _TWO | {"bits": 8},
    "4bit": _TWO,
    "4bit-plain": _TWO | {"feedback": False},
    "4bit-rot": _TWO | methods.ROTATED,
    "4bit-one": methods.UNROTATED | methods.ONE_AVERAGE,
    "4bit-rot-one": methods.ROTATED | methods.ONE_AVERAGE,
    "4bit-rot64-one": methods.ROTATED | methods.ONE_AVERAGE | {"rotation_size": 64},
    "4bit-rot32-one": methods.ROTATED | methods.ONE_AVERAGE | {"rotation_size": 32},
    "4bit-rot-plain": _TWO | methods.ROTATED | {"feedback": False},
    "4bit-paper": methods.PAPER,
}  # fmt: skip
# The paper's main comparison and what belongs beside it; its ablation of the learning rate (table 7b); how long the
# runs of a rotation are.
ROWS = (
    "16bit@3.0e-4", "4bit-plain@3.0e-4", "4bit@3.0e-4", "4bit@3.5e-4", "4bit-rot@3.0e-4", "4bit-rot-one@3.0e-4",
    "4bit-rot-one@3.5e-4", "8bit@3.0e-4",
)  # fmt: skip
FEW = ("16bit@3.0e-4", "4bit-plain@3.0e-4", "4bit@3.0e-4", "4bit-rot-one@3.0e-4", "4bit-rot-one@3.5e-4")
RATES = ("4bit@2.0e-4", "4bit@2.5e-4", "4bit@3.0e-4", "4bit@3.5e-4")
SIZES = ("16bit@3.0e-4", "4bit-one@3.0e-4", "4bit-rot32-one@3.0e-4", "4bit-rot64-one@3.0e-4", "4bit-rot-one@3.0e-4")
_SETS = {"main": ROWS, "few": FEW, "rates": RATES, "sizes": SIZES}
# What of a record says which training it is. Versions and commit do not: a file may be continued after an upgrade.
IDENTITY = (
    "preset", "row", "lr", "seed", "options", "model", "batch", "length", "steps", "warmup", "tail", "lr_scale",
    "ranks", "device", "text_hash",
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """model: fields of split.Shape; batch sequences of `length` bytes a step."""

    model: dict[str, int]
    batch: int
    length: int
    steps: int
    seeds: int
    what: str


PRESETS = {
    "small": Preset(
        {"layers": 12, "width": 128, "heads": 4, "head_width": 64, "kv_heads": 2, "ffn": 384},
        batch=8, length=64, steps=300, seeds=3, what="two CPU cores, 40 to 80 s a training",
    ),
    "h200": Preset(
        {"layers": 12, "width": 512, "heads": 8, "head_width": 128, "kv_heads": 4, "ffn": 1536},
        batch=16, length=256, steps=200, seeds=1, what="two ranks on one H200",
    ),
    "h200x2": Preset(
        {"layers": 28, "width": 1024, "heads": 16, "head_width": 128, "kv_heads": 8, "ffn": 3072},
        batch=24, length=1024, steps=300, seeds=1, what="two H200s; Qwen3-0.6B with a vocabulary of bytes",
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a Qwen3-shaped model from scratch with exact and with quantized all-reduces."
    presets = "; ".join(f"{name}: {preset.what}" for name, preset in PRESETS.items())
    parser.add_argument("--preset", choices=tuple(PRESETS), default="small", help=presets)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--text",
        type=Path,
        metavar="DIR",
        help="folder with prose-train.txt (`bench text` makes it); default: docstrings",
    )
    parser.add_argument(
        "--rows",
        default="main",
        help=f"VARIANT@RATE,... of {', '.join(VARIANTS)}; or main, few, rates (table 7b), sizes (of rotation)",
    )
    parser.add_argument("--seeds", type=int, help="their number, counted from 0")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr-scale", type=float, default=1.0, help="factor on all rates")
    parser.add_argument("--fabric", choices=("peer", "wire"), help="what carries the codes; default: as shipped")
    parser.add_argument("--at-most", type=int, metavar="N", help="do N trainings now, the others when called again")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
    parser.add_argument("--report-only", type=Path, metavar="FILE.jsonl", help="show a run again")


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank failed, 2 for arguments that make no sense, 130 if interrupted."""
    try:
        if chosen.report_only is not None:
            return _show(chosen.report_only, chosen.out)
        plan = make_plan(chosen)
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / f"train-{chosen.preset}-{chosen.device}.jsonl"
        done = {results.key(record, IDENTITY) for record in results.read_if_there(path, "train")}
    except (ValueError, OSError, ImportError) as error:
        print(f"bench train: {error}", file=sys.stderr)
        return 2
    options.set_unless_given("ECHO_LOG", "off")
    missing = [run for run in plan["runs"] if results.key(run["identity"], IDENTITY) not in done]
    plan["runs"] = missing if chosen.at_most is None else missing[: chosen.at_most]
    print(f"{len(missing)} trainings of {plan['steps']} steps to do, {len(plan['runs'])} of them now", flush=True)
    if plan["runs"]:
        call = functools.partial(launch.run_ranks, _run_rank, chosen.ranks, plan, str(path))
        if code := launch.report("train", chosen.ranks, path, call):
            return code
    return _show(path, chosen.out)


def _run_rank(rank: int, size: int, store_path: str, plan: dict[str, Any], path: str) -> None:
    from . import train_rank

    options.set_unless_given("ECHO_LOG", "off")
    train_rank.run_rank(rank, size, store_path, plan, path)


def make_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """What every rank is told. Raises ValueError, naming the value."""
    from . import train_rank

    launch.require()
    preset = PRESETS[chosen.preset]
    steps = preset.steps if chosen.steps is None else chosen.steps
    model = preset.model | ({} if chosen.layers is None else {"layers": chosen.layers})
    seeds = preset.seeds if chosen.seeds is None else chosen.seeds
    batch = preset.batch if chosen.batch is None else chosen.batch
    most = 1 if chosen.at_most is None else chosen.at_most
    if min(steps, seeds, batch, model["layers"], most) < 1:
        raise ValueError("--steps, --seeds, --batch, --layers and --at-most are at least 1")
    if chosen.ranks < 2 or model["kv_heads"] % chosen.ranks:
        raise ValueError(
            f"--ranks: {chosen.ranks} must divide the {model['kv_heads']} key/value heads, and be 2 or more"
        )
    more = {} if chosen.fabric is None else {"fabric": chosen.fabric}
    if chosen.device == "cuda" and launch.gpus() < chosen.ranks:
        more["allow_shared_gpu"] = True
    plan = {
        "preset": chosen.preset, "device": chosen.device, "ranks": chosen.ranks, "model": model,
        "batch": batch, "length": preset.length, "steps": steps, "warmup": max(1, steps // 20),
        "tail": min(100, max(1, steps // 3)), "text": None if chosen.text is None else str(chosen.text),
        "text_hash": train_rank.text_hash(train_rank.load_text(chosen.text)),
        "lr_scale": chosen.lr_scale,
    }  # fmt: skip
    plan["runs"] = [
        _run(plan, name, rate, seed, more) for seed in range(seeds) for name, rate in choose_rows(chosen.rows)
    ]
    return plan


def choose_rows(text: str) -> list[tuple[str, float]]:
    """Variants and learning rates of "16bit@3.0e-4,main", each once. Raises ValueError for what is neither."""
    chosen: dict[tuple[str, float], None] = {}
    for part in text.split(","):
        for row in _SETS.get(part, (part,)):
            found = re.fullmatch(r"([\w-]+)@([\d.]+(?:e-?\d+)?)", row)
            if not found or found[1] not in VARIANTS:
                raise ValueError(f"--rows: {row!r} is not VARIANT@RATE with a variant of {', '.join(VARIANTS)}")
            chosen[found[1], float(found[2])] = None
    return list(chosen)


def _run(plan: dict[str, Any], name: str, rate: float, seed: int, more: dict[str, Any]) -> dict[str, Any]:
    changes = VARIANTS[name]
    given = None if changes is None else _DTYPES | changes | more
    described = None if given is None else results.plain_options(options.Options(**given))
    run = {"row": name, "lr": rate, "seed": seed, "options": given}
    whole = plan | run | {"options": described}
    return run | {"identity": {name: whole[name] for name in IDENTITY}}


def _show(path: Path, out: Path) -> int:
    made = results.read(path, "train")
    print(train_report.text_of(made))
    print(f"\n{path}")
    return plot.show(train_report.draw, made, out, path.stem)
