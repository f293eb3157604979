"""What each rank of `bench train` does: whole trainings, one after the other, over a group of their own each.

Optimizer and schedule are those of the paper's appendix B: AdamW (0.9, 0.95, eps 1e-5, weight decay 0.1), gradient
norm clipped at 1, warm-up, cosine decay to a tenth of 3e-4; bf16 weights and gradients, fp32 masters and moments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .. import options, report
from . import results, split, transformer
from .progress import Bar

ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
CLIP = 1.0
FLOOR = 3e-5  # the rate at the end, before it is scaled
_TIMEOUT = timedelta(minutes=5)
_POINTS = 100  # of the curve that is kept
# Of the batches of the tail, the same for all seeds: what differs between seeds is then the model and what it has
# learnt from, not how hard the text is that the last losses are taken from.
_TAIL_SEED = 1 << 30
_LOOK_EVERY = 10  # steps between two looks at a loss on a GPU


def learning_rate(step: int, peak: float, floor: float, warmup: int, steps: int) -> float:
    """Of step 0 to steps - 1: linear to `peak` at the end of the warm-up, then half a cosine to `floor`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def load_text(folder: str | Path | None, name: str = "prose-train.txt") -> Tensor:
    """The bytes of one text of a folder, uint8; without a folder the standard library's docstrings."""
    if folder is None:
        return transformer.text()
    return torch.frombuffer(bytearray((Path(folder) / name).read_bytes()), dtype=torch.uint8)


def text_hash(data: Tensor) -> str:
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


@dataclasses.dataclass
class Place:
    """Where a rank computes, and the groups that all its trainings share."""

    rank: int
    size: int
    device: torch.device
    inner: str  # backend of exact sums
    exact: Any  # group for them


def start(rank: int, size: int, store_path: str, device: str) -> Place:
    """The default group (Gloo) and this rank's device. Ranks beyond the number of GPUs share one, where NCCL would
    refuse: their exact sums go through Gloo."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size, timeout=_TIMEOUT
    )
    if device == "cpu":
        torch.set_num_threads(max(1, len(results.usable_cores()) // size))
        return Place(rank, size, torch.device("cpu"), "gloo", dist.group.WORLD)
    gpus = torch.cuda.device_count()
    place = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(place)
    inner = "nccl" if gpus >= size else "gloo"
    return Place(rank, size, place, inner, dist.new_group(backend=inner, timeout=_TIMEOUT))


def make_group(place: Place, settings: options.Options | None) -> Any:
    """The tensor-parallel group of one training; without settings the inner backend's."""
    if settings is None:
        return dist.new_group(backend=place.inner, timeout=_TIMEOUT)
    return dist.new_group(backend="echo", group_desc="tp", pg_options=settings, timeout=_TIMEOUT)


