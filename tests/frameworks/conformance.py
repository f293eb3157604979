"""Runs PyTorch's own distributed suite with and without echo and compares, test by test.

    ci/conformance [--device cpu|cuda] [--jobs N] [--seconds S] [--keep FOLDER] [--write] [test ...]

inner      the inner backend itself, Gloo or, with --device cuda, NCCL
named      the backend name "echo" with default options
replaced   the inner backend's name, which ECHO_REPLACE lets mean echo

Fails if a test that passes on the inner backend does not pass under the name "echo", or if the sets of passing tests
differ with the name replaced; only_by_name.py lists the exceptions, one by one. --write keeps the outcomes in
ci/baseline/. A run that --seconds ended goes on where it was when it is started again with the same --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from only_by_name import CALLED_CUSTOM, ONLY_BY_NAME, PROFILED_AS_INNER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VARIANTS = ("inner", "named", "replaced")

Outcomes = dict[str, list[Any]]  # test: [outcome, why, seconds]


def run(variants: Sequence[str], device: str, tests: list[str], folder: Path, jobs: int, seconds: float) -> bool:
    """Bring the outcomes of these tests, or of all, into the folder, but for those that are there; False if that took
    longer than `seconds`. With as many jobs as variants, all variants run side by side, several processes each."""
    deadline = time.monotonic() + seconds
    for together in [list(variants)] if jobs >= len(variants) else [[variant] for variant in variants]:
        with tempfile.TemporaryDirectory() as claims:
            started = []
            for variant in together:
                share = Path(claims) / variant
                share.mkdir()
                for test in outcomes(folder, variant):
                    (share / test).touch()
                started += [start(variant, device, tests, folder, share) for _ in range(max(1, jobs // len(together)))]
            try:
                for process in started:
                    process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
            finally:
                for process in started:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)  # the ranks of an unfinished test, too
                        process.wait()
        for variant in together:
            if not outcomes(folder, variant):
                raise RuntimeError(f"the suite did not start:\n{(folder / f'{variant}.log').read_text()[-4000:]}")
    return True


def start(variant: str, device: str, tests: list[str], folder: Path, claims: Path) -> subprocess.Popen[bytes]:
    """A process that runs the tests that nobody has claimed."""
    inner = "nccl" if device == "cuda" else "gloo"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    environment |= {
        "BACKEND": "echo" if variant == "named" else inner,
        "WORLD_SIZE": str(world_size(device)),
        # With another one the suite skips a test that makes the default group anew; each test has a file of its own.
        "INIT_METHOD": "file://",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",  # seconds for a test that hangs, not 300
        "ECHO_LOG": "off",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    if device == "cpu":
        # With GPUs the suite skips every test that has more ranks than there are of them.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # The usual question whether there are GPUs starts CUDA, and the ranks are forked from a process that asked.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if variant == "replaced":
        environment["ECHO_REPLACE"] = inner
    command = [sys.executable, str(HERE / "torch_suite.py"), str(folder / f"{variant}.jsonl"), str(claims), *tests]
    with (folder / f"{variant}.log").open("a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def outcomes(folder: Path, variant: str) -> Outcomes:
    """What is known so far."""
    path = folder / f"{variant}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {test: entry for test, *entry in map(json.loads, lines)}


def world_size(device: str) -> int:
    """Three ranks; the suite gives each a GPU of its own if the machine has any."""
    if device != "cuda":
        return 3
    import torch

    return min(3, torch.cuda.device_count())


def problems(found: dict[str, Outcomes]) -> list[str]:
    """What breaks the promise, one line per test."""
    complaints = []
    for test, (outcome, *_) in found["inner"].items():
        for variant in ("named", "replaced"):
            expected = expected_outcome(test, variant) if outcome == "passed" else None
            got, why = found[variant].get(test, ["missing", ""])[:2]
            as_expected = got == expected if expected else got != "passed" or variant == "named"
            if not as_expected:
                complaints.append(f"{test}: {outcome} on the inner backend, {variant} {got}: {why}")
    return complaints


def expected_outcome(test: str, variant: str) -> str:
    """What a test that passes on the inner backend must come to."""
    if test in CALLED_CUSTOM or (variant == "named" and test in PROFILED_AS_INNER):
        return "failed"
    return "skipped" if variant == "named" and test in ONLY_BY_NAME else "passed"


def seconds_of(found: dict[str, Outcomes]) -> dict[str, int]:
    """Of all tests of a variant, one after the other."""
    return {variant: round(sum(entry[2] for entry in found[variant].values())) for variant in VARIANTS}


def report(found: dict[str, Outcomes]) -> None:
    """Print the counts beside each other, then the slowest tests and each whose outcome differs."""
    print(f"{'':24}" + "".join(f"{variant:>10}" for variant in VARIANTS))
    for outcome in ("passed", "failed", "skipped"):
        counts = [Counter(entry[0] for entry in found[variant].values())[outcome] for variant in VARIANTS]
        print(f"{outcome:24}" + "".join(f"{count:>10}" for count in counts))
    print(f"{'seconds':24}" + "".join(f"{count:>10}" for count in seconds_of(found).values()))
    spent = {test: [found[variant].get(test, [0] * 3)[2] for variant in VARIANTS] for test in found["inner"]}
    for test in sorted(spent, key=lambda test: -sum(spent[test]))[:5]:
        print(f"{test}: {', '.join(map(str, spent[test]))} s")
    for test in found["inner"]:
        outcomes = [found[variant].get(test, ["missing", ""]) for variant in VARIANTS]
        if len({entry[0] for entry in outcomes}) > 1:
            why = next(entry[1] for entry in outcomes if entry[0] != "passed").strip().splitlines()
            line = next((line for line in why if re.match(r"\w*Error\b", line)), why[-1] if why else "")
            print(f"{test}: {', '.join(entry[0] for entry in outcomes)} ({line})")


def write(found: dict[str, Outcomes], device: str) -> Path:
    import torch

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    record = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "world_size": world_size(device),
        "variants": VARIANTS,
        "seconds": seconds_of(found),
        "counts": {variant: Counter(entry[0] for entry in found[variant].values()) for variant in VARIANTS},
    }
    lines = [
        f"  {json.dumps(test)}: {json.dumps([found[variant].get(test, ['missing'])[0] for variant in VARIANTS])}"
        for test in sorted(found["inner"])
    ]
    path = ROOT / "ci" / "baseline" / f"conformance_{device}.json"
    path.write_text(json.dumps(record, indent=1)[:-2] + ',\n "tests": {\n' + ",\n".join(lines) + "\n }\n}\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each runs the ranks of one test at a time")
    parser.add_argument("--seconds", type=float, default=3000, help="limit for the whole run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="collect outcomes here; do not repeat those there")
    parser.add_argument("--write", action="store_true", help="keep the outcomes in ci/baseline/")
    parser.add_argument("tests", nargs="*", metavar="test")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = run(VARIANTS, arguments.device, arguments.tests, folder, arguments.jobs, arguments.seconds)
        found = {variant: outcomes(folder, variant) for variant in VARIANTS}
    report(found)
    if not done:
        print(f"not finished within {arguments.seconds:.0f} s")
        return 1
    if arguments.write:
        print("written to", write(found, arguments.device))
    complaints = problems(found)
    for complaint in complaints:
        print("FAIL", complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
