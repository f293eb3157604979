"""Deterministic test data: contributions of P ranks that look like the real thing, and that hit every special case."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHANNELS = 64  # the flattened tensor is read as rows of this many channels


def student_t(n: int, gen: torch.Generator, freedom: int = 3) -> Tensor:
    """Heavy tails, as hidden states and gradients have."""
    chi2 = torch.randn(freedom, n, generator=gen).square().sum(0)
    return torch.randn(n, generator=gen) / torch.sqrt(chi2 / torch.tensor(float(freedom)))


def per_channel(n: int, values: Tensor) -> Tensor:
    return values.repeat(math.ceil(n / CHANNELS))[:n]


def activations(n: int, gen: torch.Generator) -> Tensor:
    """Heavy tails, three channels 100 times larger, an offset per channel, zeros of both signs, a run of zeros."""
    scale = torch.ones(CHANNELS)
    scale[torch.randperm(CHANNELS, generator=gen)[:3]] = 100.0
    x = student_t(n, gen) * per_channel(n, scale) + per_channel(n, torch.randn(CHANNELS, generator=gen))
    kind = torch.rand(n, generator=gen)
    x[kind < 0.02] = 0.0
    x[kind < 0.01] = -0.0
    x[n // 3 : n // 3 + n // 8] = 0.0  # whole groups, where groups are small enough
    return x


def gradients(n: int, gen: torch.Generator) -> Tensor:
    """Magnitudes from 1e-9 to 1e-5, which leave the range of fp16."""
    return student_t(n, gen) * 10.0 ** (-9.0 + 4.0 * torch.rand(n, generator=gen))


def constant(n: int, gen: torch.Generator) -> Tensor:
    """Runs of 96 equal values of either sign."""
    values = torch.randn(math.ceil(n / 96), generator=gen) * 4.0
    return values.repeat_interleave(96)[:n].clone()


def positive(n: int, gen: torch.Generator) -> Tensor:
    return 3.0 + torch.rand(n, generator=gen) * (torch.arange(n) % 7)


def negative(n: int, gen: torch.Generator) -> Tensor:
    return -torch.rand(n, generator=gen) * 10.0 ** (torch.arange(n) // 50 % 5).float() - 1e-3


def nearly_one_sided(n: int, gen: torch.Generator) -> Tensor:
    """Zero lies a fraction of a step inside the range, on either side: where the zero point blends."""
    x = torch.rand(n, generator=gen) * 15.0
    x[torch.arange(n) % 11 == 0] = -0.2 * torch.rand(1, generator=gen).item()
    return x * torch.where(torch.arange(n) // 100 % 2 == 0, 1.0, -1.0)


def subnormal(n: int, gen: torch.Generator) -> Tensor:
    """Around and below the smallest normal fp32 number."""
    return torch.randn(n, generator=gen) * 2.0 ** (-150.0 + 30.0 * torch.rand(n, generator=gen))


def huge(n: int, gen: torch.Generator) -> Tensor:
    """Near the largest fp32 number: in some groups max - min overflows, in others only the sum over ranks does."""
    x = torch.randn(n, generator=gen).clamp(-3, 3) * torch.tensor(1.1e38)
    return torch.where(torch.arange(n) // 200 % 2 == 0, x, x * torch.tensor(0.25))


def broken(n: int, gen: torch.Generator) -> Tensor:
    """Activations with a few NaN and Inf."""
    x = activations(n, gen)
    where = torch.randint(n, (3,), generator=gen)
    x[where] = torch.tensor([math.nan, math.inf, -math.inf])
    return x


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "activations": activations,
    "gradients": gradients,
    "constant": constant,
    "positive": positive,
    "negative": negative,
    "nearly_one_sided": nearly_one_sided,
    "subnormal": subnormal,
    "huge": huge,
    "broken": broken,
}


def contributions(
    kind: str, size: int, numel: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, site: int = 0
) -> list[Tensor]:
    """One flat tensor per rank; equal arguments give equal bits. In fp16 large values become Inf, tiny ones 0."""
    tensors = []
    for rank in range(size):
        gen = torch.Generator().manual_seed(((seed * 1009 + site) * 64 + rank) * 16 + list(KINDS).index(kind))
        tensors.append(KINDS[kind](numel, gen).to(dtype))
    return tensors


class Adversary:
    """Contributions that make every rounding error of every site as large as it can be, in a chosen direction.

    One group of elements per rank, fp32, no rotation, 4 bits. What is chosen is x' and the owner's sum: both lie
    FRACTION of a step above (sign +1) or below a point of the grid, which is held still by two elements that lie on
    its ends. The error of a rounding is then -sign * FRACTION * step, for all ranks and for the sum at once, so
    delta = -sign * FRACTION * (sum of the steps). As x' = x + c the adversary must know the correction c.

    mode "same": sign +1 at every site. "alternating": the sign changes from site to site. "growing": as "same", but
    the ends are new elements at each site, ones whose correction points outward, so that x' spans more than x does;
    in the first sites, while the corrections build up, all values are smaller.
    """

    FRACTION = 0.5 - 2.0**-8
    STEP = 0.125  # of a contribution
    SUM_STEP = 1.0
    WARM_UP = 8  # sites of mode "growing", on a grid of 7/8 the step

    def __init__(self, size: int, group_size: int, sites: int, mode: str, *, symmetric: bool = False, seed: int = 0):
        assert mode in ("same", "alternating", "growing")
        assert mode != "growing" or group_size >= 2 * sites + 8
        self.size, self.group_size, self.sites, self.mode = size, group_size, sites, mode
        self.bottom, self.top = -7.0, 7.0 if symmetric else 8.0
        self.gen = torch.Generator().manual_seed(seed)

    def victims(self) -> slice:
        """Elements that are never an end."""
        return slice(2 * self.sites if self.mode == "growing" else 2, None)

    def contributions(self, site: int, c: Tensor) -> list[Tensor]:
        """Raw contributions, given what will be added to them, [P, P, group_size]."""
        sign = torch.full((self.group_size,), -1.0 if self.mode == "alternating" and site % 2 else 1.0)
        if self.mode == "growing":
            sign[1 : 2 * self.sites : 2] = -1.0  # future bottoms are pushed down
        shrink = 0.875 if self.mode == "growing" and site < self.WARM_UP else 1.0
        rounded, sent = self.target(sign, site, 5, self.STEP * shrink)
        _, total = self.target(sign, site, 3, self.SUM_STEP * shrink)
        x = sent.repeat(self.size, self.size, 1)
        for owner in range(self.size):
            x[owner, owner] = total - (self.size - 1) * rounded
        return list((x - c).view(self.size, -1).unbind(0))

    def target(self, sign: Tensor, site: int, inner: int, step: float) -> tuple[Tensor, Tensor]:
        """Grid points of at most `inner` steps, and the values FRACTION of a step away; the two ends on the grid."""
        top, bottom = (2 * site, 2 * site + 1) if self.mode == "growing" else (0, 1)
        points = torch.randint(-inner, inner + 1, (self.group_size,), generator=self.gen).float()
        values = points + self.FRACTION * sign
        points[top] = values[top] = self.top
        points[bottom] = values[bottom] = self.bottom
        return points * step, values * step
