"""How far a result may be from the exact sum, whatever calls of the same pool came before it in its pass.

As in echo_pg.bench.bound, of which this is the case of arbitrary many sites: per group of elements lo and hi are the
extremes in the quantizer's domain, R = hi - lo, M = max(-lo, hi), and h(R, M) is half a step. c_i is what rank i adds
to its contribution, and |c_i| <= C_i = eta * (1 + STORED) * max |u_i|, since averages do not exceed what is averaged.
Contributions come from a pool, so that R_i and M_i of all earlier sites are at most their maxima over the pool.

    sent:  U_i = h(R_i + 2 C_i, M_i + C_i),    owner:  rounded = h(R_S + 2 D, M_S + D) + output rounding

"local": u_i is at most U_i where the rank sent and `rounded` where it owns; the corrections add up to at most sum C_i.
"group": u_i is at most M_i + C_i + (M_S + B) / P, the corrections add up to what the last site was off, at most
eta * B, and what storing lost. In both

    D = |sum of corrections| + sum of U_i over the ranks that do not own the group + SLACK,    B = D + rounded,

a contraction that is iterated to its fixed point. With rotation B bounds the error of the rotated domain; the exit
transform averages over a run, so that no element of the result is off by more either, and rounds to the tensor's dtype
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echo_pg.bench.bound import SLACK, STORED, extremes

ITERATIONS = 1000  # at most: "group" with 4 bits shrinks by a twentieth per step
CONVERGED = 2.0**-20  # relative; what remains is far below SLACK
EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}


def half_step(width: Tensor, magnitude: Tensor, options: Any) -> Tensor:
    """Half a quantization step at most; see echo_pg.bench.bound, and NUMERICS.md for the symmetric quantizer."""
    levels = 2**options.bits - 1
    if options.quantizer == "symmetric":
        return (1 + 2.0**-7) / 2 * magnitude / (2 ** (options.bits - 1) - 1)
    return (1 + 2.0**-7) / (2 * levels) * torch.maximum(width, magnitude * (levels / (levels + 64)))


def limits(pool: Sequence[Sequence[Tensor]], sums: Sequence[Tensor], options: Any) -> list[Tensor]:
    """Per entry of the pool the limit of every element, fp32 [numel].

    pool: per entry the contributions of all ranks, flat, of one dtype and numel; sums: their exact sums, fp32.
    """
    g, run = options.group_size, options.run_elems
    size, numel, dtype = len(pool[0]), pool[0][0].numel(), pool[0][0].dtype
    eps = EPS[dtype]
    mine = [[extremes(x, g, run) for x in entry] for entry in pool]
    total = [extremes(x, g, run) for x in sums]
    width = torch.stack([torch.stack([e.width for e in entry]) for entry in mine]).amax(0)  # [ranks, groups]
    magnitude = torch.stack([torch.stack([e.magnitude for e in entry]) for entry in mine]).amax(0)
    sum_width = torch.stack([e.width for e in total]).amax(0)
    sum_magnitude = torch.stack([e.magnitude for e in total]).amax(0)
    sum_plain = torch.stack([e.plain_magnitude for e in total]).amax(0)
    groups = sum_width.numel()
    share = -(-groups // size)
    own = torch.arange(groups)[None] // share == torch.arange(size)[:, None]
    slack = SLACK * magnitude.sum(0)

    gain = options.eta * (1 + STORED) if options.feedback else 0.0
    limit = torch.zeros(groups)
    correction = torch.zeros_like(width)
    for _ in range(ITERATIONS if options.feedback else 1):
        sent = half_step(width + 2 * correction, magnitude + correction, options)
        corrections = correction.sum(0)
        if options.residual == "group":
            corrections = gain * limit + STORED * corrections
        off = corrections + torch.where(own, 0.0, sent).sum(0) + slack
        rounded = half_step(sum_width + 2 * off, sum_magnitude + off, options)
        rounded = rounded + eps / 2 * (sum_plain + off + rounded)
        grown = off + rounded
        done = bool(((grown - limit) <= CONVERGED * grown).all())
        limit = grown
        residual = torch.where(own, rounded, sent)
        if options.residual == "group":
            residual = magnitude + correction + (sum_magnitude + limit) / size
        correction = gain * residual
        if done:
            break
    return [limit.repeat_interleave(g)[:numel] for _ in pool]
