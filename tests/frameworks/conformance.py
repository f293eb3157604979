"""Runs PyTorch's own distributed suite with and without echo and compares, test by test.

    ci/conformance [--device cpu|cuda] [--write] [test ...]

inner      the inner backend itself, Gloo or, with --device cuda, NCCL
named      the backend name "echo" with default options
replaced   the inner backend's name, which ECHO_REPLACE lets mean echo

Fails if a test that passes on the inner backend does not pass under the name "echo", or if the sets of passing tests
differ with the name replaced; only_by_name.py lists the exceptions, one by one. --write keeps the outcomes in
ci/baseline/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from only_by_name import CALLED_CUSTOM, ONLY_BY_NAME

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VARIANTS = ("inner", "named", "replaced")

Outcomes = dict[str, list[str]]  # test: [outcome, why, seconds]


def run(variant: str, device: str, tests: list[str], timeout: float = 3000) -> Outcomes:
    """The outcomes of these tests, or of all, in a process of its own. A test that ends the run as a whole (a crash or
    the time-out, in seconds) leaves those after it without an outcome."""
    inner = "nccl" if device == "cuda" else "gloo"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    environment |= {
        "BACKEND": "echo" if variant == "named" else inner,
        "WORLD_SIZE": str(world_size(device)),
        "ECHO_LOG": "off",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    if variant == "replaced":
        environment["ECHO_REPLACE"] = inner
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, str(HERE / "torch_suite.py"), str(path), *tests]
            with subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
                try:
                    process.wait(timeout)
                except subprocess.TimeoutExpired:
                    process.terminate()
        if not path.exists():
            raise RuntimeError(f"the suite did not start:\n{log.read_text()[-4000:]}")
        return json.loads(path.read_text())


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
    if test in CALLED_CUSTOM:
        return "failed"
    return "skipped" if variant == "named" and test in ONLY_BY_NAME else "passed"


def report(found: dict[str, Outcomes], seconds: dict[str, float]) -> None:
    """Print the counts beside each other, then each test whose outcome differs."""
    print(f"{'':24}" + "".join(f"{variant:>10}" for variant in VARIANTS))
    for outcome in ("passed", "failed", "skipped"):
        counts = [Counter(entry[0] for entry in found[variant].values())[outcome] for variant in VARIANTS]
        print(f"{outcome:24}" + "".join(f"{count:>10}" for count in counts))
    print(f"{'seconds':24}" + "".join(f"{seconds[variant]:>10.0f}" for variant in VARIANTS))
    for test in found["inner"]:
        outcomes = [found[variant].get(test, ["missing", ""]) for variant in VARIANTS]
        if len({entry[0] for entry in outcomes}) > 1:
            why = next(entry[1] for entry in outcomes if entry[0] != "passed").strip().splitlines()
            line = next((line for line in why if re.match(r"\w*Error\b", line)), why[-1] if why else "")
            print(f"{test}: {', '.join(entry[0] for entry in outcomes)} ({line})")


def write(found: dict[str, Outcomes], seconds: dict[str, float], device: str) -> Path:
    import torch

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    record = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "world_size": world_size(device),
        "variants": VARIANTS,
        "seconds": {variant: round(seconds[variant]) for variant in VARIANTS},
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
    parser.add_argument("--write", action="store_true", help="keep the outcomes in ci/baseline/")
    parser.add_argument("tests", nargs="*", metavar="test")
    arguments = parser.parse_args()
    found, seconds = {}, {}
    for variant in VARIANTS:
        began = time.monotonic()
        found[variant] = run(variant, arguments.device, arguments.tests)
        seconds[variant] = time.monotonic() - began
    report(found, seconds)
    if arguments.write:
        print("written to", write(found, seconds, arguments.device))
    complaints = problems(found)
    for complaint in complaints:
        print("FAIL", complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