class Training:
    """One model and its optimizer over a group of its own."""

    def __init__(self, place: Place, plan: dict[str, Any], run: dict[str, Any]) -> None:
        self.place, self.plan, self.run = place, plan, run
        settings = None if run["options"] is None else options.Options(**run["options"])
        self.quantizes = settings is not None and settings.policy != "off"
        self.group = make_group(place, settings)
        shape = split.Shape(**plan["model"])
        self.sums_per_step = 4 * shape.layers
        self.model = split.qwen3(shape, plan["length"], run["seed"], place.device)
        split.split(self.model, place.size, place.rank, split.adding_over(self.group))
        self.model.to(place.device)
        self.kinds = list(split.kinds(self.model))
        self.optimizer = transformer.MasterAdamW(self.model, 0.0, **ADAM)
        self.peak, self.floor = run["lr"] * plan["lr_scale"], FLOOR * plan["lr_scale"]

    def step(self, number: int, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss before the update, a scalar on the device. Raises RuntimeError unless every sum of a layer was
        quantized (or none, where none is to be)."""
        before = self._quantized()
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        if (made := self._quantized() - before) != (self.sums_per_step if self.quantizes else 0):
            raise RuntimeError(f"{made} sums of a step were quantized, {self.sums_per_step} of its layers are to be")
        gradients = self.optimizer.take_gradients()
        self._join(gradients)
        plan = self.plan
        self.optimizer.update(learning_rate(number, self.peak, self.floor, plan["warmup"], plan["steps"]))
        return loss.detach()

    def _join(self, gradients: list[Tensor]) -> None:
        """Add up what ranks hold parts of, clip by the norm of all. One exact sum, of fp32.

        Gradients that are alike are averaged too: should a GPU sum in another order on one rank, weights that all
        ranks hold must not drift apart.
        """
        size = self.place.size
        squares = torch.stack(
            [g.square().sum() for g, kind in zip(gradients, self.kinds, strict=True) if kind == "split"]
        )
        whole = [(g, kind) for g, kind in zip(gradients, self.kinds, strict=True) if kind != "split"]
        parts = [(g if kind == "summed" else g / size).flatten() for g, kind in whole]
        flat = torch.cat([squares.sum()[None], *parts])
        dist.all_reduce(flat, group=self.place.exact)
        joined = flat[1:].split([g.numel() for g, _ in whole])
        torch._foreach_copy_(
            [g for g, _ in whole], [part.view_as(g) for part, (g, _) in zip(joined, whole, strict=True)]
        )
        norm = (flat[0] + flat[1:].square().sum()).sqrt()
        torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))

    def _quantized(self) -> int:
        return int(report.stats(self.group)["calls_quantized"]) if self.quantizes else 0

    def wire_bytes(self) -> int:
        return int(report.stats(self.group)["wire_bytes"]) if self.run["options"] is not None else 0


def train(place: Place, plan: dict[str, Any], run: dict[str, Any], data: Tensor) -> dict[str, Any]:
    """One training from its start to its end; what is measured, as fields of a record."""
    training = Training(place, plan, run)
    batches, measured = (
        transformer.batches(data, plan["batch"], plan["length"], seed=seed) for seed in (run["seed"], _TAIL_SEED)
    )
    bar = Bar(f"{run['row']} {run['lr']:.2g} seed {run['seed']}", plan["steps"], enabled=place.rank == 0)
    losses: list[Tensor] = []
    began = time.monotonic()
    for number in range(plan["steps"]):
        source = batches if number < plan["steps"] - plan["tail"] else measured
        batch = [part.to(place.device) for part in next(source)]
        losses.append(training.step(number, *batch))
        looked = losses[-1].item() if place.device.type == "cpu" or number % _LOOK_EVERY == 0 else None
        if looked is not None and not math.isfinite(looked):
            break  # all ranks hold the same sums, so all stop here
        bar.step(f"loss {looked:.3f}" if looked is not None else "")
    values = [float(value) for value in torch.stack(losses).cpu()]
    seconds = time.monotonic() - began
    bar.done()
    sent = training.wire_bytes()
    dist.destroy_process_group(training.group)
    tail = values[-plan["tail"] :]
    mean = sum(tail) / len(tail)
    every = max(1, plan["steps"] // _POINTS)
    return {
        "tail_loss": mean,
        "tail_bits_per_byte": mean / math.log(2),
        "tail_sd": math.sqrt(sum((value - mean) ** 2 for value in tail) / max(1, len(tail) - 1)),
        "first_loss": values[0],
        "diverged": not all(map(math.isfinite, values)) or mean > values[0],
        "ms_per_step": 1e3 * seconds / len(values),
        "sums_per_step": training.sums_per_step,
        "quantized_per_step": training.sums_per_step if training.quantizes else 0,
        "wire_bytes_per_step": sent / len(values),
        "curve_every": every,
        "curve": [round(sum(part) / len(part), 4) for part in _chunks(values, every)],
    }


def _chunks(values: list[float], size: int) -> list[list[float]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def run_rank(rank: int, size: int, store_path: str, plan: dict[str, Any], path: str) -> None:
    """All trainings of the plan; rank 0 appends a record after each."""
    place = start(rank, size, store_path, plan["device"])
    data = load_text(plan["text"])
    common = results.circumstances(plan["device"], torch.get_num_threads(), place.device.index)
    common |= {"transformers": version("transformers")}
    for run in plan["runs"]:
        measured = train(place, plan, run, data)
        if rank == 0:
            now = {"bench": "train", "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            results.append(Path(path), [common | now | run["identity"] | {"inner": place.inner} | measured])
    dist.destroy_process_group()
