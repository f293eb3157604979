"""The command `python -m echo_pg bench accuracy`: what the all-reduce does to a real language model's predictions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import options
from . import accuracy_results, accuracy_rows, launch, results

_EPILOGUE = """\
SmolLM2-135M is split over the ranks by unmodified transformers; every row makes its own group, loads the model into it
and reads the same windows of text. Rows quantize every site of every pass (min_bytes=0), which is checked. Measured are
perplexity, the mean Kullback-Leibler divergence of next-token distributions from those of the 16-bit row, the share of
tokens with the same most likely successor and, for some rows, the share of identical tokens in greedy continuations.
Rows that the output file already holds, made in the same circumstances, are not measured again, so that a long table
can be made in several calls.

The text is a folder made by `python -m echo_pg.bench.text DIR`. Options are chosen by technical-tune and judged by
prose-heldout. On CUDA ranks may share a GPU: Gloo then carries what is exact.
"""
_DEFAULTS = {
    "cpu": {"tokens": 4096, "length": 1024, "batch": 1},
    "cuda": {"tokens": 53248, "length": 2048, "batch": 26},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Perplexity, divergence and greedy agreement of SmolLM2-135M for many options."
    parser.epilog = _EPILOGUE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", metavar="N[,N...]", help="group sizes, one run each; default 2, or torchrun's")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder of texts; needed unless --list")
    parser.add_argument("--texts", default="technical-tune,prose-heldout", help="which of them; default %(default)s")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a model's folder, or where to keep SmolLM2; default OUT"
    )
    parser.add_argument("--set", dest="sets", help=f"default all; of {', '.join(accuracy_rows.SETS)}")
    parser.add_argument("--rows", metavar="GLOB[;GLOB...]", help="default all; names as --list shows them")
    parser.add_argument("--list", action="store_true", help="show the chosen rows and end")
    parser.add_argument("--tokens", type=int, help="of each text; default 4096 on CPU, 53248 on CUDA")
    parser.add_argument("--length", type=int, help="tokens in a window; default 1024 on CPU, 2048 on CUDA")
    parser.add_argument("--batch", type=int, help="windows per forward pass; default 1 on CPU, 26 on CUDA")
    parser.add_argument(
        "--greedy-rows", default="default", metavar="GLOB[;GLOB...]", help='rows that also generate; "none" for none'
    )
    parser.add_argument("--prompts", type=int, default=64, help="an even share from each text; default 64")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--no-growth", action="store_true", help="leave out the errors and growth per site")
    parser.add_argument("--fabric", choices=("auto", "peer", "wire"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--commit", default="", help="what to record where the checkout has no git")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR")
    parser.add_argument(
        "--report-only", type=Path, metavar="FILE.jsonl", help="measure nothing, show what was measured"
    )


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank or a check failed, 2 for arguments that make no sense."""
    try:
        if chosen.report_only is not None:
            made = results.read(chosen.report_only, "accuracy")
            return accuracy_results.show(made, chosen.report_only, chosen.out)
        plan = make_plan(chosen)
        if chosen.list:
            print("\n".join(f"{row.name:48} {', '.join(row.sets)}" for row in plan["rows"]))
            return 0
        launched = options.launched_ranks()
        sizes = group_sizes(chosen.ranks, launched)
        chosen.out.mkdir(parents=True, exist_ok=True)
        if not all((chosen.text / f"{name}.txt").is_file() for name in plan["texts"]):
            raise ValueError(f"--text {chosen.text} lacks {plan['texts']}: python -m echo_pg.bench.text {chosen.text}")
    except (ValueError, ImportError, OSError) as error:
        print(f"bench accuracy: {error}", file=sys.stderr)
        return 2
    return run(plan, sizes, launched)


def run(plan: dict[str, Any], sizes: tuple[int, ...], launched: tuple[int, int, int] | None = None) -> int:
    """Measures what the plan names with each number of ranks, and shows all that the file holds of it."""
    from . import accuracy_run

    path = Path(plan["path"])
    return launch.run_sizes("accuracy", accuracy_run.run_rank, sizes, launched, path, plan, show=accuracy_results.show)


def make_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """The arguments, checked: what every rank is told. Raises ValueError, naming value and limit."""
    rows = accuracy_rows.choose(chosen.rows, chosen.sets)
    if chosen.list:
        return {"rows": rows}
    if chosen.text is None:
        raise ValueError("--text is missing: a folder made by `python -m echo_pg.bench.text DIR`")
    launch.require(transformers=True)
    numbers = {name: getattr(chosen, name) or value for name, value in _DEFAULTS[chosen.device].items()}
    numbers |= {name: getattr(chosen, name) for name in ("prompts", "prompt_tokens", "new_tokens")}
    for name, value in numbers.items():
        if not 1 <= value <= 10_000_000:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be from 1 to 10000000")
    if chosen.greedy_rows == "default":
        greedy = {row.name for row in rows if row.greedy}
    elif chosen.greedy_rows == "none":
        greedy = set()
    else:
        greedy = {row.name for row in accuracy_rows.choose(chosen.greedy_rows, None)} | {accuracy_rows.REFERENCE}
    return numbers | {
        "device": chosen.device,
        "text": str(chosen.text),
        "texts": tuple(name.strip() for name in chosen.texts.split(",") if name.strip()),
        "model": str(chosen.model or chosen.out),
        "rows": rows,
        "greedy": greedy,
        "growth": not chosen.no_growth,
        "fabric": chosen.fabric,
        "dtype": chosen.dtype,
        "commit": chosen.commit,
        "path": str(chosen.out / f"accuracy-{chosen.device}.jsonl"),
    }


def group_sizes(text: str | None, launched: tuple[int, int, int] | None) -> tuple[int, ...]:
    """Of --ranks, or torchrun's. Raises ValueError for what cannot be split or contradicts it."""
    sizes = (launched[1],) if launched is not None else tuple(int(part) for part in (text or "2").split(","))
    if min(sizes) < 2 or (launched is not None and text is not None and text != str(launched[1])):
        raise ValueError(f"--ranks {text}: each at least 2 and, under torchrun, what it started")
    return sizes


def row_options(row: accuracy_rows.Row, plan: dict[str, Any], shared_gpu: bool) -> Any:
    """The Options of a row's group."""
    settings = {"dtypes": (plan["dtype"],), "fabric": plan["fabric"], "allow_shared_gpu": shared_gpu}
    return options.Options(**(settings | row.settings()))
