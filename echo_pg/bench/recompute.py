"""The command `python -m echo_pg bench recompute`: what activation checkpointing does to gradients and losses of a
small tensor-parallel transformer, for every way to treat the all-reduces that it runs again.

All ways train side by side from one seed on the same batches. Now and then each one also gives the gradient at the
parameters and the batch of the run without checkpointing, so that only the recomputation differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import build, options
from . import launch, results

# Name -> the option recompute, or None where nothing is computed again ("none") or its sums are kept ("saved": torch's
# selective checkpointing saves the results of all-reduces, which then are not made again).
WAYS: dict[str, str | None] = {
    "none": None, "feedback": "feedback", "plain": "plain", "exact": "exact", "saved": None,
}  # fmt: skip
_TAIL = 50  # last steps, over which losses are compared
# Options as shipped whose values a record states, since losses depend on them and defaults may change.
_STATED = ("rotation", "quantizer", "residual", "eta", "a", "beta1", "beta2", "state_dtype")
_ROW = "{:<10}{:>14}{:>14}{:>14}{:>14}{:>16}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare ways to treat recomputed all-reduces: gradients and losses of a small training."
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--segment", type=int, default=1, help="layers per checkpoint, of 4; default 1")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), metavar="DIR", help="for the table as JSON")


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank failed, 2 for arguments that make no sense."""
    if not 2 <= chosen.ranks <= 4 or chosen.steps < 1 or chosen.segment not in (1, 2, 4):
        print("bench recompute: --ranks from 2 to 4, --steps from 1, --segment 1, 2 or 4", file=sys.stderr)
        return 2
    build.extension()
    options.set_unless_given("ECHO_LOG", "off")
    chosen.out.mkdir(parents=True, exist_ok=True)
    name = f"recompute-{chosen.device}-{chosen.bits}bits-segment{chosen.segment}"
    path = chosen.out / f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.json"
    try:
        launch.run_ranks(_run_rank, chosen.ranks, vars(chosen) | {"out": str(path)})
    except launch.RankError as error:
        print(f"bench recompute failed:\n{error}", file=sys.stderr)
        return 1
    print(table(json.loads(path.read_text())))
    print(f"\n{path}")
    return 0


def table(made: dict[str, Any]) -> str:
    """One line per way, feedback on and off."""
    lines = []
    for feedback in (True, False):
        lines.append(f"\nfeedback={feedback}: gradient against that of the run without checkpointing, and losses")
        lines.append(_ROW.format("recompute", "grad rel. err", "1 - cosine", "loss", "|loss diff|", "quantized calls"))
        for row in made["rows"]:
            if row["feedback"] == feedback:
                lines.append(
                    _ROW.format(
                        row["recompute"],
                        f"{row['gradient_relative_error']:.2e}",
                        f"{row['gradient_one_minus_cosine']:.2e}",
                        f"{row['loss']:.4f}",
                        f"{row['loss_difference']:.4f}",
                        f"{row['quantized_calls_per_step']:g}",
                    )
                )
    lines.append(
        "\nquantization itself, without checkpointing: gradient rel. err "
        + ", ".join(
            f"{row['gradient_relative_error']:.2e} (feedback={row['feedback']})" for row in made["quantization"]
        )
    )
    return "\n".join(lines)


