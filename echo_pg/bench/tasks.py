"""The command `python -m echo_pg bench tasks`: what the all-reduce does to a language model's answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import options
from . import accuracy, accuracy_rows, launch, results, tasks_harness, tasks_list, tasks_report

_EPILOGUE = """\
lm-evaluation-harness asks a model that unmodified transformers splits over the ranks. --backend echo measures all
rows, 16 bits over the exact backend (NCCL, or Gloo on CPUs and where ranks share a GPU) among them, and compares; nccl
and gloo measure 16 bits alone. Rows quantize every site of every pass, prefill and decoding (min_bytes=0), which is
checked.

--tasks local: two tasks cut from a text (a folder made by `python -m echo_pg.bench.text DIR`), which need no network:
next_words, which of four stretches of a paragraph comes next, and copy_words, repeat words in a given order.
--tasks paper: the paper's, with its numbers of examples, downloaded by the harness: wikitext, piqa, arc_easy,
arc_challenge, hellaswag, winogrande, mmlu, mmlu_pro, gpqa_main_zeroshot (asks for an account that accepted its terms),
gsm8k. Other names are tasks of the harness. Tasks that the output file already holds, made in the same circumstances,
are not measured again.
"""
# What the paper's tables 5 and 6 compare, at the options of this package.
_ROWS = "8-bit default;8-bit plain;4-bit plain;4-bit default;4-bit two averages;4-bit default, early 8-bit 50%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Accuracy on tasks of lm-evaluation-harness, against 16 bits."
    parser.epilog = _EPILOGUE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backend", choices=("echo", "nccl", "gloo"), default="echo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", metavar="N[,N...]", help="group sizes, one run each; default 2, or torchrun's")
    parser.add_argument("--tasks", default="local", metavar="NAME[,NAME...]", help="default %(default)s; or paper")
    parser.add_argument("--limit", type=int, help="documents of each task; default all, 100 of those of the list local")
    parser.add_argument(
        "--rows", metavar="GLOB[;GLOB...]", help=f"rows of bench accuracy; default {_ROWS}".replace("%", "%%")
    )
    parser.add_argument("--list", action="store_true", help="show the chosen tasks and rows and end")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder of texts, for the tasks cut from one")
    parser.add_argument("--text-name", default="prose-heldout", help="which of them; default %(default)s")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a model's folder, or where to keep SmolLM2; default OUT"
    )
    parser.add_argument("--hub", default="", metavar="NAME", help="a model of the Hugging Face Hub instead")
    parser.add_argument("--batch", type=int, default=32, help="requests per forward pass; default 32")
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
            made = results.read(chosen.report_only, "tasks")
            return tasks_report.show(made, chosen.report_only, chosen.out)
        plan = make_plan(chosen)
        if chosen.list:
            print("\n".join(f"{task.name:20} {_shots(task)}" for task in plan["tasks"]))
            print("\n".join(row.name for row in plan["rows"]))
            return 0
        require(plan)
        launched = options.launched_ranks()
        sizes = accuracy.group_sizes(chosen.ranks, launched)
        chosen.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, ImportError, OSError) as error:
        print(f"bench tasks: {error}", file=sys.stderr)
        return 2
    return run(plan, sizes, launched)


def run(plan: dict[str, Any], sizes: tuple[int, ...], launched: tuple[int, int, int] | None = None) -> int:
    """Measures what the plan names with each number of ranks, and shows all that the file holds of it."""
    from . import tasks_rank

    path = Path(plan["path"])
    return launch.run_sizes("tasks", tasks_rank.run_rank, sizes, launched, path, plan, show=tasks_report.show)


def make_plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """The arguments, checked: what every rank is told. Raises ValueError, naming value and limit."""
    tasks = tasks_list.choose(chosen.tasks)
    rows = accuracy_rows.choose(chosen.rows or _ROWS, None) if chosen.backend == "echo" else ()
    rows = rows or tuple(row for row in accuracy_rows.ROWS if row.name == accuracy_rows.REFERENCE)
    limit = 100 if chosen.limit is None and tasks == tasks_list.LOCAL else chosen.limit
    for name, value in (("limit", limit), ("batch", chosen.batch)):
        if value is not None and not 1 <= value <= 1_000_000:
            raise ValueError(f"--{name} {value} must be from 1 to 1000000")
    if chosen.backend == "nccl" and chosen.device == "cpu":
        raise ValueError("--backend nccl needs --device cuda")
    return {
        "device": chosen.device,
        "exact": "" if chosen.backend == "echo" else chosen.backend,
        "tasks": tasks,
        "limit": limit,
        "rows": rows,
        "text": str(chosen.text),
        "text_name": chosen.text_name,
        "model": str(chosen.model or chosen.out),
        "hub": chosen.hub,
        "batch": chosen.batch,
        "fabric": chosen.fabric,
        "dtype": chosen.dtype,
        "commit": chosen.commit,
        "packages": (tasks_harness.PACKAGE, "datasets"),
        "path": str(chosen.out / f"tasks-{chosen.device}.jsonl"),
    }


def require(plan: dict[str, Any]) -> None:
    """Raises ValueError or ImportError for what is missing."""
    launch.require(transformers=True)
    if problem := tasks_harness.why_not():
        raise ValueError(problem)
    path = Path(plan["text"]) / f"{plan['text_name']}.txt"
    if any(task.documents for task in plan["tasks"]) and not path.is_file():
        raise ValueError(f"--text: {path} is missing: python -m echo_pg.bench.text {path.parent}")


def _shots(task: tasks_list.Task) -> str:
    return "the harness's own number of examples" if task.shots is None else f"{task.shots} examples"
