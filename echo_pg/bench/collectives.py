"""How each kind of row adds up a tensor: one class per kind, all with the same four things to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import report
from ..options import Options
from . import two_collective
from .cases import Row

MATMUL_SIZE = 4096  # about 0.2 ms of bfloat16 on an H200: as long as the update of a compensated call at 128 MiB


class Collective:
    """The inner backend itself, and what all rows have in common.

    options: those of the echo group, None without one. path: what carries the codes, or the backend's name. note: what
    a reader of the table must know. sites: all-reduces per pass; of two the second is timed, because the first site of
    a pass skips the correction.
    """

    options: Options | None = None
    note = ""
    sites = 1

    def __init__(self, row: Row, group: Any) -> None:
        self.row, self.group = row, group
        self.path = dist.get_backend(group) if group is not None else "none"

    def buffer(self, shared: Any) -> Any:
        """The tensor that this row reduces in place; `shared` by all rows, unless it needs one of its own."""
        return shared

    def new_pass(self) -> None:
        """Said before the first site of each pass."""

    def all_reduce(self, tensor: Any) -> None:
        dist.all_reduce(tensor, group=self.group)

    def join_update(self, device: Any) -> None:
        """The current stream waits for what the call has left to another one."""

    def counters(self) -> dict[str, Any]:
        """calls_quantized, wire_bytes and forwarded (by reason) so far; empty for what is not echo."""
        return {}

    def wire_bytes(self, tensor: Any) -> int:
        """Sent by a rank in one call: a ring's 2 (P - 1) / P of the tensor, where nobody counts."""
        size = dist.get_world_size(self.group)
        return 2 * (size - 1) * tensor.nbytes // size

    def close(self) -> None:
        pass


class Nothing(Collective):
    """No call at all: the time of what follows it."""

    def all_reduce(self, tensor: Any) -> None:
        pass

    def wire_bytes(self, tensor: Any) -> int:
        return 0


class Echo(Collective):
    """A group of echo's own."""

    def __init__(self, row: Row, dtype: str, changes: dict[str, Any]) -> None:
        always = {"policy": "all"} if row.shipped else {"policy": "all", "min_bytes": 0, "dtypes": (dtype,)}
        self.options = Options(**(always | changes))
        super().__init__(row, dist.new_group(backend="echo", pg_options=self.options))
        self.sites = 2 if self.options.feedback else 1
        if row.look_ahead is not None:
            report._echo_of(self.group)._set_look_ahead(row.look_ahead)

    def new_pass(self) -> None:
        report.new_pass("forward", self.group)

    def join_update(self, device: Any) -> None:
        report._echo_of(self.group)._join_update(device)

    def counters(self) -> dict[str, Any]:
        return report.stats(self.group)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class Unfused(Echo):
    """The paper's "group" feedback as separate torch operations around a call without it [paper 5.1, table 3].

    x' = x + c; y = all_reduce(x'); u = x' - y / P; m_j <- b_j m_j + (1 - b_j) u; c = eta (a m_1 + (1 - a) m_2).
    Averages and x' are kept in the tensor's dtype. All of it is timed.
    """

    note = "feedback outside the call"

    def __init__(self, row: Row, dtype: str, changes: dict[str, Any]) -> None:
        super().__init__(row, dtype, changes)
        self.sites = 2
        self.first = True
        self.averages: tuple[Any, ...] = ()

    def buffer(self, shared: Any) -> Any:
        self.averages = tuple(torch.empty_like(shared) for _ in range(2))
        self.sent, self.correction = torch.empty_like(shared), torch.empty_like(shared)
        return shared

    def new_pass(self) -> None:
        super().new_pass()
        self.first = True

    def all_reduce(self, tensor: Any) -> None:
        chosen, (fast, slow) = self.options, self.averages
        assert chosen is not None
        if self.first:
            self.sent.copy_(tensor)
            fast.zero_()
            slow.zero_()
        else:
            torch.mul(fast, chosen.eta * chosen.a, out=self.correction)
            self.correction.add_(slow, alpha=chosen.eta * (1 - chosen.a))
            torch.add(tensor, self.correction, out=self.sent)
            tensor.copy_(self.sent)
        self.first = False
        super().all_reduce(tensor)
        residual = self.sent.sub_(tensor, alpha=1 / dist.get_world_size(self.group))
        fast.mul_(chosen.beta1).add_(residual, alpha=1 - chosen.beta1)
        slow.mul_(chosen.beta2).add_(residual, alpha=1 - chosen.beta2)

    def close(self) -> None:
        self.averages = ()
        super().close()


class DeepSpeed(Collective):
    """Two collectives around DeepSpeed's kernels."""

    note = "DeepSpeed's kernels, fp16 tensor of the same size, symmetric, fp16 sum, g=2048"

    def __init__(self, row: Row, group: Any, quantizer: Any) -> None:
        super().__init__(row, group)
        self.two = two_collective.DeepSpeedTwoCollective(quantizer, group, row.changes["bits"])

    def buffer(self, shared: Any) -> Any:
        if not two_collective.fits(shared.numel(), self.two.size):
            raise ValueError(f"row {self.row.name}: {shared.numel()} elements are not whole groups of 2048 per rank")
        return torch.empty_like(shared, dtype=torch.float16)

    def all_reduce(self, tensor: Any) -> None:
        self.two.all_reduce(tensor)

    def wire_bytes(self, tensor: Any) -> int:
        return self.two.wire_bytes(tensor.numel())


class TwoShot(Collective):
    """PyTorch's two-shot all-reduce over symmetric memory, CUDA only; the tensor lies in that memory."""

    note = "torch.ops.symm_mem, tensor in symmetric memory"

    def __init__(self, row: Row, group: Any) -> None:
        super().__init__(row, group)
        self.path = "symm_mem"
        self.memory: Any = None

    def buffer(self, shared: Any) -> Any:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.memory = symmetric_memory.empty(shared.numel(), dtype=shared.dtype, device=shared.device)
        symmetric_memory.rendezvous(self.memory, self.group.group_name)
        return self.memory

    def all_reduce(self, tensor: Any) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", self.group.group_name)

    def close(self) -> None:
        self.memory = None


class Matmul:
    """What follows the call in rows with a matrix multiplication: a square one in the tensor's dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        self.left, self.right = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        self.product = torch.empty(shape, dtype=dtype, device=device)

    def __call__(self) -> None:
        torch.mm(self.left, self.right, out=self.product)


def make(row: Row, dtype: str, inner_group: Any) -> Collective:
    """Collective over the ranks: all make the same rows in the same order."""
    if row.kind == "inner":
        return Collective(row, inner_group)
    if row.kind == "nothing":
        return Nothing(row, None)
    if row.kind == "two_shot":
        return TwoShot(row, inner_group)
    if row.kind == "unfused":
        return Unfused(row, dtype, row.changes)
    if row.kind == "two_collective":
        if quantizer := _deepspeed_on_all_ranks():
            return DeepSpeed(row, inner_group, quantizer)
        made = Echo(row, dtype, row.changes | {"feedback": False, "fabric": "wire"})
        made.note = "echo's kernels over the inner backend, chunks overlapped"
        return made
    return Echo(row, dtype, row.changes)


def _deepspeed_on_all_ranks() -> Any:
    """DeepSpeed's quantizer, if every rank has it; else None on all."""
    quantizer = two_collective.deepspeed_quantizer()
    have = torch.tensor([int(quantizer is not None)])
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    return quantizer if have.item() else None
