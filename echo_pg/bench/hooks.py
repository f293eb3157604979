"""The command `python -m echo_pg bench hooks`: what telling passes apart costs in a training step of a small
tensor-parallel transformer, whose steps are short and many-moduled.

Steps with hooks and without are compared in groups without feedback. With feedback they would not do the same work:
where nothing tells passes apart all sums belong to one pass without end, whose states another code reads and writes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .. import build, options, passes
from . import launch, results

# What a turn measures, a step of each, in an order that rotates. The second one without hooks shows what differs by
# chance.
_ARMS = ("without", "hooks", "without again")
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_WHAT = (
    "2 layers of width 64, batch 8 x 64 bytes, 2 ranks, every sum quantized, feedback off; a turn is one step of each "
    "kind, wall and CPU time of rank 0; difference: median over turns of that to the step without hooks, with its 95 % "
    "interval, in per cent of the median step without"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Training steps with and without hooks on modules and autograd, in turns; 2 ranks on CPU."
    parser.add_argument("--turns", type=int, default=300, help="of a step each way; default 300")
    parser.add_argument("--out", type=Path, help="a file for the record, as one line of JSON; it is replaced")


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank failed, 2 for arguments that make no sense."""
    if not 1 <= chosen.turns <= 10_000:
        print(f"bench hooks: --turns {chosen.turns} must be from 1 to 10000", file=sys.stderr)
        return 2
    options.set_unless_given("ECHO_LOG", "off")
    try:
        launch.run_ranks(_run_rank, 2, chosen.turns, str(chosen.out or ""))
    except launch.RankError as error:
        print(f"bench hooks failed:\n{error}", file=sys.stderr)
        return 1
    return 0


def _run_rank(rank: int, size: int, store_path: str, turns: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    from . import transformer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    # Policy all: the same calls are quantized with hooks and without.
    group = dist.new_group(backend="echo", pg_options=options.Options(policy="all", feedback=False, min_bytes=0))
    model = transformer.make(transformer.mesh_over(group, torch.device("cpu")))
    optimizer = transformer.MasterAdamW(model, 1e-3)
    batches = transformer.batches(transformer.text(), 8, 64)
    extension = build.extension()
    seconds: dict[str, dict[str, list[float]]] = {clock: {arm: [] for arm in _ARMS} for clock in _CLOCKS}
    for turn in range(turns + 2):  # the first two are not counted
        first = turn % len(_ARMS)
        for arm in _ARMS[first:] + _ARMS[:first]:
            passes.install(extension) if arm == "hooks" else passes.uninstall(extension)
            batch = next(batches)
            transformer.loss_of(model, *batch)  # after their installation hooks look for output layers, once
            dist.barrier()
            began = {clock: read() for clock, read in _CLOCKS.items()}
            transformer.loss_of(model, *batch).backward()
            optimizer.step()
            taken = {clock: read() - began[clock] for clock, read in _CLOCKS.items()}
            for clock in _CLOCKS if turn > 1 else ():
                seconds[clock][arm].append(taken[clock])
    calls = _module_calls(model, batch)
    if rank == 0:
        made = results.circumstances("cpu", 1) | {"bench": "hooks", "repeat_with": _command(turns), "what": _WHAT}
        made |= _summary(seconds, calls, _hook_seconds(calls))
        print(_said(made))
        if out:
            Path(out).write_text(json.dumps(made) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _command(turns: int) -> str:
    return f"python -m echo_pg bench hooks --turns {turns}"


def _summary(seconds: dict[str, dict[str, list[float]]], calls: int, alone: float) -> dict[str, Any]:
    made: dict[str, Any] = {"ranks": 2, "turns": len(seconds["wall"]["without"]), "module_calls": calls}
    for clock, by_arm in seconds.items():
        step = statistics.median(by_arm["without"])
        made[f"step_{clock}_ms"] = step * 1e3
        for name, arm in (("difference", "hooks"), ("by_chance", "without again")):
            differences = [x - y for x, y in zip(by_arm[arm], by_arm["without"], strict=True)]
            made[f"{name}_{clock}_percent"] = 100 * statistics.median(differences) / step
            made[f"{name}_{clock}_interval_percent"] = [100 * end / step for end in median_interval(differences)]
    made["hooks_alone_us"] = alone * 1e6
    made["hooks_alone_percent"] = 100 * alone / statistics.median(seconds["wall"]["without"])
    return made


def median_interval(values: list[float]) -> tuple[float, float]:
    """Two of the values, between which the median of what they are drawn from lies with some 95 % (of few values, less:
    then it is their range)."""
    ordered, count = sorted(values), len(values)
    below = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return ordered[below], ordered[count - 1 - below]


def _said(made: dict[str, Any]) -> str:
    lines = [
        f"{made['module_calls']} module calls a step of {made['step_wall_ms']:.3f} ms without hooks; "
        f"{made['turns']} turns",
        f"hooks alone: {made['hooks_alone_us']:.1f} us a step, {made['hooks_alone_percent']:.2f} %",
    ]
    for clock in _CLOCKS:
        for name, title in (("difference", "with hooks"), ("by_chance", "without, measured again")):
            low, high = made[f"{name}_{clock}_interval_percent"]
            percent = made[f"{name}_{clock}_percent"]
            lines.append(f"{clock} time of steps {title}: {percent:+.2f} % (95 %: {low:+.2f} to {high:+.2f})")
    return "\n".join(lines)


def _module_calls(model: object, batch: tuple[object, object]) -> int:
    from torch.nn.modules.module import register_module_forward_pre_hook

    from . import transformer

    calls = []
    handle = register_module_forward_pre_hook(lambda module, _: calls.append(1))
    transformer.loss_of(model, *batch)  # type: ignore[arg-type]
    handle.remove()
    return len(calls)


def _hook_seconds(calls: int) -> float:
    """Of so many module calls and one backward run: the difference between two loops over a module that does nothing,
    which is far less noisy than that between two steps."""
    import torch

    extension = build.extension()
    children = torch.nn.ModuleList([torch.nn.Identity() for _ in range(calls - 1)])

    class Loop(torch.nn.Module):
        def forward(self, x: object) -> object:
            for child in children:
                child(x)
            return x

    leaf = torch.ones(1, requires_grad=True)

    def seconds() -> float:
        loop, taken = Loop(), []
        for _ in range(300):
            began = time.perf_counter()
            loop(0)
            leaf.backward()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    passes.uninstall(extension)
    without = seconds()
    passes.install(extension)
    return seconds() - without
