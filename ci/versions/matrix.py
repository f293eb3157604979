"""The rows of ci/matrix: versions of torch that are run, and versions that are compiled against."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import headers

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "ci/baseline/matrix.json"
# What torch needs to be imported, and what builds the package.
PACKAGES = ("numpy", "filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
TOOLS = ("setuptools>=77", "wheel", "cmake", "ninja")


class Failed(Exception):
    """Why a row failed, and the end of what the command printed."""


@dataclass
class Row:
    torch: str
    python: str
    how: str  # "run", "compile" or "here"
    installed: str = ""
    build_s: float = 0
    smoke_s: float = 0
    outcome: str = ""


ROWS = (
    Row("2.13.0", "3.11", "run"),
    Row("2.14.1", "3.11", "run"),
    Row("2.14.1", "3.13", "run"),
    Row("2.13.0", "3.10", "run"),
    Row("2.9.1", "3.11", "compile"),
    Row("2.10.0", "3.11", "compile"),
    Row("2.12.1", "3.11", "compile"),
)


def find_python(minor: str) -> str:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{minor}", "python3", *map(str, sorted(pyenv.glob(f"{minor}.*/bin/python")))]
    code = "import ensurepip, sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_paths()['include'])"
    for candidate in filter(shutil.which, candidates):
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        version, _, include = done.stdout.strip().partition(" ")
        if version == minor and (Path(include) / "Python.h").exists():
            return candidate
    raise Failed(f"no Python {minor} with its headers and ensurepip on PATH or in pyenv")


def call(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Both streams of a command that must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | variables
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd or ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        raise Failed(f"{' '.join(map(str, command))}\n" + "\n".join(lines[-40:]))
    return done.stdout


def environment_of(row: Row) -> Path:
    """An environment with this torch and no other, made once. Where the index has no build without CUDA, torch comes
    without CUDA's libraries."""
    suffix = "" if row.python == "3.11" else f"-py{row.python}"
    folder = ROOT / f".venv-matrix-{row.torch}{suffix}"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        call(find_python(row.python), "-m", "venv", folder)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-qq")
        call(*pip, "--no-deps", f"torch=={row.torch}")
        call(*pip, "--no-warn-conflicts", *PACKAGES, *TOOLS)
        site = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
        call(sys.executable, ROOT / "ci/versions/cuda_stand_ins.py", site)
        (folder / "complete").touch()
    return python


def run(row: Row) -> None:
    python = environment_of(row)
    began = time.monotonic()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # Not editable: the sources keep the extension of whoever works on them.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-build-isolation", "--no-deps")
    call(*pip, "--force-reinstall", ".", PATH=path, ECHO_CUDA="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    row.build_s = time.monotonic() - began
    smoke(row, python)


def run_here(row: Row) -> None:
    """In the environment of this Python, with the torch that is there; ECHO_CUDA_ARCHS counts."""
    chosen = {name: value for name, value in os.environ.items() if name == "ECHO_CUDA_ARCHS"}
    began = time.monotonic()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-build-isolation")
    call(*pip, "--no-deps", "-e", ".", TORCH_DEVICE_BACKEND_AUTOLOAD="0", **chosen)
    row.build_s = time.monotonic() - began
    smoke(row, Path(sys.executable))
    row.outcome += "".join(f", {name}={value}" for name, value in chosen.items())


def smoke(row: Row, python: Path) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        began = time.monotonic()
        output = call(python, ROOT / "ci/versions/smoke.py", cwd=Path(elsewhere))
    row.smoke_s = time.monotonic() - began
    if "deprecated" in output:  # C++ warns on stderr
        raise Failed(output)
    summary = re.search(r"^torch (\S+), (\w+): (\d+ checks passed)", output, re.M)
    if summary is None:
        raise Failed(output)
    row.installed, row.outcome = summary[1], summary[3] if summary[2] == "cpu" else f"{summary[3]} on GPUs"


def compile_only(row: Row) -> None:
    python = find_python(row.python)
    folder = ROOT / "build/torch-headers" / row.torch
    headers.fetch(row.torch, row.python, folder)
    include = call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])").strip()
    began = time.monotonic()
    count, errors = headers.compile_all(folder, include)
    row.build_s = time.monotonic() - began
    if errors:
        raise Failed(errors)
    row.installed, row.outcome = "headers alone", f"{count} sources compile"


def chosen_rows(versions: Sequence[str], python: str | None, run_all: bool) -> list[Row]:
    rows = [row for row in ROWS if (not versions or row.torch in versions) and python in (None, row.python)]
    unknown = [version for version in versions if version not in {row.torch for row in rows}]
    rows += [Row(version, python or "3.11", "compile") for version in unknown]
    if run_all:
        for row in rows:
            row.how = "run"
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'torch':8} {'python':6} {'how':8} {'installed':16} {'build s':>7} {'smoke s':>7}  outcome"]
    for row in rows:
        smoke = f"{row.smoke_s:7.0f}" if row.smoke_s else f"{'-':>7}"
        lines.append(
            f"{row.torch:8} {row.python:6} {row.how:8} {row.installed:16} {row.build_s:7.0f} {smoke}  {row.outcome}"
        )
    return "\n".join(lines)


def record(row: Row) -> None:
    """Put this row into the record, in place of an earlier one of the same torch and Python."""
    git = ("git", "rev-parse", "--short", "HEAD")
    made = {"date": date.today().isoformat(), "commit": call(*git).strip(), "cores": len(os.sched_getaffinity(0))}
    known = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    rows = [other for other in known if (other["torch"], other["python"]) != (row.torch, row.python)]
    rows.append(asdict(row) | {"build_s": round(row.build_s), "smoke_s": round(row.smoke_s)} | made)
    facts = {
        "what": "ci/matrix: built and run on two ranks of the CPU, or compiled against the headers of the version",
        "repeat_with": "ci/matrix --record",
        "rows": sorted(rows, key=lambda row: [int(part) for part in f"{row['torch']}.{row['python']}".split(".")]),
    }
    RECORD.write_text(json.dumps(facts, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/matrix")
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--python", help="only the rows of this Python, as 3.11")
    parser.add_argument("--run", action="store_true", help="build and run the rows that are compiled otherwise")
    parser.add_argument("--here", action="store_true", help="one row: this environment, with its torch")
    parser.add_argument("--record", action="store_true", help="write the rows into ci/baseline/matrix.json")
    arguments = parser.parse_args()
    if arguments.here:
        rows = [Row(version("torch").partition("+")[0], ".".join(map(str, sys.version_info[:2])), "here")]
    else:
        rows = chosen_rows(arguments.versions, arguments.python, arguments.run)
    attempts = {"run": run, "compile": compile_only, "here": run_here}
    failed = 0
    for row in rows:
        print(f"== torch {row.torch}, Python {row.python}: {row.how}", flush=True)
        try:
            attempts[row.how](row)
        except (Failed, headers.NoHeaders) as error:
            failed += 1
            row.outcome = "FAILED"
            print(error, flush=True)
        if arguments.record:  # each at once, so that a run that is cut short has said what it knows
            record(row)
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
