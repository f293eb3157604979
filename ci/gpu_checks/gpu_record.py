"""Runs checks one after the other within a limit of time, says at once what each found and writes it down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # where every program runs
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
# A check that could not even start a process in this time is not tried.
LEAST_S = 10.0
_GRACE_S = 5.0  # from the request to end to the end by force
_live: set[int] = set()  # process groups of programs that run now


def exit_code(code: int, _: str) -> tuple[str, dict[str, Any]]:
    """What a check found if its program tells by its exit code alone."""
    return ("" if code == 0 else f"exit code {code}"), {}


@dataclass(frozen=True)
class Check:
    """One program that is run, and what is made of it.

    limit_s: seconds after which it is ended. missing: what it needs and this machine lacks, if anything; impossible:
    why this machine cannot run it whatever is installed. variables: beside this environment's. read: (exit code,
    output) -> (why it failed or empty, what else is recorded, an outcome of its own among it).
    """

    step: str
    name: str
    command: Sequence[str]
    limit_s: float
    missing: str = ""
    impossible: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    read: Callable[[int, str], tuple[str, dict[str, Any]]] = exit_code


def run(command: Sequence[str], limit_s: float, variables: dict[str, str]) -> tuple[int | None, str]:
    """(exit code, output); None for the code of a program that was ended at its limit. Output is shown as it comes.
    Neither the program nor its children outlive the call."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | variables
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    _live.add(process.pid)
    lines: list[str] = []

    def show() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    code: int | None = None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        _end(process.pid, signal.SIGKILL)
        process.wait()
        _live.discard(process.pid)
        reader.join(_GRACE_S)
    return code, "".join(lines)


def _end(group: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, how)


def end_all() -> None:
    """Ends what runs now, in whatever thread."""
    for group in tuple(_live):
        _end(group, signal.SIGKILL)


class Report:
    """The records of a run, in `path`: a line per check, the newest of each."""

    def __init__(self, path: Path, logs: Path, common: dict[str, Any], seconds: float) -> None:
        self.path, self.logs, self.common = path, logs, common
        self.began, self.seconds = time.monotonic(), seconds
        self.made: list[dict[str, Any]] = []

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def all_passed(self) -> bool:
        return bool(self.made) and all(record["outcome"] == PASSED for record in self.made)

    def together(self, checks: Sequence[Check]) -> None:
        """Checks that run at the same time."""
        with ThreadPoolExecutor(len(checks)) as pool:
            found = list(pool.map(self._run, checks))
        for record, output in found:
            self._note(record, output)

    def _run(self, check: Check) -> tuple[dict[str, Any], str]:
        start, output, more = time.monotonic(), "", {}
        limit_s = min(check.limit_s, self.left())
        if check.missing:
            outcome, why = FAILED, check.missing
        elif check.impossible:
            outcome, why = NOT_RUN, check.impossible
        elif limit_s < min(LEAST_S, check.limit_s):
            outcome, why = NOT_RUN, f"{max(0.0, self.left()):.0f} s of {self.seconds:.0f} were left"
        else:
            print(f"\n== {check.step}: {check.name} (at most {limit_s:.0f} s)", flush=True)
            try:
                code, output = run(check.command, limit_s, check.variables)
            except OSError as error:
                code, why = None, f"could not be started: {error}"
            else:
                why, more = check.read(-1 if code is None else code, output)
                why = f"ended after {limit_s:.0f} s" if code is None else why
            outcome = more.pop("outcome", FAILED if code is None or why else PASSED)
        record = {"step": check.step, "check": check.name, "outcome": outcome, "why": why} | more
        record |= {"seconds": round(time.monotonic() - start, 1), "command": " ".join(_shown(check))}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return record | {"date": now} | self.common, output

    def _note(self, record: dict[str, Any], output: str) -> None:
        self.made.append(record)
        print(f"-- {line(record)}", flush=True)
        if output and record["outcome"] != PASSED:
            self.logs.mkdir(parents=True, exist_ok=True)
            log = self.logs / (f"{record['step']} {record['check']}".replace(" ", "_").replace("/", "_") + ".log")
            log.write_text(output)
            print(f"   its output: {log}", flush=True)
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        known = self.path.read_text().splitlines() if self.path.exists() else []
        same = {name: record[name] for name in ("step", "check")}
        kept = [text for text in known if not same.items() <= json.loads(text).items()]
        # Whole or not at all: the time limit may end the process here.
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{text}\n" for text in (*kept, json.dumps(record))))
        new.replace(self.path)


def line(record: dict[str, Any]) -> str:
    """A record in a line."""
    counted = ", ".join(
        f"{record[name]} {name}" for name in ("passed", "failed", "skipped", "errors") if name in record
    )
    why = f": {record['why']}" if record["why"] else ""
    return f"{record['outcome']}: {record['step']}, {record['check']} ({record['seconds']} s){why}" + (
        f" [{counted}]" if counted else ""
    )


def _shown(check: Check) -> list[str]:
    """The command as somebody else would type it, in the root of the sources."""
    elsewhere = {sys.executable: "python", str(ROOT): "."}
    parts = [elsewhere.get(part, part.replace(f"{ROOT}/", "")) for part in check.command]
    return [*(f"{name}={value}" for name, value in check.variables.items()), *parts]
