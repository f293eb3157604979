"""The command `python -m echo_pg bench theory`: what section 6 of the paper proves, measured.

Theorem 1 and equation 21: partial sums of the errors that sites deliver, forward and backward, on a real model and on
synthetic sequences. Theorem 2: how far the hidden state of the real model is off, per site. Proposition 3: partial sums
of the backward errors as they reach the gradient of the hidden state, through the normalizations.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from .. import options
from . import launch, methods, results, theory_report

# Row -> how it differs from 4 bits with two averages, without rotation.
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"feedback": False},
    "local": {},
    "local-eta1": {"eta": 1.0},
    "group": {"residual": "group"},
    "group-eta1": {"residual": "group", "eta": 1.0},
    "group-eta1-fp32": {"residual": "group", "eta": 1.0, "state_dtype": "float32"},
    "one": methods.ONE_AVERAGE,
    "rot-plain": methods.ROTATED | {"feedback": False},
    "rot-local": methods.ROTATED,
    "rot-one": methods.ROTATED | methods.ONE_AVERAGE,
}
SEQUENCES = ("fresh", "drift", "same")
_QUANTIZED: dict[str, Any] = {"bits": 4, "min_bytes": 0, "dtypes": ("bfloat16",), "diagnostics": True}
_COMMON = methods.UNROTATED_TWO | _QUANTIZED
IDENTITY = ("part", "row", "options", "sites", "numel", "tokens", "ranks", "model", "text_hash", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure what the paper's section 6 bounds: theorem 1, equation 21, theorem 2, proposition 3."
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sites", type=int, default=60, help="of a synthetic pass")
    parser.add_argument("--numel", type=int, default=1 << 16, help="elements of a synthetic contribution")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a Llama or Qwen3 with its tokenizer; without it: synthetic alone",
    )
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder with prose-tune.txt; default: docstrings")
    parser.add_argument("--tokens", type=int, default=512, help="of the text that the model reads")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
    parser.add_argument("--report-only", type=Path, metavar="FILE.jsonl", help="show a run again")


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank failed, 2 for arguments that make no sense, 130 if interrupted."""
    try:
        if chosen.report_only is not None:
            return theory_report.show(results.read(chosen.report_only, "theory"), chosen.report_only, chosen.out)
        plan = make_plan(chosen)
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / "theory-cpu.jsonl"
        made = results.read_if_there(path, "theory")
    except (ValueError, OSError, ImportError) as error:
        print(f"bench theory: {error}", file=sys.stderr)
        return 2
    done = {results.key(record, IDENTITY) for record in made}
    plan["runs"] = [run for run in plan["runs"] if results.key(run, IDENTITY) not in done]
    if plan["runs"]:
        call = functools.partial(launch.run_ranks, _run_rank, chosen.ranks, plan, str(path))
        if code := launch.report("theory", chosen.ranks, path, call):
            return code
    return theory_report.show(results.read(path, "theory"), path, chosen.out)


def _run_rank(rank: int, size: int, store_path: str, plan: dict[str, Any], path: str) -> None:
    from . import theory_rank

    options.set_unless_given("ECHO_LOG", "off")
    theory_rank.run_rank(rank, size, store_path, plan, path)


def make_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """What every rank is told. Raises ValueError, naming the value."""
    launch.require()
    if chosen.ranks < 2 or chosen.sites < 2 or chosen.numel < 1 or chosen.tokens < 2:
        raise ValueError("--ranks, --sites and --tokens are at least 2, --numel at least 1")
    names = tuple(chosen.rows.split(","))
    for name in names:
        if name not in ROWS:
            raise ValueError(f"--rows: {name!r} is none of {', '.join(ROWS)}")
    synthetic = {"sites": chosen.sites, "numel": chosen.numel, "tokens": None, "model": None, "text_hash": None}
    real: dict[str, Any] = {}
    if chosen.model is not None:
        from . import train_rank

        text = train_rank.load_text(chosen.text, "prose-tune.txt")
        real = {"sites": None, "numel": None, "tokens": chosen.tokens, "text_hash": train_rank.text_hash(text)}
        real["model"] = chosen.model.name
    runs = []
    for part in (*SEQUENCES, *(("forward", "backward") if real else ())):
        about = (synthetic if part in SEQUENCES else real) | {"ranks": chosen.ranks, "seed": chosen.seed}
        for row in names:
            described = results.plain_options(options.Options(**(_COMMON | ROWS[row])))
            runs.append(about | {"part": part, "row": row, "options": described, "given": _COMMON | ROWS[row]})
    return {
        "runs": runs,
        "model": None if chosen.model is None else str(chosen.model),
        "text": None if chosen.text is None else str(chosen.text),
        "tokens": chosen.tokens,
    }
