"""What tests of whole frameworks share: where a rank computes, and what echo decided about each of its all-reduces."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

needs_four_devices = pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs four GPUs, or none")

# Give this to run_ranks: every all-reduce becomes an event then.
DEBUG = {"ECHO_LOG": "debug"}


def device_of(rank: int) -> torch.device:
    """Where a rank computes: on a GPU of its own if there are GPUs, else on the CPU. Makes it the current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


class Recorder(logging.Handler):
    """Keeps the all-reduces of this process as dictionaries with group, rank, op, dtype, shape ("[2, 16, 64]"),
    tensors, context, quantized, reason, and the line that is printed."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.calls: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        call = getattr(record, "call", None)
        if call is not None:
            self.calls.append(call | {"line": record.getMessage()})

    def take(self) -> list[dict[str, Any]]:
        """The calls since the last take, in the order in which they were issued."""
        taken, self.calls = self.calls, []
        return taken


def record() -> Recorder:
    """Start to record. Call it before the first echo group is made; nothing is printed then."""
    recorder = Recorder()
    logging.getLogger("echo_pg").addHandler(recorder)
    return recorder


def table(calls: Iterable[dict[str, Any]]) -> Counter[tuple[str, ...]]:
    """How often each kind of call was made: (context, op, dtype, shape, "quantized" or the reason why exact)."""
    counts: Counter[tuple[str, ...]] = Counter()
    for call in calls:
        outcome = "quantized" if call["quantized"] else call["reason"]
        counts[call["context"], call["op"], call["dtype"], call["shape"], outcome] += 1
    return counts


class Warnings(logging.Handler):
    """Keeps the texts of warnings: `logging.getLogger("echo_pg").addHandler(Warnings())`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
