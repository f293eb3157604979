"""The checks of each step, and what is read from their output."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import build_cpp
from gpu_record import NOT_RUN, ROOT, Check

BUILD = ROOT / "build/gpu"
STEPS = ("build", "cpp", "python", "sanitize", "bench")
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
# Kernels run far slower under the tools, hence few plans. A peer's kernel waits for kernels of other streams of the
# same process, and its waits end after 20 s if a tool lets only one run at a time, so that a check ends in any case.
_SMALL = {
    "cuda_exit_test": ["1"],
    "cuda_stages_test": ["12", "1", "1021"],
    "cuda_peer_test": ["16", "1", "1021", "write_the_same_bytes"],
}
_SANITIZE_LIMIT_S = 120
_FOUND_ERRORS = 99
# These take longest, and are looked at last.
_LONG = ("test_cuda_faults_campaign.py", "test_cuda_soak.py")
_REDUCED = ["--sizes", "64KiB,1MiB,64MiB,1GiB", "--rows", "two8,two4,echo8,echo4,local1,default"]
_REDUCED += ["--warmup", "10", "--iterations", "40"]
_WIRE = ["--sizes", "64MiB,1GiB", "--rows", "wire8,wire4,wire-local1", "--warmup", "5", "--iterations", "20"]
# One row, and few iterations: sockets carry every byte through the hosts' memory several times.
_SOCKETS = ["--sizes", "1GiB", "--rows", "wire4", "--warmup", "2", "--iterations", "8"]


@dataclass(frozen=True)
class Machine:
    """What the steps have to know of it."""

    gpus: int
    arch: str  # of the GPUs, as nvcc names it
    nvcc: str | None


def tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit is: on PATH, in CUDA_HOME, or in the usual folder."""
    folders = [os.environ[home] for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)] + ["/usr/local/cuda"]
    places = [f"{folder}/{part}" for folder in folders for part in ("bin", name)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def lack(name: str, path: str | None) -> str:
    return "" if path else f"{name} is missing: it is in neither PATH nor CUDA_HOME nor /usr/local/cuda"


def checks(step: str, machine: Machine, full: bool, results: Path) -> list[list[Check]]:
    """Of a step: lists of checks that may run at the same time."""
    if step == "build":
        return _build(machine)
    made = {
        "cpp": lambda: _cpp(),
        "python": lambda: _python(machine),
        "sanitize": lambda: _sanitize(),
        "bench": lambda: _bench(machine, full, results),
    }[step]()
    return [[check] for check in made]


def _build(machine: Machine) -> list[list[Check]]:
    python = sys.executable
    missing = lack("nvcc", machine.nvcc)
    script = str(ROOT / "ci/gpu_checks/build_cpp.py")
    install = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
    return [
        [
            Check(
                "build",
                "C++ tests",
                [python, script, str(machine.nvcc), machine.arch, str(BUILD)],
                400,
                missing=missing,
            ),
            Check("build", "package", install, 400, missing=missing),
        ],
        [Check("build", "doctor", [python, "-m", "echo_pg", "doctor"], 60)],
    ]


def _cpp() -> list[Check]:
    return [Check("cpp", test, [str(BUILD / test)], 200, missing=_unbuilt(test)) for test in build_cpp.TESTS]


def _unbuilt(test: str) -> str:
    return "" if (BUILD / test).exists() else f"{BUILD / test} is missing: step build makes it"


def _python(machine: Machine) -> list[Check]:
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda path: (path.name in _LONG, path.name))
    pytest = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider"]
    made = [
        Check("python", f"tests/gpu/{file.name}", [*pytest, str(file.relative_to(ROOT))], 300, read=read_pytest)
        for file in files
    ]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(min(2, machine.gpus))]
    return [*made, Check("python", "doctor of all ranks", [*run, "-m", "echo_pg", "doctor"], 60)]


