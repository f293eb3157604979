"""How what is sent grows from site to site under `residual="group"`, and the errors that sites make; on a real model.

With the paper's residual u = x' - Y/P a rank carries its contribution's distance from the mean along with the errors,
so x' = x + c grows, and with it the step of the quantizer. The group does not tell x', but each rank can follow it: x
is what goes into a call, Y what comes out, and the averages obey the recurrence of NUMERICS.md in the state's format.
With `residual="local"` u depends on codes, so there only the errors are told.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SiteRecorder(TorchDispatchMode):
    """Keeps (x, y) of every quantized all-reduce: x a copy of what went in, y the tensor that holds the result once the
    call is done, which a transformer without gradients does not write to again."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .. import report

        if func._schema.name != "c10d::allreduce_":
            if any(kind is not torch.Tensor and hasattr(kind, "placements") for kind in types):
                return NotImplemented  # a sharded tensor: let it become plain tensors and collectives first
            return func(*args, **(kwargs or {}))
        (tensor,) = args[0]
        given, before = tensor.clone(), report.stats(dist.group.WORLD)["calls_quantized"]
        result = func(*args, **(kwargs or {}))
        if report.stats(dist.group.WORLD)["calls_quantized"] > before:
            self.sites.append((given, tensor))
        return result


@torch.no_grad()
def measure(model: Any, windows: Tensor, chosen: Any) -> list[dict[str, float]]:
    """One forward pass over windows [n, length + 1]; per site, over all ranks: rms of x, and with the group residual
    rms of x' and how many times the range of its groups of elements is that of x; with diagnostics delta, rho and the
    partial sum of rho as rms. `chosen`: the Options of the group."""
    from .. import report

    with SiteRecorder() as recorder:
        model.model(input_ids=windows[:, :-1].to(model.device), use_cache=False)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    follower = GroupFollower(chosen, dist.get_world_size(), recorder.sites[0][0].dtype)
    follows = chosen.feedback and chosen.residual == "group" and chosen.rotation == "none"
    found = []
    for given, delivered in recorder.sites:
        x = given.flatten().float()
        sent = follower.next(x, delivered.flatten().float()) if follows else x
        sums = [x.square().mean(), sent.square().mean(), *(_mean_range(part, chosen.group_size) for part in (x, sent))]
        over_ranks = torch.stack(sums).double().cpu()
        dist.all_reduce(over_ranks)
        square, sent_square, ranges, sent_ranges = (over_ranks / dist.get_world_size()).tolist()
        site = {"x_rms": math.sqrt(square)}
        if follows:
            site |= {"sent_rms": math.sqrt(sent_square), "range_growth": sent_ranges / ranges}
        found.append(site)
    numel = recorder.sites[0][0].numel()
    for site, errors in zip(found, report.stats(dist.group.WORLD)["diagnostics"]["forward"], strict=True):
        for name in ("delta", "rho", "partial"):
            site[f"{name}_rms"] = errors[f"{name}_l2"] / math.sqrt(numel)
    return found


class GroupFollower:
    """x' of one rank, from x and the delivered sum, site after site of one pass."""

    def __init__(self, chosen: Any, size: int, dtype: torch.dtype) -> None:
        b1, b2, a, eta = chosen.beta1, chosen.beta2, chosen.a, chosen.eta
        self.decays = (b1, b2)
        self.gains = (1 - b1, eta * a * (b1 - b2), eta * (a * (1 - b1) + (1 - a) * (1 - b2)))
        self.size = size
        self.state_dtype = torch.float32 if chosen.state_dtype == "float32" else dtype
        self.correction: Tensor | None = None
        self.average: Tensor | None = None

    def next(self, x: Tensor, delivered: Tensor) -> Tensor:
        """x' of the next site; float32 [numel] in and out."""
        (b1, b2), (k1, k2, k3) = self.decays, self.gains
        if self.correction is None or self.average is None:
            sent = x
            residual = sent - delivered / self.size
            correction, average = k3 * residual, k1 * residual
        else:
            sent = x + self.correction
            residual = sent - delivered / self.size
            correction = b2 * self.correction + k2 * self.average + k3 * residual
            average = b1 * self.average + k1 * residual
        self.correction, self.average = (part.to(self.state_dtype).float() for part in (correction, average))
        return sent


def _mean_range(x: Tensor, group_size: int) -> Tensor:
    """Mean of max - min over whole groups of elements, to which the step is proportional."""
    groups = x[: len(x) // group_size * group_size].view(-1, group_size)
    return (groups.amax(1) - groups.amin(1)).mean()
