"""What one rank does: makes the groups of all rows, checks each row at each size, then times them in turn.

Timing: in each iteration every row runs once, first a different one each time. Before a row's turn come, untimed, the
first site of a new pass (rows with feedback: it skips the correction, so the second is timed), a fresh copy of the
input (all-reduces work in place and would grow it), and a barrier. The time of an iteration is that of its slowest
rank. On CUDA what a call leaves running beside later work (the update of "group") is not in its time; the rows with a
matrix multiplication after it show what that costs, "group+update" how long it takes; and the device has a head start
of work, so that a call lies in its queue when its time begins, as in a model whose host runs ahead. The host's clock
times each call until it returns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import bound, collectives
from .cases import BASELINES, ELEMENT_BYTES, Row
from .collectives import Collective, DeepSpeed, Matmul, Unfused
from .results import Measured

# Of idling on the device, half a millisecond: more than the host takes for a tiny all-reduce, an event and a call.
_HEAD_START_CYCLES = 1_000_000


@dataclass(frozen=True)
class Settings:
    """What all ranks are told."""

    device: str
    sizes: tuple[int, ...]
    rows: tuple[Row, ...]
    warmup: int
    iterations: int
    local_rank: int | None = None  # of the GPU; None: the rank
    inner: str | None = None  # the backend to compare with; None: the device's own


@dataclass(frozen=True)
class Checked:
    """What the check of a row at a size found."""

    path: str
    forwarded: str  # the reason, empty if the call was quantized or is not echo's
    wire_bytes: int
    relative_error: float  # of the site that is timed
    error_share: float  # its largest error in units of what rounding explains at most


class CheckFailed(Exception):
    """A row gives a wrong result; nothing is timed then."""


class Rank:
    """One rank. The default process group is Gloo: barriers and the exchange of times; the baseline has its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        local = self.rank if settings.local_rank is None else settings.local_rank
        self.device = torch.device("cuda", local) if settings.device == "cuda" else torch.device("cpu")
        self.inner = dist.new_group(backend=settings.inner or BASELINES[settings.device])
        self.tick = torch.zeros(1, device=self.device)

    def measure(
        self,
        dtype: str,
        begin: Callable[[int], None],
        say: Callable[[str], None],
        done: Callable[[int, list[Measured]], None],
    ) -> None:
        """All rows at all sizes; calls begin(bytes) and done(bytes, results) for each size, say(progress) between."""
        rows = [collectives.make(row, dtype, self.inner) for row in self.settings.rows]
        kind = getattr(torch, dtype)
        follow = Matmul(kind, self.device) if any(row.row.then_matmul for row in rows) else None
        for size_bytes in self.settings.sizes:
            begin(size_bytes)
            x = self._contribution(size_bytes // ELEMENT_BYTES[dtype], kind)
            shared = torch.empty_like(x)
            buffers = [row.buffer(shared) for row in rows]
            checked = self._check_all(rows, buffers, x, say)
            times = self._time_all(rows, buffers, checked, x, follow, say)
            done(size_bytes, [_measured(*parts) for parts in zip(rows, checked, *times, strict=True)])
        for row in rows:
            row.close()

    def _contribution(self, numel: int, dtype: torch.dtype) -> Any:
        """Normally distributed, other values on each rank."""
        x = torch.empty(numel, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(1 + self.rank)
        for chunk in x.split(bound.CHUNK_ELEMS):
            chunk.copy_(torch.randn(chunk.numel(), generator=generator, device=self.device))
        return x

    # --- check ---

    def _check_all(
        self, rows: list[Collective], buffers: list[Any], x: Any, say: Callable[[str], None]
    ) -> list[Checked]:
        # In fp32: P - 1 roundings of 2^-24, which the limits leave room for.
        exact = x.to(torch.float32, copy=True)
        dist.all_reduce(exact, group=self.inner)
        known: dict[tuple[int, int], tuple[Any, Any]] = {}

        def extremes(group_size: int, run_elems: int) -> tuple[Any, Any]:
            key = (group_size, run_elems)
            if key not in known:
                known[key] = (bound.extremes(x, *key), bound.extremes(exact, *key))
            return known[key]

        found = []
        for number, (row, buffer) in enumerate(zip(rows, buffers, strict=True), 1):
            say(f"checking {row.row.name} ({number} of {len(rows)})")
            found.append(self._check(row, buffer, x, exact, extremes))
        return found

    def _check(
        self, row: Collective, buffer: Any, x: Any, exact: Any, extremes: Callable[[int, int], tuple[Any, Any]]
    ) -> Checked:
        """Runs the row's sites once. Raises CheckFailed on all ranks if one of them sees anything wrong."""
        if isinstance(row, collectives.Nothing):
            return Checked(row.path, "", 0, 0.0, 0.0)
        before, limits = row.counters(), list[Any]()
        row.new_pass()
        for site in range(row.sites):
            buffer.copy_(x)
            row.all_reduce(buffer)
            error = bound.relative_error(buffer, exact)
            after = row.counters()
            reason = self._how(row, before, after, calls=site + 1)
            if row.options is None or reason:
                worst = self._agree(row, buffer, error / self._plain_limit(row, buffer, x, exact))
                return Checked(row.path, reason, row.wire_bytes(buffer), error, worst)
            if not limits:
                limits = self._limits(row, *extremes(row.options.group_size, row.options.run_elems), x.dtype)
            ratio = bound.worst_ratio(buffer, exact, limits[site], row.options)
            worst = self._agree(row, buffer, ratio)
        sent = (after["wire_bytes"] - before["wire_bytes"]) // row.sites
        return Checked(after["fabric"], "", sent, error, worst)

    def _how(self, row: Collective, before: dict[str, Any], after: dict[str, Any], calls: int) -> str:
        """The reason why calls were forwarded; empty where they were quantized or are not echo's."""
        if not after:
            return ""
        reason = _forwarded(before, after)
        if reason and not row.row.shipped:
            self._stop(row, f"the call was forwarded: {reason}")
        if not reason and after["calls_quantized"] != before["calls_quantized"] + calls:
            self._stop(row, "the call was neither quantized nor forwarded")
        return reason

    def _limits(self, row: Collective, mine: Any, total: Any, dtype: torch.dtype) -> list[Any]:
        place = bound.Place(self.rank, self.size, self._sum)
        return bound.limits(mine, total, row.options, torch.finfo(dtype).eps, place, isinstance(row, Unfused))

    def _plain_limit(self, row: Collective, buffer: Any, x: Any, exact: Any) -> float:
        """Of the relative error of a row that does not quantize with echo.

        At most P roundings to the tensor's dtype, each eps / 2 of a partial sum no larger than the sum of the
        magnitudes; norms of these add up. DeepSpeed rounds each contribution and the sum to steps of 2^(1-b) of a
        group's largest magnitude (its largest code is missing, so the error is a whole step).
        """
        norms = self._sum(x.double().norm()[None].float()).item()
        limit = self.size * torch.finfo(buffer.dtype).eps / 2 * norms
        if isinstance(row, DeepSpeed):
            largest = self._sum(x.abs().max()[None].float()).item() * x.numel() ** 0.5
            limit += 2 * 2.0 ** (1 - row.two.bits) * largest
        return limit / exact.double().norm().item()

    def _agree(self, row: Collective, result: Any, worst: float) -> float:
        """Compares every rank's bytes with rank 0's, and the error, given in units of its limit, with 1.

        Stops all ranks if any is wrong; else returns the largest error of all ranks.
        """
        same = True
        for chunk in result.split(bound.CHUNK_ELEMS):
            of_rank_0 = chunk.clone()
            dist.broadcast(of_rank_0, 0, group=self.inner)
            same = same and torch.equal(of_rank_0.view(torch.uint8), chunk.view(torch.uint8))
        worst = worst if worst == worst else math.inf
        seen = torch.tensor([0.0 if same else 1.0, worst], dtype=torch.float64)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        different, worst_of_all = seen.tolist()
        if different:
            self._stop(row, "ranks hold different bytes after the call")
        if not worst_of_all <= 1:
            self._stop(row, f"the result is off by {worst_of_all:.3g} times the largest error that rounding explains")
        return float(worst_of_all)

    def _stop(self, row: Collective, why: str) -> None:
        raise CheckFailed(f"row {row.row.name}: {why}")

    def _sum(self, values: Any) -> Any:
        total = values.clone()
        dist.all_reduce(total, group=self.inner)
        return total

    # --- time ---

    def _time_all(
        self,
        rows: list[Collective],
        buffers: list[Any],
        checked: list[Checked],
        x: Any,
        follow: Matmul | None,
        say: Callable[[str], None],
    ) -> tuple[list[list[float]], list[float | None]]:
        """Seconds [rows][iterations] of the slowest rank, and seconds [rows] until a call returned, where known."""
        total = self.settings.warmup + self.settings.iterations
        clock = DeviceClock() if self.device.type == "cuda" else HostClock()
        for iteration in range(total):
            say(f"iteration {iteration + 1} of {total}")
            for turn in range(len(rows)):
                index = (iteration + turn) % len(rows)
                row, buffer = rows[index], buffers[index]
                row.new_pass()
                for _ in range(0 if checked[index].forwarded else row.sites - 1):
                    buffer.copy_(x)
                    row.all_reduce(buffer)
                buffer.copy_(x)
                self.barrier(head_start=True)
                clock.start(index)
                row.all_reduce(buffer)
                clock.returned()
                if row.row.then_update:
                    row.join_update(self.device)
                if follow is not None and row.row.then_matmul:
                    follow()
                clock.stop()
        of_rows = range(len(rows))
        measured = torch.tensor([clock.seconds(index)[self.settings.warmup :] for index in of_rows]).double()
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        host = torch.tensor([clock.host_seconds(index, self.settings.warmup) for index in of_rows]).double()
        dist.all_reduce(host, op=dist.ReduceOp.MAX)
        called = [self.device.type == "cuda" and not isinstance(row, collectives.Nothing) for row in rows]
        of_calls = [seconds if call else None for seconds, call in zip(host.tolist(), called, strict=True)]
        return measured.tolist(), of_calls

    def barrier(self, head_start: bool) -> None:
        """On CUDA all streams are empty before it, so that nobody's state update disturbs the next row; after it each
        rank's stream adds up a tiny tensor, so that they start together on what then comes, and with `head_start` first
        idles for a while."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        if self.device.type == "cuda":
            if head_start:
                torch.cuda._sleep(_HEAD_START_CYCLES)
            dist.all_reduce(self.tick, group=self.inner)


def _measured(row: Collective, checked: Checked, seconds: list[float], host_seconds: float | None) -> Measured:
    return Measured(
        row=row.row,
        options=row.options,
        path=checked.path,
        note=row.note,
        forwarded=checked.forwarded,
        wire_bytes=checked.wire_bytes,
        relative_error=checked.relative_error,
        error_share=checked.error_share,
        seconds=seconds,
        host_seconds=host_seconds,
    )


def _forwarded(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The reason for which a call between two states of the counters was forwarded; empty if none was."""
    for reason, count in after.get("forwarded", {}).items():
        if count["calls"] > before["forwarded"].get(reason, {"calls": 0})["calls"]:
            return str(reason)
    return ""


class HostClock:
    """Wall time of calls that block."""

    def __init__(self) -> None:
        self.samples: dict[int, list[float]] = {}
        self.row, self.began = 0, 0.0

    def start(self, row: int) -> None:
        self.row, self.began = row, time.perf_counter()

    def returned(self) -> None:
        pass

    def stop(self) -> None:
        self.samples.setdefault(self.row, []).append(time.perf_counter() - self.began)

    def seconds(self, row: int) -> list[float]:
        return self.samples[row]

    def host_seconds(self, row: int, warmup: int) -> float:
        return 0.0  # a call that blocks takes what it takes


class DeviceClock:
    """CUDA events around each call, on the current stream, read when all is over; and the host's time in the call."""

    def __init__(self) -> None:
        self.events: dict[int, list[tuple[Any, Any]]] = {}
        self.host: dict[int, list[float]] = {}
        self.row, self.began = 0, 0.0

    def start(self, row: int) -> None:
        self.row = row
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.events.setdefault(row, []).append(pair)
        pair[0].record()
        self.began = time.perf_counter()

    def returned(self) -> None:
        self.host.setdefault(self.row, []).append(time.perf_counter() - self.began)

    def stop(self) -> None:
        self.events[self.row][-1][1].record()

    def seconds(self, row: int) -> list[float]:
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in self.events[row]]

    def host_seconds(self, row: int, warmup: int) -> float:
        return statistics.median(self.host[row][warmup:])