def _sanitize() -> list[Check]:
    path = tool("compute-sanitizer")
    made = []
    for test, arguments in _SMALL.items():
        for name in TOOLS:
            # Calls of CUDA that fail on purpose, as questions, are no findings: the tests check every call.
            options = ["--tool", name, "--error-exitcode", str(_FOUND_ERRORS), "--print-limit", "20"]
            options += ["--report-api-errors", "no"] if name == "memcheck" else []
            command = [str(path), *options, str(BUILD / test), *arguments]
            made.append(
                Check(
                    "sanitize",
                    f"{name} of {test}",
                    command,
                    _SANITIZE_LIMIT_S,
                    missing=lack("compute-sanitizer", path) or _unbuilt(test),
                    read=read_sanitizer,
                )
            )
    return made


def _bench(machine: Machine, full: bool, results: Path) -> list[Check]:
    """Each writes its records into a folder of its own, which `collect` empties."""
    kinds: dict[str, tuple[list[str], dict[str, str], float]] = {
        ("allreduce" if full else "allreduce_reduced"): ([] if full else _REDUCED, {}, 900 if full else 240),
        "wire": (_WIRE, {"NCCL_P2P_DISABLE": "1"}, 180),
        "sockets": (_SOCKETS, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, 180),
    }
    impossible = "" if machine.gpus > 1 else f"needs two GPUs, {machine.gpus} found"
    bench = [sys.executable, "-m", "echo_pg", "bench", "allreduce", "--device", "cuda"]
    return [
        Check(
            "bench",
            name,
            [*bench, *arguments, "--out", str(results / name)],
            limit_s,
            impossible=impossible,
            variables=variables,
        )
        for name, (arguments, variables, limit_s) in kinds.items()
    ]


def collect(results: Path, out: Path, machine: str, complete: bool) -> list[Path]:
    """Moves the records that benchmarks have left in `results` to out/bench_NAME_MACHINE.jsonl, those of one that was
    ended to a file of their own, so that they replace no whole ones."""
    moved = []
    for path in sorted(results.glob("*/*.jsonl")):
        target = out / f"bench_{path.parent.name}_{machine}{'' if complete else '_unfinished'}.jsonl"
        shutil.move(path, target)
        moved.append(target)
    return moved


def skip_after(check: Check, ended: Sequence[Check]) -> Check:
    """The check, impossible if another tool did not get through the same program in time: nor will this one."""
    same = [
        other.name for other in ended if check.step == "sanitize" and other.name.split()[-1] == check.name.split()[-1]
    ]
    return replace(check, impossible=f"{same[0]} did not end in time") if same else check


def read_pytest(code: int, output: str) -> tuple[str, dict[str, Any]]:
    """Of `pytest -v`: what tests/gpu/conftest.py prints are properties, named like the numbers they hold."""
    seen = re.findall(r"^(?:tests/)?\S+?::(\S+) .*?(PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE)
    names: dict[str, list[str]] = {}
    for name, outcome in seen:
        names.setdefault(outcome, []).append(name)
    failed = names.get("FAILED", []) + names.get("ERROR", [])
    begun = re.findall(r"::(\S+) *$", output[output.rfind("\n") + 1 :])
    found: dict[str, Any] = {"passed": len(names.get("PASSED", [])), "failed": len(failed)}
    found["skipped"] = len(names.get("SKIPPED", []))
    found |= {
        "properties": {name: float(value) for name, value in re.findall(r"^property (\w+) = (\S+)$", output, re.M)}
    }
    found |= {"names_of_skipped": names.get("SKIPPED", []), "under_way": begun}
    if failed:
        return "failed: " + ", ".join(failed), found
    if code == 0 and found["passed"]:
        return "", found
    if code == 0 and found["skipped"]:
        return "every test was skipped", found | {"outcome": NOT_RUN}
    return f"exit code {code}, {len(seen)} tests seen", found


def read_sanitizer(code: int, output: str) -> tuple[str, dict[str, Any]]:
    """Of compute-sanitizer: without its summary it has not looked at the program to its end."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output) or re.search(
        r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error", output
    )
    if summary is None:
        return f"exit code {code}, no summary", {}
    errors = int(summary[1])
    if errors:
        first = re.search(r"^=+ ((?!COMPUTE-SANITIZER|ERROR SUMMARY).+)$", output, re.MULTILINE)
        return f"{errors} findings, the first: {first[1].strip() if first else '?'}", {"errors": errors}
    return ("" if code == 0 else f"no findings, but exit code {code}: the test itself failed"), {"errors": 0}
