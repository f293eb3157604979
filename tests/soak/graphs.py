"""A recorded pass that is replayed between the epochs of a soak on a device: every replay gives the bytes of the eager
pass. One group for the whole slice, since what a graph has recorded keeps its memory until the process ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (1000, 70_001, 1 << 20)


class RecordedPass:
    def __init__(self, rank: int, seed: int) -> None:
        import echo_pg

        options = echo_pg.Options(policy="all", min_bytes=0, fabric="peer", allow_shared_gpu=True)
        self.group: Any = dist.new_group(backend="echo", pg_options=options)
        generator = torch.Generator().manual_seed(7919 * seed + rank)
        self.sources = [torch.randn(numel, generator=generator).bfloat16().cuda() for numel in SIZES for _ in range(2)]
        self.buffers = [torch.empty_like(source) for source in self.sources]
        self.expected = self._eager()
        echo_pg.new_pass("forward", self.group)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._calls()

    def _calls(self) -> None:
        for buffer, source in zip(self.buffers, self.sources, strict=True):
            buffer.copy_(source)
            dist.all_reduce(buffer, group=self.group)

    def _eager(self) -> list[Tensor]:
        import echo_pg

        echo_pg.new_pass("forward", self.group)
        self._calls()
        torch.cuda.synchronize()
        return [buffer.clone() for buffer in self.buffers]

    def replay(self, times: int) -> int:
        """Calls made; raises where a replay differs."""
        torch.cuda.synchronize()
        for _ in range(times):
            self.graph.replay()
            torch.cuda.synchronize()
            for index, (buffer, expected) in enumerate(zip(self.buffers, self.expected, strict=True)):
                if not torch.equal(buffer.view(torch.int16), expected.view(torch.int16)):
                    raise AssertionError(f"call {index} of a replayed pass differs from the eager one")
        return times * len(self.buffers)
