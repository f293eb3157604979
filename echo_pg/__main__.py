"""`python -m echo_pg doctor | bench | explain | run`."""

import argparse
import sys
from typing import Any

from . import __version__, run
from .bench import accuracy, allreduce, end_to_end, floors, hooks, page, recompute, tasks, theory, train

BENCHES: dict[str, Any] = {
    "accuracy": accuracy,
    "allreduce": allreduce,
    "floors": floors,
    "hooks": hooks,
    "recompute": recompute,
    "report": page,
    "step": end_to_end.STEP,
    "tasks": tasks,
    "theory": theory,
    "train": train,
    "ttft": end_to_end.TTFT,
}


def main(arguments: list[str]) -> int:
    # What follows `run` belongs to the program, options with the same names included.
    if arguments[:1] == ["run"]:
        return run.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m echo_pg", description="4-bit error-compensated all-reduce for torch"
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help='run a program with the names "nccl" and "gloo" meaning echo')
    doctor = commands.add_parser("doctor", help="tell what is installed and whether it works; under torchrun also live")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the live check")
    bench = commands.add_parser("bench", help="measure speed, error and accuracy against the exact backend")
    benches = bench.add_subparsers(dest="what", required=True)
    for name, module in BENCHES.items():
        module.add_arguments(benches.add_parser(name))
    add_explain(commands.add_parser("explain", help="tell whether an all-reduce would be quantized, and why"))
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        from . import doctor as doctor_module

        return doctor_module.main(chosen.device)
    if chosen.command == "bench":
        return int(BENCHES[chosen.what].main(chosen))
    return explain(chosen)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """The facts of the call in question; options of the group come from ECHO_* variables."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--numel", type=int, help="elements of the tensor")
    size.add_argument("--shape", type=int, nargs="+", help="its shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--op", default="SUM", type=str.upper)
    parser.add_argument("--ranks", type=int, default=2, help="size of the group")
    parser.add_argument("--group", default="default_pg", help="the group's description")
    parser.add_argument("--context", default="forward", choices=("forward", "backward", "recompute", "none"))
    parser.add_argument(
        "--role", default="plain", choices=("plain", "embedding", "output"), help="the innermost module"
    )


def explain(chosen: argparse.Namespace) -> int:
    from . import report

    try:
        answer = report.explain(
            numel=chosen.numel,
            shape=chosen.shape,
            dtype=chosen.dtype,
            device=chosen.device,
            op=chosen.op,
            group_size=chosen.ranks,
            group_desc=chosen.group,
            context=chosen.context,
            role=("plain", "embedding", "output").index(chosen.role),
        )
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
