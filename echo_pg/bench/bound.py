"""By how much a correct result may differ from the exact sum, element by element, from what the quantizer rounds.

Per group of elements, in the quantizer's domain (rotated or not): lo and hi are the extremes, R = hi - lo, M = max(-lo,
hi), L = 2^b - 1, P ranks; the owner of a group is the rank that sums it [paper 4.1].

Half a step. s = ceil16(r / L) with r = R where the group straddles zero; else the range is widened towards zero until
it is M * L / (L + 64) wide, if it was narrower. ceil16 in bfloat16 adds less than 2^-7. A zero point that moves by at
most half a step (it is rounded where zero is to be exact) puts the extremes at most half a step outside the grid, where
they are clamped; so no element is off by more than

    h(R, M) = (1 + 2^-7) / (2 L) * max(R, M * L / (L + 64)).

First site of a pass. The owner adds P - 1 decoded copies to its own segment and quantizes the sum S' once:

    A  = sum of h(R_i, M_i) over the ranks that do not own the group,   |S' - S| <= A
    B1 = A + h(R_S + 2 A, M_S + A) + output rounding of the tensor's dtype.

Second site, same contributions. x'_i = x_i + c_i with c_i = k3 * u_i, where u_i is what NUMERICS.md calls the
residual: at most h_i where the rank sent, B1 - A where it owns ("local"), or M_i + (M_S + B1) / P ("group"). C_i bounds
|c_i|; c_i widens the range by at most 2 C_i. The corrections add up to at most sum C_i ("local"), and to -k3 * delta_1
("group"), so to k3 * B1 and what storing them lost:

    D  = |sum of c_i| + sum of h(R_i + 2 C_i, M_i + C_i) over the ranks that do not own the group
    B2 = D + h(R_S + 2 D, M_S + D) + output rounding.

Arithmetic in fp32: fewer than 2^10 roundings on the way of an element (the butterflies of a rotation included), each at
most 2^-24 of the largest contribution: SLACK. With rotation the error is rotated before it is compared, which undoes
the exit transform; the output's roundings of a run add up there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMS = 1 << 22  # elements that are widened to fp32 at a time; a multiple of every group size
SLACK = 2.0**-13  # twice the above: the second site adds corrections, none larger than the contributions
STORED = 2.0**-6  # relative: int8 or 16-bit state, coefficients rounded to fp32
Sum = Callable[[Tensor], Tensor]  # over the ranks


@dataclass(frozen=True)
class Extremes:
    """Per group, fp32 [groups]: extremes in the quantizer's domain, largest magnitude outside it."""

    lo: Tensor
    hi: Tensor
    plain_magnitude: Tensor

    @property
    def width(self) -> Tensor:
        return self.hi - self.lo

    @property
    def magnitude(self) -> Tensor:
        return torch.maximum(-self.lo, self.hi).clamp_min(0)


def extremes(flat: Tensor, group_size: int, run_elems: int) -> Extremes:
    """Of a flat tensor of any dtype; `run_elems` elements are rotated together, 0: none."""
    parts = []
    for chunk in flat.split(CHUNK_ELEMS):
        wide = chunk.float()
        full = wide.numel() // group_size * group_size
        groups = wide[:full].view(-1, group_size)
        plain = groups.abs().amax(1)
        if run_elems:
            groups = rotate(groups, run_elems)
        lo, hi = groups.amin(1), groups.amax(1)
        if full < wide.numel():  # a partial group: absent elements count for nothing, and it is not rotated
            rest = wide[full:]
            lo, hi = torch.cat([lo, rest.min()[None]]), torch.cat([hi, rest.max()[None]])
            plain = torch.cat([plain, rest.abs().max()[None]])
        parts.append((lo, hi, plain))
    return Extremes(*(torch.cat(values) for values in zip(*parts, strict=True)))


def rotate(groups: Tensor, run_elems: int) -> Tensor:
    """The entry transform of NUMERICS.md on fp32 [groups, group_size]: signs, then the Walsh-Hadamard matrix."""
    rows = groups.reshape(-1, run_elems)
    matrix = torch.ones(1, 1, device=groups.device)
    while matrix.shape[0] < run_elems:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    signs = torch.tensor([-1.0 if _fmix32(i + 1) & 1 else 1.0 for i in range(run_elems)], device=groups.device)
    return ((rows * signs) @ matrix).view_as(groups)