class Run:
    """One training: a model over an echo group of its own, its optimizer, what it has seen."""

    def __init__(self, way: str, feedback: bool, chosen: dict[str, Any], device: Any, policy: str = "auto") -> None:
        import torch.distributed as dist

        from . import transformer

        self.settings = options.Options(
            bits=chosen["bits"],
            feedback=feedback,
            min_bytes=0,
            policy=policy,
            recompute=WAYS[way] or "feedback",
        )
        self.way, self.feedback = way, feedback
        self.group = dist.new_group(backend="echo", group_desc="tp", pg_options=self.settings)
        mesh = transformer.mesh_over(self.group, device)
        self.model = transformer.make(mesh, device=device, width=64, layers=4, length=64)
        self.model.wrap, self.model.blocks_per_segment = _checkpoint(way), chosen["segment"]
        self.optimizer = transformer.MasterAdamW(self.model, 1e-3)
        self.losses: list[float] = []
        self.errors: list[tuple[float, float]] = []  # of gradients: relative error, 1 - cosine

    def step(self, batch: Any) -> None:
        from . import transformer

        loss = transformer.loss_of(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def gradient_at(self, other: Run, batch: Any) -> list[Any]:
        """This rank's part of the gradient at another run's parameters, in fp32; own parameters are kept."""
        import torch

        from . import transformer

        mine = [transformer.local(parameter.detach()) for parameter in self.model.parameters()]
        theirs = [transformer.local(parameter.detach()) for parameter in other.model.parameters()]
        kept = [tensor.clone() for tensor in mine]
        torch._foreach_copy_(mine, theirs)
        transformer.loss_of(self.model, *batch).backward()
        torch._foreach_copy_(mine, kept)
        gradient = []
        for parameter in self.model.parameters():
            gradient.append(transformer.local(parameter.grad).float())
            parameter.grad = None
        return gradient

    def quantized_calls(self) -> int:
        from .. import report

        return int(report.stats(self.group)["calls_quantized"])


def _checkpoint(way: str) -> Any:
    """The wrapper that checkpoints a segment, or None."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    if way == "none":
        return None
    if way != "saved":
        return functools.partial(checkpoint, use_reentrant=False)
    keep = [torch.ops._c10d_functional.all_reduce.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def compare(gradient: list[Any], reference: list[Any]) -> tuple[float, float]:
    """Relative error and 1 - cosine over the parts of all ranks; a replicated parameter counts once per rank."""
    import torch
    import torch.distributed as dist

    products = torch.zeros(4, dtype=torch.float64)
    for mine, theirs in zip(gradient, reference, strict=True):
        x, y = mine.double(), theirs.double()
        products += torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum(), ((x - y) ** 2).sum()]).cpu()
    dist.all_reduce(products)
    dot, xx, yy, dd = products.tolist()
    return math.sqrt(dd / yy), max(0.0, 1 - dot / math.sqrt(xx * yy))


def _run_rank(rank: int, size: int, store_path: str, chosen: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from . import transformer

    threads = max(1, len(results.usable_cores()) // size)
    torch.set_num_threads(threads)
    device = torch.device(chosen["device"], rank if chosen["device"] == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    data = transformer.text()
    batches = transformer.batches(data, 8, 64)
    exact = Run("none", True, chosen, device, policy="off")
    # Without feedback there is no state that a recomputed segment could have.
    ways = [(way, feedback) for feedback in (True, False) for way in WAYS if feedback or way != "feedback"]
    runs = [Run(way, feedback, chosen, device) for way, feedback in ways]
    base = {run.feedback: run for run in runs if run.way == "none"}
    quantization: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    every = max(1, chosen["steps"] // 20)
    for step in range(chosen["steps"]):
        batch = tuple(part.to(device) for part in next(batches))
        if step % every == 0:
            for feedback, reference in base.items():
                expected = reference.gradient_at(reference, batch)
                quantization[feedback].append(compare(expected, exact.gradient_at(reference, batch)))
                for run in (run for run in runs if run.feedback == feedback and run.way != "none"):
                    run.errors.append(compare(run.gradient_at(reference, batch), expected))
        for run in (exact, *runs):
            run.step(batch)
    if rank == 0:
        made = _record(chosen, size, threads, runs, base, exact, quantization, every, len(data))
        Path(chosen["out"]).write_text(json.dumps(made, indent=1) + "\n")
    dist.destroy_process_group()


def _record(
    chosen: dict[str, Any], size: int, threads: int, runs: list[Run], base: dict[bool, Run], exact: Run,
    quantization: dict[bool, list[tuple[float, float]]], every: int, text_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    passes = chosen["steps"] + (chosen["steps"] + every - 1) // every  # of each run: its own steps, and those compared
    command = f"python -m echo_pg bench recompute --device {chosen['device']} --ranks {size} --steps {chosen['steps']}"
    return results.circumstances(chosen["device"], threads) | {
        "bench": "recompute",
        "repeat_with": f"{command} --bits {chosen['bits']} --segment {chosen['segment']}",
        "what": "4 layers of width 64, batch 8 x 64 bytes, AdamW 1e-3, non-reentrant checkpoint; gradient: median over "
        f"every {every}th step at the parameters of the run without checkpointing; loss: mean of the last {_TAIL}, "
        "loss_difference: mean of the absolute differences in them to the run without checkpointing",
        "ranks": size, "bits": chosen["bits"], "layers_per_checkpoint": chosen["segment"], "steps": chosen["steps"],
        "options": {name: getattr(base[True].settings, name) for name in _STATED},
        "text_bytes": text_bytes,
        "exact_loss": _tail(exact.losses),
        "quantization": [
            {"feedback": feedback, **_middle(errors), "loss_difference": _distance(base[feedback], exact)}
            for feedback, errors in quantization.items()
        ],
        "rows": [
            {
                "recompute": run.way,
                "feedback": run.feedback,
                **_middle(run.errors or [(0.0, 0.0)]),
                "loss": _tail(run.losses),
                "loss_difference": _distance(run, base[run.feedback]),
                "quantized_calls_per_step": run.quantized_calls() / passes,
            }
            for run in runs
        ],
    }  # fmt: skip


def _middle(errors: list[tuple[float, float]]) -> dict[str, float]:
    relative, cosine = zip(*errors, strict=True)
    return {
        "gradient_relative_error": statistics.median(relative),
        "gradient_one_minus_cosine": statistics.median(cosine),
    }


def _tail(losses: list[float]) -> float:
    return statistics.fmean(losses[-_TAIL:])


def _distance(run: Run, other: Run) -> float:
    return statistics.fmean(abs(x - y) for x, y in zip(run.losses[-_TAIL:], other.losses[-_TAIL:], strict=True))
