"""ci/gpu: builds, tests, sanitizes and times on the GPUs of this machine.

Steps: build (C++ tests without torch, the package, doctor), cpp (kernels against the CPU stages), python (tests/gpu, a
file at a time), sanitize (compute-sanitizer on small cases of the C++ tests), bench (`bench allreduce`; the wire path
against NCCL without peer memory, and over sockets). On a single GPU ranks share it: what needs two is named.

Every check is told when it is over and kept in DIR/gpu_checks_GPUS.jsonl, the newest of each; benchmarks leave
DIR/bench_*_GPUS.jsonl. Exit status: 0 if all that was asked for ran and passed, else 1; 2 for arguments that make no
sense and where torch sees no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gpu_steps
from gpu_record import FAILED, PASSED, Report, end_all, line

ROOT = gpu_steps.ROOT
# Without plugins: an echo that does not fit must not prevent its own repair.
_ASK_TORCH = """
import json, os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
count = torch.cuda.device_count()
print(json.dumps({
    "torch": torch.__version__, "count": count,
    "names": [torch.cuda.get_device_name(index) for index in range(count)],
    "capability": torch.cuda.get_device_capability() if count else None,
}))
"""


def main(arguments: list[str]) -> int:
    chosen = _parse(arguments)
    torch = json.loads(_text([sys.executable, "-c", _ASK_TORCH]) or "{}")
    if not torch.get("count"):
        print(f"ci/gpu: the torch of {sys.executable} sees no GPU" if torch else "ci/gpu: torch is missing")
        return 2
    nvcc = gpu_steps.tool("nvcc")
    arch = "sm_{}{}".format(*torch["capability"])
    machine = gpu_steps.Machine(torch["count"], arch, nvcc)
    common = circumstances(torch, nvcc, chosen.commit)
    print(", ".join(f"{name} {value}" for name, value in common.items()), flush=True)
    name = slug(torch["names"])
    out, logs = chosen.out or ROOT / "ci/baseline", (chosen.out or gpu_steps.BUILD) / "logs"
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out / f"gpu_checks_{name}.jsonl", logs, common, chosen.seconds)
    for ended in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ended, _leave)
    results = gpu_steps.BUILD / "bench"
    shutil.rmtree(results, ignore_errors=True)

    def gather(complete: bool) -> None:
        for path in gpu_steps.collect(results, out, name, complete):
            print(f"   records: {path}", flush=True)

    try:
        run_steps(report, chosen, machine, results, gather)
    finally:
        gather(complete=False)
        print("\n" + "\n".join(line(record) for record in report.made))
        print(f"{report.path}, {report.seconds - report.left():.0f} s", flush=True)
    return 0 if report.all_passed() else 1


def run_steps(
    report: Report,
    chosen: argparse.Namespace,
    machine: gpu_steps.Machine,
    results: Path,
    gather: Callable[[bool], None],
) -> None:
    """What a step needs is looked up when its turn comes, because an earlier step may have made it."""
    ended = []
    for step in chosen.only:
        for checks in gpu_steps.checks(step, machine, chosen.full, results):
            checks = [gpu_steps.skip_after(check, ended) for check in checks if chosen.match in check.name]
            if not checks:
                continue
            report.together(checks)
            outcomes = report.made[-len(checks) :]
            gather(all(made["outcome"] == PASSED for made in outcomes))
            ended += [c for c, made in zip(checks, outcomes, strict=True) if made["why"].startswith("ended after")]
        outcomes = [record["outcome"] for record in report.made if record["step"] == step]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
        print(f"== step {step}: {counts}; {report.left():.0f} s are left", flush=True)
        if step == "build" and FAILED in outcomes:
            print("== without what was to be built, other steps would test something else", flush=True)
            return


def circumstances(torch: dict[str, Any], nvcc: str | None, commit: str | None) -> dict[str, Any]:
    """What holds for all records of a run."""
    driver = _text(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0].strip()
    release = re.search(r"release (\S+),", _text([nvcc, "--version"])) if nvcc else None
    return {
        "gpus": ", ".join(f"{torch['names'].count(name)}x {name}" for name in dict.fromkeys(torch["names"])),
        "driver": driver or "unknown: nvidia-smi does not tell",
        "torch": torch["torch"],
        "python": platform.python_version(),
        "nvcc": release[1] if release else "none",
        "commit": commit or _commit(),
    }


def slug(names: list[str]) -> str:
    """Of two H200s: h200x2."""
    model = re.sub(r"[^a-z0-9]+", "_", names[0].lower().replace("nvidia", "")).strip("_")
    return model if len(names) == 1 else f"{model}x{len(names)}"


def _commit() -> str:
    """With "+" if there are changes beside results; "unknown" where there is no repository."""
    git = ["git", "-C", str(ROOT)]
    name = _text([*git, "rev-parse", "--short", "HEAD"]).strip()
    changed = "+" if _text([*git, "status", "--porcelain", "--", ".", ":(exclude)ci/baseline"]).strip() else ""
    return name + changed if name else "unknown"


def _text(command: list[str]) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _leave(number: int, _: FrameType | None) -> None:
    end_all()
    sys.exit(128 + number)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(gpu_steps.STEPS), metavar="STEP[,STEP]", help="default: %(default)s")
    parser.add_argument("--match", default="", metavar="TEXT", help="only checks with this in their name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results; default ci/baseline")
    parser.add_argument("--seconds", type=float, default=3600, help="whole limit; what finds no time is named")
    parser.add_argument("--full", action="store_true", help="bench allreduce with all rows, sizes and iterations")
    parser.add_argument("--commit", help="of these sources, where they lie in no repository")
    chosen = parser.parse_args(arguments)
    named = [step.strip() for step in chosen.only.split(",") if step.strip()]
    if unknown := [step for step in named if step not in gpu_steps.STEPS] or not named:
        parser.error(f"--only: {unknown if named else chosen.only!r}: must be of {', '.join(gpu_steps.STEPS)}")
    if chosen.seconds <= 0:
        parser.error(f"--seconds: {chosen.seconds:g} must be more than 0")
    chosen.only = tuple(step for step in gpu_steps.STEPS if step in named)
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
