"""House rules that a script can check: which folder may include what, who reads the environment, how long files are,
and where links lead (markdown_rules.py).

Prints each breach as path:line: rule and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import markdown_rules

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
CODE = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".py"}


class Rule(NamedTuple):
    what: str  # said to whoever breaks it
    files: str  # regular expression on the path
    banned: str  # regular expression on a line
    allowed: str = r"$^"  # paths that may do it all the same


RULES = [
    Rule("core/ knows no torch and no CUDA runtime", r"^backend/core/", r'#include\s*[<"](torch|ATen|c10|cuda|Python)'),
    Rule("cpu/ knows no torch", r"^backend/cpu/", r'#include\s*[<"](torch|ATen|c10|cuda|Python)'),
    Rule("kernels know no torch", r"^backend/cuda/.*\.cuh?$", r'#include\s*[<"](torch|ATen|c10)'),
    Rule(
        "core/ depends on nothing of ours",
        r"^backend/core/",
        r'#include\s*"(\.\./)?(cpu|cuda|wire|pg)/',
    ),
    Rule("cpu/ and cuda/ depend on core/ alone", r"^backend/(cpu|cuda)/", r'#include\s*"(\.\./)?(wire|pg)/'),
    Rule("wire/ does not depend on pg/", r"^backend/wire/", r'#include\s*"(\.\./)?pg/'),
    Rule("pybind11 stays in pg/", r"^backend/(core|cpu|cuda|wire)/", r"pybind11"),
    Rule(
        "wire/ knows Backend, Work and their types alone of c10d",
        r"^backend/wire/",
        r"#include\s*<torch/csrc/distributed/c10d/(?!Backend|Work|Types)",
    ),
    Rule(
        "inline assembly stays in ptx.cuh, float_environment.h and peer_wait.cpp",
        r"^backend/",
        r"\basm\b|__asm__",
        r"(ptx\.cuh|float_environment\.h|peer_wait\.cpp)$",
    ),
    Rule("C++ reads no environment variable", r"^backend/", r"\bgetenv\b"),
    Rule("C++ loads no library and runs no program", r"^backend/", r"\b(dlopen|popen|system|execl\w*|execv\w*)\s*\("),
    Rule(
        "nothing is unpickled or evaluated",
        r"^echo_pg/(?!bench/)",
        r"\b(pickle|marshal|shelve)\b|(?<![\w.])(eval|exec)\(",
    ),
    Rule(
        "options.py alone reads the environment",
        r"^echo_pg/",
        r"os\.environ|os\.getenv",
        r"^echo_pg/options\.py$",
    ),
    Rule("no fast-math", r"^(backend|setup\.py)", r"use_fast_math|(?<!-fno)-ffast-math|(?<!no)-Ofast"),
    Rule(
        "no exit, no printf in the library",
        r"^backend/",
        r"\b(std::(exit|abort|printf)|_exit|printf)\s*\(",
        r"^backend/pg/testing_bindings\.cpp$",  # where tests end a rank
    ),
    Rule(
        "nothing is left for later",
        r"^(backend|echo_pg|tests|examples|ci)/",
        r"\b(TODO|FIXME|XXX)\b",
        r"^ci/rules\.py$",
    ),
]


def tracked_files() -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in out.stdout.split("\n") if name and (ROOT / name).is_file()]


def breaches(name: str) -> list[str]:
    path = ROOT / name
    if path.suffix not in CODE:
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    if len(lines) > MAX_LINES:
        found.append(f"{name}:{len(lines)}: a file has at most {MAX_LINES} lines")
    for rule in RULES:
        if not re.search(rule.files, name) or re.search(rule.allowed, name):
            continue
        for number, line in enumerate(lines, 1):
            if re.search(rule.banned, line):
                found.append(f"{name}:{number}: {rule.what}")
    return found


def main() -> int:
    tracked = tracked_files()
    found = [breach for name in tracked for breach in breaches(name)]
    for name in tracked:
        if name.endswith(".md"):
            found += markdown_rules.breaches(name, lambda path: (ROOT / path).read_text(encoding="utf-8"), tracked)
    for breach in found:
        print(breach)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
