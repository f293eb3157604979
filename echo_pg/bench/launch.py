"""Starts the ranks of a benchmark as processes of this host. Whatever happens, none outlives the call."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .. import build, options
from . import results

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


def require(transformers: bool = False) -> None:
    """Raises ValueError or ImportError for what no row can be measured with or without."""
    if options.is_off():
        raise ValueError("ECHO_OFF=1 is set: every row would be exact")
    build.extension()
    if transformers and importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is missing. Get it with: pip install 'echo-pg[examples]'")


def gpus() -> int:
    """Their number. Raises ValueError if torch sees none."""
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ValueError("--device cuda: torch sees no GPU")
    return found


def run_sizes(
    bench: str,
    function: Callable[..., None],
    sizes: Iterable[int],
    launched: tuple[int, int, int] | None,
    path: Path,
    *args: Any,
    show: Callable[[list[results.Record], Path, Path], int],
) -> int:
    """function(rank, size, store_path, *args) in processes of this host, with each number of ranks; where torchrun has
    launched this process as (rank, size, local rank), function(rank, size, None, *args, local rank) once. Then the
    first rank's show(all records of `path`, path, its folder). The command's exit code, as `report` gives it."""
    options.set_unless_given("ECHO_LOG", "off")  # the table says what was quantized
    for size in sizes if launched is None else (launched[1],):
        if launched is None:
            call = functools.partial(run_ranks, function, size, *args)
        else:
            call = functools.partial(function, launched[0], size, None, *args, launched[2])
        if code := report(bench, size, path, call):
            return code
    return show(results.read(path, bench), path, path.parent) if launched is None or launched[0] == 0 else 0


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