def _fmix32(value: int) -> int:
    """The finalizer of murmur3."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & 0xFFFFFFFF
    value ^= value >> 13
    value = value * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def half_step(width: Tensor, magnitude: Tensor, bits: int) -> Tensor:
    """h(R, M) of above."""
    levels = 2**bits - 1
    return (1 + 2.0**-7) / (2 * levels) * torch.maximum(width, magnitude * (levels / (levels + 64)))


@dataclass(frozen=True)
class Place:
    """Whose bound: one rank of a group, and how to add up over the group."""

    rank: int
    size: int
    sum_over_ranks: Sum

    def owned(self, groups: int, device: Any) -> Tensor:
        """Which of the groups this rank sums."""
        share = -(-groups // self.size)
        return torch.arange(groups, device=device) // share == self.rank


def limits(
    mine: Extremes, total: Extremes, options: Any, eps: float, place: Place, unfused: bool = False
) -> list[Tensor]:
    """B1 of every group and, with feedback, B2; fp32 [groups] each, equal on all ranks.

    mine, total: of this rank's contribution and of the exact sum. options: `echo_pg.Options` of the row. eps: of the
    tensor's dtype. unfused: "group" feedback around the call, whose x' is rounded to the tensor's dtype.
    """
    own = place.owned(mine.lo.numel(), mine.lo.device)
    everyone = place.sum_over_ranks
    slack = SLACK * everyone(mine.magnitude)

    outputs = max(1, options.run_elems)  # whose roundings meet in one element

    def after_owner(off: Tensor) -> tuple[Tensor, Tensor]:
        """(what the owner's own rounding and the output's add, the whole), `off` of S' from S given."""
        rounded = half_step(total.width + 2 * off, total.magnitude + off, options.bits)
        rounded = rounded + outputs * eps / 2 * (total.plain_magnitude + off + rounded)
        return rounded, off + rounded

    sent = half_step(mine.width, mine.magnitude, options.bits)
    rounded, first = after_owner(everyone(torch.where(own, 0.0, sent)) + slack)
    if not (options.feedback or unfused):
        return [first]

    fresh = options.eta * (options.a * (1 - options.beta1) + (1 - options.a) * (1 - options.beta2))  # k3
    gain = fresh * (1 + STORED)
    by_group = unfused or options.residual == "group"
    residual = mine.magnitude + (total.magnitude + first) / place.size if by_group else torch.where(own, rounded, sent)
    correction = gain * residual
    all_corrections = everyone(correction)
    added = gain * first + STORED * all_corrections if by_group else all_corrections
    if unfused:
        added = added + eps * everyone(mine.magnitude + correction)
    sent = half_step(mine.width + 2 * correction, mine.magnitude + correction, options.bits)
    _, second = after_owner(added + everyone(torch.where(own, 0.0, sent)) + slack)
    return [first, second]


def worst_ratio(result: Tensor, exact: Tensor, limit: Tensor, options: Any) -> float:
    """The largest error in units of its group's limit; at most 1 where the result is correct. NaN counts as infinite.

    The error is that of the quantizer's domain: rotated where the options say so.
    """
    group_size = options.group_size
    worst = 0.0
    for start in range(0, result.numel(), CHUNK_ELEMS):
        off = result[start : start + CHUNK_ELEMS].float() - exact[start : start + CHUNK_ELEMS]
        if options.run_elems:
            full = off.numel() // group_size * group_size
            off[:full] = rotate(off[:full].view(-1, group_size), options.run_elems).view(-1)
        off = off.abs()
        first = start // group_size
        allowed = limit[first : first + -(-off.numel() // group_size)].repeat_interleave(group_size)[: off.numel()]
        # Where nothing may be lost, nothing is: 0 / 0 is 0.
        ratio = torch.where(off == 0, 0.0, off / allowed).nan_to_num(nan=float("inf")).max().item()
        worst = max(worst, ratio)
    return worst


def relative_error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||, 2-norms in double."""
    off = norm = 0.0
    for ours, theirs in zip(result.split(CHUNK_ELEMS), exact.split(CHUNK_ELEMS), strict=True):
        off += (ours.double() - theirs.double()).square().sum().item()
        norm += theirs.double().square().sum().item()
    return (off / norm) ** 0.5 if norm else off**0.5
