"""The quantized all-reduce as two collectives: all_to_all_single of codes, sum, all_gather_into_tensor of codes.

What a program gets without a fused all-reduce, and the paper's second baseline (its table 3). Two codecs, named in the
table:

- DeepSpeed's kernels of ZeRO++ (`swizzle_quant`, `quantized_reduction`, `dequantize`), if DeepSpeed is there and its
  operator loads. They read fp16 whatever they are given, so the row reduces an fp16 tensor of the same size: no cast
  is timed, in favour of this baseline. Sums are fp16, symmetric codes, DeepSpeed's own group of 2,048 elements.
- Else echo's own kernels over the inner backend's two collectives: `Options(fabric="wire", feedback=False)`, which
  overlaps chunks of the exchange, so it is the faster form of the same thing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

GROUP_ELEMS = 2048


def deepspeed_quantizer() -> Any:
    """DeepSpeed's loaded quantizer operator; None where it is missing or does not load."""
    if not torch.cuda.is_available():
        return None
    try:
        from deepspeed.ops.op_builder import QuantizerBuilder

        return QuantizerBuilder().load()
    except Exception:  # an extra that is broken in whatever way must not end the benchmark
        return None


def fits(numel: int, size: int) -> bool:
    """Whether DeepSpeed's kernels take this many elements: whole groups for every rank."""
    return numel % (GROUP_ELEMS * size) == 0


class DeepSpeedTwoCollective:
    """all_reduce(tensor): fp16, CUDA, numel a multiple of GROUP_ELEMS * ranks; in place on the current stream."""

    def __init__(self, quantizer: Any, group: Any, bits: int) -> None:
        self.quantizer, self.group, self.bits = quantizer, group, bits
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: Any) -> None:
        quantizer, groups, symmetric = self.quantizer, tensor.numel() // GROUP_ELEMS, self.quantizer.Symmetric
        sent = quantizer.swizzle_quant(tensor, groups, self.bits, symmetric, 1, 1, self.size)
        received = [self._exchange(part) for part in sent]
        codes, scales = quantizer.quantized_reduction(
            *received, groups, groups // self.size, self.bits, symmetric, self.size
        )
        gathered = [self._gather(part) for part in (codes, scales)]
        tensor.copy_(quantizer.dequantize(*gathered, groups, self.bits, symmetric).view_as(tensor))

    def wire_bytes(self, numel: int) -> int:
        """Sent by one rank in one call: codes, and a fp32 scale per group, in both collectives."""
        codes = numel * self.bits // 8 + 4 * (numel // GROUP_ELEMS)
        return 2 * codes * (self.size - 1) // self.size

    def _exchange(self, part: Any) -> Any:
        received = torch.empty_like(part)
        dist.all_to_all_single(received, part, group=self.group)
        return received

    def _gather(self, part: Any) -> Any:
        everything = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(everything, part, group=self.group)
        return everything
