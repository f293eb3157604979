"""Copies in the background: between neighbouring GPUs over their links, or in a CPU's memory, for a share of the time.

A process of its own, so that it takes turns with nobody's kernels or interpreter: `python -m echo_pg.bench.load DEVICE
GPUS` reads a duty in percent per line and answers each with the seconds since the one before and the bytes moved in
them. It ends with its input.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections import deque
from typing import Any

import torch

_PERIOD_S = 0.010
# Of a copy: at 400 GB/s 0.16 ms, long beside its launch and short beside the period.
_CHUNK_BYTES = {"cuda": 64 << 20, "cpu": 2 << 20}
_IN_FLIGHT = 2  # rounds of copies: the next waits in the queue when one ends


class Load:
    """The process, seen from the rank that commands it."""

    def __init__(self, device: str, gpus: int) -> None:
        command = [sys.executable, "-m", "echo_pg.bench.load", device, str(gpus)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._what = ""

    @property
    def what(self) -> str:
        """What it copies; known once it has started, which takes as long as to import torch."""
        self._what = self._what or self._answer()
        return self._what

    def set(self, duty: int) -> float:
        """Copy for `duty` percent of the time from now on; returns what was moved since the last call, in GB/s of each
        GPU in each direction (of memory, on CPU). Raises RuntimeError where the process is gone."""
        assert self.process.stdin is not None and self.what
        try:
            self.process.stdin.write(f"{duty}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the process that copies in the background has ended") from None
        seconds, moved = map(float, self._answer().split())
        return moved / seconds / 1e9

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that copies in the background has ended")
        return line.strip()


class _Copies:
    """A ring: each GPU sends to the next, so that each sends and receives at once. A single GPU, or a CPU, copies
    within its own memory."""

    def __init__(self, device: str, gpus: int) -> None:
        self.on_gpu = device == "cuda"
        count = gpus if self.on_gpu else 1
        places = [torch.device("cuda", index) if self.on_gpu else torch.device("cpu") for index in range(count)]
        self.bytes = _CHUNK_BYTES[device]
        self.sources = [torch.zeros(self.bytes, dtype=torch.uint8, device=place) for place in places]
        self.targets = [torch.zeros_like(source) for source in self.sources[1:] + self.sources[:1]]
        self.streams = [torch.cuda.Stream(place) for place in places] if self.on_gpu else []
        self.pending: deque[list[Any]] = deque()
        pairs = f"{count} GPUs, each to the next" if count > 1 else "within one GPU" if self.on_gpu else "in memory"
        self.what = f"copies of {self.bytes >> 20} MiB, {pairs}"

    def round(self) -> int:
        """One copy on each GPU; waits until fewer than _IN_FLIGHT rounds are on their way. Returns bytes of one GPU."""
        if not self.on_gpu:
            self.targets[0].copy_(self.sources[0])
            return self.bytes
        self.wait(_IN_FLIGHT - 1)
        events = []
        for source, target, stream in zip(self.sources, self.targets, self.streams, strict=True):
            with torch.cuda.stream(stream):  # that of the source's GPU, on which torch copies
                target.copy_(source, non_blocking=True)
                events.append(stream.record_event())
        self.pending.append(events)
        return self.bytes

    def wait(self, left: int = 0) -> None:
        while len(self.pending) > left:
            for event in self.pending.popleft():
                event.synchronize()


def _serve(device: str, gpus: int) -> None:
    torch.set_num_threads(1)
    copies = _Copies(device, gpus)
    copies.round()
    copies.wait()
    print(copies.what, flush=True)
    duty, moved, began = 0, 0, time.monotonic()
    while True:
        if select.select([sys.stdin], [], [], 0 if duty else None)[0]:
            copies.wait()
            line = sys.stdin.readline()
            if not line:
                return
            now = time.monotonic()
            print(f"{now - began} {moved}", flush=True)
            duty, moved, began = int(line), 0, time.monotonic()
        start = time.monotonic()
        while time.monotonic() < start + _PERIOD_S * duty / 100:
            moved += copies.round()
        if duty < 100:
            copies.wait()
            time.sleep(max(0.0, start + _PERIOD_S - time.monotonic()))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
