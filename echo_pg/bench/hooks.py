"""The command `python -m echo_pg bench hooks`: what telling passes apart costs in a training step of a small
tensor-parallel transformer, whose steps are short and many-moduled."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from .. import build, options, passes
from . import launch

_STEPS_PER_TURN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Training steps with and without hooks on modules and autograd, in turns; 2 ranks on CPU."
    parser.add_argument("--turns", type=int, default=40, help=f"of {_STEPS_PER_TURN} steps each way; default 40")


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank failed, 2 for arguments that make no sense."""
    if not 1 <= chosen.turns <= 10_000:
        print(f"bench hooks: --turns {chosen.turns} must be from 1 to 10000", file=sys.stderr)
        return 2
    options.set_unless_given("ECHO_LOG", "off")
    try:
        launch.run_ranks(_run_rank, 2, chosen.turns)
    except launch.RankError as error:
        print(f"bench hooks failed:\n{error}", file=sys.stderr)
        return 1
    return 0


def _run_rank(rank: int, size: int, store_path: str, turns: int) -> None:
    import torch
    import torch.distributed as dist

    from . import transformer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    # Policy all: the same calls are quantized with hooks and without.
    group = dist.new_group(backend="echo", pg_options=options.Options(policy="all", min_bytes=0))
    model = transformer.make(transformer.mesh_over(group, torch.device("cpu")))
    optimizer = transformer.MasterAdamW(model, 1e-3)
    batches = transformer.batches(transformer.text(), 8, 64)
    extension = build.extension()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns + 1):  # the first is not counted
        for hooked in (True, False) if turn % 2 else (False, True):
            passes.install(extension) if hooked else passes.uninstall(extension)
            for step in range(_STEPS_PER_TURN + 1):  # the first one looks for output layers
                batch = next(batches)
                dist.barrier()
                began = time.perf_counter()
                transformer.loss_of(model, *batch).backward()
                optimizer.step()
                if turn and step:
                    seconds[hooked].append(time.perf_counter() - began)
    calls = _module_calls(model, batch)
    if rank == 0:
        alone_ms = _hook_seconds(calls) * 1e3
        without, with_hooks = (statistics.median(seconds[hooked]) * 1e3 for hooked in (False, True))
        print(
            f"{calls} module calls a step: median of {len(seconds[True])} steps {without:.3f} ms without hooks, "
            f"{with_hooks:.3f} ms with them ({100 * (with_hooks / without - 1):+.2f} %)"
        )
        print(f"hooks alone: {alone_ms * 1e3:.1f} us a step, {100 * alone_ms / without:.2f} %")
    dist.destroy_process_group()


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
