"""Starts the ranks of a benchmark as processes of this host. Whatever happens, none outlives the call."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .. import options

# How long other ranks may take to say what they saw of a failure: the first report is often only "the peer is gone".
_GRACE_S = 3.0


class RankError(Exception):
    """Why a rank ended: its traceback, or how its process died."""


def report(bench: str, size: int, path: Path, run: Callable[[], None]) -> int:
    """Call `run`: 0 if it returned, 1 if a rank failed and 130 if it was interrupted, which stderr then says; `path`
    has the records so far."""
    try:
        run()
    except RankError as error:
        print(f"\nbench {bench} failed with {size} ranks:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    return 0


def run_ranks(function: Callable[..., None], size: int, *args: Any) -> None:
    """Call function(rank, size, store_path, *args) in `size` processes; returns when all have returned.

    `function` must be importable and `args` picklable; `store_path` is where they may meet in a FileStore. The first
    rank that raises or dies ends the others, and RankError tells what each of the failed ones said.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="echo-bench-") as folder:
        processes, pipes, leashes = [], [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            held, leash = context.Pipe(duplex=False)
            call = (theirs, held, function, rank, size, str(Path(folder) / "store"), args)
            process = context.Process(target=_serve, args=call, daemon=True)
            process.start()
            theirs.close()
            held.close()
            processes.append(process)
            pipes.append(ours)
            leashes.append(leash)
        try:
            failures = _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in (*pipes, *leashes):
                end.close()
    if failures:
        said: dict[str, list[str]] = {}
        for rank, text in sorted(failures.items()):
            died = f"ended with exit code {processes[rank].exitcode} and said nothing"
            said.setdefault(text or died, []).append(str(rank))
        raise RankError("\n".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items()))


def _collect(pipes: list[Connection]) -> dict[int, str]:
    """Per failed rank its text, empty if it died; soon after the first failure those that still run are left out."""
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                text = pipe.recv()
            except EOFError:
                text = ""
            if text is not None:
                failures[rank] = text
                deadline = deadline or time.monotonic() + _GRACE_S
    return failures


def _serve(
    pipe: Connection,
    leash: Connection,
    function: Callable[..., None],
    rank: int,
    size: int,
    store_path: str,
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_follow, args=(leash,), daemon=True).start()
    options.set_unless_given("GLOO_SOCKET_IFNAME", "lo")
    try:
        function(rank, size, store_path, *args)
        outcome = None
    except BaseException:
        outcome = traceback.format_exc()
    pipe.send(outcome)
    pipe.close()


def _follow(leash: Connection) -> None:
    """Ends this process when the one that started it is gone, even if that was killed."""
    try:
        leash.recv()
    except EOFError:
        os._exit(1)
