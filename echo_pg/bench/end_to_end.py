"""The commands `python -m echo_pg bench ttft` and `bench step`: what the all-reduce is worth to a whole model, without
and with other traffic on the links."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import options
from . import cases, end_to_end_report, launch, methods, results
from .cases import Row

_EPILOGUE = """\
One model of transformers with random weights stays in memory, split over the ranks; before every run its sums are
handed to another variant: the exact backend, each row of echo, or nobody (no-op: the call is left out). So all variants
meet the same disturbances. The share of communication is 1 - T(no-op) / T(exact). In the same run, under the same load,
the all-reduce alone is checked and timed as `bench allreduce` does it, at the model's own size and at a fixed one: r is
how many times faster a row is there (without rescaling, which belongs to backward). Reachable is then
1 / (1 - share (1 - 1 / r)), the bound of free communication 1 / (1 - share), and "reached" tells how much of the
reachable gain the model gets: (S - 1) / (reachable - 1).

Loads are copies between neighbouring GPUs (on CPU in memory), made by another process for that share of the time.
Decoding writes one token per sequence with a full cache; on GPUs of their own the step is a CUDA graph. There rows keep
min_bytes as shipped. Two ranks may share a GPU for a trial: Gloo is then the exact backend, and decoding is eager.
"""
PAPER = Row("paper", "the paper's method", changes=methods.PAPER)
_ROWS = "echo4,local1,default,paper"
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "kind": "Llama", "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "head_width": 128, "ffn": 14336,
        "vocabulary": 128256, "theta": 500_000.0,
    },
    "qwen3-8b": {
        "kind": "Qwen3", "layers": 36, "width": 4096, "heads": 32, "kv_heads": 8, "head_width": 128, "ffn": 12288,
        "vocabulary": 151936, "theta": 1_000_000.0,
    },
    "tiny": {
        "kind": "Qwen3", "layers": 2, "width": 64, "heads": 8, "kv_heads": 8, "head_width": 16, "ffn": 128,
        "vocabulary": 256,
    },
}  # fmt: skip
# Per command: sizes and repetitions of the real shapes, and of the tiny one.
_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "ttft": {
        "real": {"length": 2048, "batch": 64, "iterations": 6, "decode": "1,16,64,128", "fixed": "1GiB", "calls": 40},
        "tiny": {"length": 32, "batch": 2, "iterations": 3, "decode": "1,2", "fixed": "256KiB", "calls": 3},
    },
    "step": {
        "real": {"length": 2048, "batch": 16, "iterations": 12, "decode": "", "fixed": "1GiB", "calls": 40},
        "tiny": {"length": 32, "batch": 2, "iterations": 3, "decode": "", "fixed": "256KiB", "calls": 3},
    },
}
_WHAT = {
    "ttft": "Time to first token, and time per token in decoding, of a model split over ranks.",
    "step": "Time of a training step of a model split over ranks.",
}


@dataclass(frozen=True)
class Command:
    """One of the two; the name is the field "bench" of its records."""

    name: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        real = _DEFAULTS[self.name]["real"]
        parser.description = _WHAT[self.name]
        parser.epilog = _EPILOGUE
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny", help="default %(default)s")
        parser.add_argument("--layers", type=int, help="fewer than the shape has, for a trial")
        parser.add_argument("--ranks", type=int, help="default 2, or torchrun's")
        parser.add_argument(
            "--rows", default=_ROWS, help=f"of `bench allreduce --rows`, and paper; default {_ROWS}; the baseline and "
            "no-op always run",
        )  # fmt: skip
        parser.add_argument("--loads", default="0,50,75,100", help="duty of background copies, percent; default all")
        parser.add_argument("--length", type=int, help=f"tokens of a sequence; default {real['length']}")
        parser.add_argument(
            "--batch", type=int, help=f"the largest to try, halved and thirded until it fits; default {real['batch']}"
        )
        parser.add_argument("--iterations", type=int, help=f"of the model; default {real['iterations']}")
        if self.name == "ttft":
            parser.add_argument("--decode", help=f'batches of decoding, "" for none; default {real["decode"]}')
        parser.add_argument("--fixed", help="size of the all-reduce that loads are to slow down; default 1GiB")
        parser.add_argument(
            "--parts", default="", metavar="SHARE[,SHARE]", help="also time the exact backend on such shares of each "
            "tensor: what an all-reduce that much faster would leave of the rest; default none",
        )  # fmt: skip
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="SECONDS", help="before each pass: GPUs at their power limit "
            "are slower the shorter the sums are; default 0",
        )  # fmt: skip
        parser.add_argument("--fabric", choices=("auto", "peer", "wire"), default="auto")
        parser.add_argument("--commit", default="", help="what to record where the checkout has no git")
        parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
        parser.add_argument("--report-only", type=Path, metavar="FILE.jsonl", help="show a run again")

    def main(self, chosen: argparse.Namespace) -> int:
        """0 if all went well, 1 if a rank or a check failed, 2 for arguments that make no sense, 130 if interrupted."""
        try:
            if chosen.report_only is not None:
                made = results.read(chosen.report_only, self.name)
                return end_to_end_report.show(made, chosen.report_only, chosen.out)
            launched = options.launched_ranks()
            plan = make_plan(self.name, chosen, launched)
            chosen.out.mkdir(parents=True, exist_ok=True)
        except (ValueError, OSError, ImportError) as error:
            print(f"bench {self.name}: {error}", file=sys.stderr)
            return 2
        now = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
        path = chosen.out / f"{self.name}-{chosen.shape}-{chosen.device}-{now}.jsonl"
        return launch.run_sizes(
            self.name, run_rank, (plan["ranks"],), launched, path, plan, str(path),
            show=end_to_end_report.show,
        )  # fmt: skip


TTFT, STEP = Command("ttft"), Command("step")


def run_rank(
    rank: int, size: int, store_path: str | None, plan: dict[str, Any], path: str, local_rank: int | None = None
) -> None:
    from . import end_to_end_rank

    options.set_unless_given("ECHO_LOG", "off")  # the table says what was quantized
    if plan["shared_gpu"]:
        options.set_unless_given("ECHO_ALLOW_SHARED_GPU", "1")
    if plan["fabric"] != "auto":
        options.set_unless_given("ECHO_FABRIC", plan["fabric"])
    end_to_end_rank.run(rank, size, store_path, plan, path, local_rank)


def make_plan(bench: str, chosen: argparse.Namespace, launched: tuple[int, int, int] | None) -> dict[str, Any]:
    """The arguments, checked: what every rank is told. Raises ValueError, naming value and limit."""
    launch.require(transformers=True)
    ranks = chosen.ranks or (launched[1] if launched is not None else 2)
    if launched is not None and ranks != launched[1]:
        raise ValueError(f"torchrun started {launched[1]} rank(s), --ranks is {ranks}")
    shape = SHAPES[chosen.shape] | ({"layers": chosen.layers} if chosen.layers is not None else {})
    if ranks < 2 or shape["kv_heads"] % ranks:
        raise ValueError(f"--ranks {ranks} must be at least 2 and divide {shape['kv_heads']} key/value heads")
    defaults = _DEFAULTS[bench]["tiny" if chosen.shape == "tiny" else "real"]
    numbers = {name: getattr(chosen, name) for name in ("length", "batch", "iterations")}
    numbers = {name: defaults[name] if value is None else value for name, value in numbers.items()}
    for name, value in (numbers | {"layers": shape["layers"]}).items():
        if not 1 <= value <= 1_000_000:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be from 1 to 1000000")
    decode, loads = getattr(chosen, "decode", None), _numbers("--loads", chosen.loads, 100)
    if not loads:
        raise ValueError(f"--loads {chosen.loads!r} names none")
    return numbers | {
        "bench": bench,
        "device": chosen.device,
        "shape": chosen.shape,
        "model": shape,
        "ranks": ranks,
        "shared_gpu": chosen.device == "cuda" and launch.gpus() < ranks and launched is None,
        "rows": choose_rows(chosen.device, chosen.rows),
        "loads": loads,
        "decode": _numbers("--decode", defaults["decode"] if decode is None else decode, 1_000_000),
        "decode_iterations": 20 * numbers["iterations"],
        "fixed": cases.choose_sizes(chosen.device, chosen.fixed or defaults["fixed"], ("bfloat16",))[-1],
        "calls": defaults["calls"],
        "parts": _shares(chosen.parts),
        "pause": _checked_pause(chosen.pause),
        "fabric": chosen.fabric,
        "commit": chosen.commit,
    }


def choose_rows(device: str, text: str) -> tuple[Row, ...]:
    """The baseline, then the rows of echo that a list names. Raises ValueError for a name that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    others = ",".join(name for name in names if name != PAPER.name)
    baseline, *rows = cases.choose_rows(device, others or cases.BASELINES[device])
    if unfit := [row.name for row in rows if row.kind != "echo" or row.then_matmul or row.look_ahead is not None]:
        raise ValueError(f"--rows: {', '.join(unfit)} cannot be had in a model")
    return (baseline, *rows, *([PAPER] if PAPER.name in names else []))


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        shares = (0.0,)
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"--parts {text!r} must be numbers between 0 and 1 with commas")
    return shares


def _checked_pause(seconds: float) -> float:
    if not 0 <= seconds <= 60:
        raise ValueError(f"--pause {seconds:g} must be from 0 to 60 seconds")
    return seconds


def _numbers(name: str, text: str, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) <= most for part in parts):
        raise ValueError(f"{name} {text!r} must be numbers up to {most} with commas")
    return tuple(sorted({int(part) for part in parts}))
