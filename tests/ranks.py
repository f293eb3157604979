"""Runs a function on several ranks, one process each, for tests that need a real group.

A process starts from a server that has torch imported already, so a group of two costs a fraction of a second, not two
imports. Whatever happens, no process outlives the call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankError(Exception):
    """What went wrong on one rank: the text of its traceback, or how its process ended."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = "gloo",
    pg_options: Any = None,
    group_timeout: float = 30,
    env: dict[str, str] | None = None,
    check: bool = True,
) -> list[Any]:
    """Call function(rank, world_size, *args) on `world_size` processes and return what each returned.

    The function must be importable, and what goes in and out must be picklable. `backend` names the default group that
    is made first, with `group_timeout` seconds; None makes none. `env` is set before torch.distributed is used. After
    `timeout` seconds all processes are killed. A rank that fails is a RankError: raised with all others, or, with
    check=False, an entry of the list.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        setup = (backend, pg_options, str(Path(folder) / "store"), group_timeout, env or {})
        processes, pipes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(theirs, function, rank, world_size, args, setup), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
                process.join()
    outcomes = [
        RankError(f"ended with exit code {process.exitcode} and no result") if outcome is None else outcome
        for process, outcome in zip(processes, outcomes, strict=True)
    ]
    results = [outcome[0] if isinstance(outcome, tuple) else outcome for outcome in outcomes]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, RankError)]
    if check and failures:
        raise RankError("\n".join(failures))
    return results


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """Per rank a tuple of its result, a RankError, or None where the process ended or was still running."""
    outcomes: list[Any] = [None] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=remaining):
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
            with contextlib.suppress(EOFError):
                outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
    for rank in open_pipes.values():
        outcomes[rank] = RankError("did not finish in time")
    return outcomes


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    setup: tuple[Any, ...],
) -> None:
    backend, pg_options, store_path, group_timeout, env = setup
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                store=dist.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout),
                pg_options=pg_options,
            )
        outcome: Any = (function(rank, world_size, *args),)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        outcome = RankError(traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
