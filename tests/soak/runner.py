"""The groups of an epoch of a soak, their calls and the check of every result."""

from __future__ import annotations

import contextlib
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from limits import limits
from reference_group import RefGroup
from schedule import POOL, Call, GroupUse, Kind
from torch import Tensor


class Pool:
    """Contributions of all ranks, made alike on each of them, exact sums and limits."""

    def __init__(self, seed: int, size: int, device: str) -> None:
        self.seed, self.size, self.device = seed, size, device
        self.entries: dict[Kind, list[list[Tensor]]] = {}
        self.made: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def of(self, kind: Kind) -> list[list[Tensor]]:
        if kind not in self.entries:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + kind.numel)
            count = POOL if kind.numel <= 1 << 21 else 2
            self.entries[kind] = [
                [torch.randn(kind.numel, generator=generator).to(getattr(torch, kind.dtype)) for _ in range(self.size)]
                for _ in range(count)
            ]
        return self.entries[kind]

    def held_bytes(self) -> int:
        """Of host memory: the pool grows with the combinations that have come up."""
        kept = [x for entries in self.entries.values() for entry in entries for x in entry]
        kept += [x for pairs in self.made.values() for pair in pairs for x in pair if not x.is_cuda]
        return sum(x.untyped_storage().nbytes() for x in kept)

    def held_device_bytes(self) -> int:
        """Of device memory, which torch hands out in pieces of 512 bytes."""
        kept = [x for pairs in self.made.values() for pair in pairs for x in pair if x.is_cuda]
        return sum(-(-x.untyped_storage().nbytes() // 512) * 512 for x in kept)

    def checks(self, kind: Kind, ranks: tuple[int, ...], options: Any, key: str) -> list[tuple[Tensor, Tensor]]:
        """Per entry the exact sum and the limit of every element, on the device."""
        if (kind, ranks, key) not in self.made:
            pool = [[entry[rank] for rank in ranks] for entry in self.of(kind)]
            sums = [torch.stack([x.float() for x in entry]).sum(0) for entry in pool]
            pairs = zip(sums, limits(pool, sums, options), strict=True)
            made = [(exact.to(self.device), limit.to(self.device)) for exact, limit in pairs]
            if kind.numel > 1 << 21:
                return made
            self.made[kind, ranks, key] = made
        return self.made[kind, ranks, key]


class Runner:
    """One group of an epoch: makes its calls and checks them."""

    def __init__(self, use: GroupUse, pool: Pool, rank: int, device: str) -> None:
        import echo_pg

        self.use, self.pool, self.rank, self.device = use, pool, rank, device
        self.options = echo_pg.Options(
            policy="all", min_bytes=0, dtypes=("float32", "bfloat16", "float16"), fabric=use.fabric,
            allow_shared_gpu=True, **use.options,
        )  # fmt: skip
        self.key = repr(use.options)
        self.group = dist.new_group(
            list(use.ranks), backend="echo", pg_options=self.options, timeout=timedelta(seconds=60)
        )
        self.member = rank in use.ranks
        self.reference = RefGroup(len(use.ranks), **use.options) if use.mirrored and self.member else None
        # On a device half of the groups call from a stream of their own.
        own_stream = device == "cuda" and len(use.calls) % 2
        self.stream = torch.cuda.Stream() if own_stream else contextlib.nullcontext()
        self.flight: list[tuple[Any, Tensor, Call]] = []
        self.begun = 0
        self.crc = 0
        self.calls = 0
        self.mirrored = 0

    def make(self, call: Call) -> None:
        if not self.member:
            return
        with torch.cuda.stream(self.stream) if isinstance(self.stream, torch.cuda.Stream) else self.stream:
            self._make(call)

    def _make(self, call: Call) -> None:
        import echo_pg

        if self.flight and self.flight[0][2].burst != call.burst:
            self.land()
        if call.starts_pass:
            echo_pg.new_pass("forward", self.group)
            if self.reference:
                self.reference.new_pass("forward")
        tensor = self.pool.of(call.kind)[call.entry][self.rank].to(self.device, copy=True)
        if call.burst:
            self.flight.append((dist.all_reduce(tensor, group=self.group, async_op=True), tensor, call))
            return
        dist.all_reduce(tensor, group=self.group)
        self.check(tensor, call, lane=0)

    def land(self) -> None:
        """Wait for what is in flight."""
        flight, self.flight = self.flight, []
        for work, _, _ in flight:
            work.wait()
        for lane, (_, tensor, call) in enumerate(flight):
            self.check(tensor, call, lane)

    def check(self, tensor: Tensor, call: Call, lane: int) -> None:
        exact, limit = self.pool.checks(call.kind, self.use.ranks, self.options, self.key)[call.entry]
        self.calls += 1
        wrong = ~((tensor.float() - exact).abs_() <= limit)  # NaN is
        if bool(wrong.any()):
            raise AssertionError(self.describe(tensor, exact, limit, int(wrong.nonzero()[0]), call))
        result = tensor.cpu()
        self.crc = zlib.crc32(result.view(torch.uint8).numpy(), self.crc)
        if self.reference:
            contributions = [self.pool.of(call.kind)[call.entry][rank] for rank in self.use.ranks]
            expected = self.reference.all_reduce(contributions, lane=lane).output
            if not torch.equal(result.view(torch.uint8), expected.view(-1).view(torch.uint8)):
                raise AssertionError(f"call {self.calls} of {self.use.ranks} {self.key}, {call}: not the reference")
            self.mirrored += 1

    def describe(self, tensor: Tensor, exact: Tensor, limit: Tensor, at: int, call: Call) -> str:
        import echo_pg

        found, right, allowed = (float(each.view(-1)[at]) for each in (tensor, exact, limit))
        text = f"call {self.calls} of {self.use.ranks} {self.key}, {call}: element {at} is {found}, not {right}"
        fault = echo_pg.stats(self.group)["fault"]
        return f"{text} within {allowed}" + (f"; its group has failed: {fault}" if fault else "")

    def finish(self) -> None:
        with torch.cuda.stream(self.stream) if isinstance(self.stream, torch.cuda.Stream) else self.stream:
            self.land()

    def some(self, count: int) -> None:
        """The next calls."""
        for call in self.use.calls[self.begun : self.begun + count]:
            self.make(call)
        self.begun += count

    def all(self) -> None:
        self.some(len(self.use.calls))
        self.finish()
