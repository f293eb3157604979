"""A short soak; ci/soak is the long one. And that its limits are limits: what is a step off is beyond them."""

from __future__ import annotations

import math
from typing import Any

import limits
import pytest
import schedule
import soak
import torch
from reference_group import RefGroup
from torch import Tensor


def test_a_short_soak() -> None:
    """Of many short epochs, as many as are judged whatever the machine's speed."""
    line = soak.soak_slice(
        9, calls=4000, seconds=60, device="cpu", largest=1 << 22, epoch_calls=150,
        fewest_epochs=soak.SHORT_SLICE_EPOCHS,
    )  # fmt: skip
    assert not line["problems"] and line["mirrored"] > 0, line
    assert line["epochs"] >= soak.SHORT_SLICE_EPOCHS, line


@pytest.mark.parametrize("options", schedule.PALETTE, ids=str)
def test_the_limits_hold_for_the_reference_and_are_not_loose(options: dict[str, object]) -> None:
    """Of long passes in any order; somewhere an element uses a good part of its limit."""
    import echo_pg

    generator = torch.Generator().manual_seed(1)
    pool = [[torch.randn(1100, generator=generator).bfloat16() for _ in range(2)] for _ in range(schedule.POOL)]
    sums = [torch.stack([x.float() for x in entry]).sum(0) for entry in pool]
    allowed = limits.limits(pool, sums, echo_pg.Options(**options))
    group = RefGroup(2, **options)
    used: list[Tensor] = []
    for site in range(30):
        entry = site * site % schedule.POOL
        off = (group.all_reduce(pool[entry]).output.float() - sums[entry]).abs()
        assert (off <= allowed[entry]).all()
        used.append((off / allowed[entry]).max())
    assert max(used) > 1 / looseness_of(echo_pg.Options(**options))


def looseness_of(options: Any) -> float:
    """How many times what normal numbers use of it a limit may be.

    Without rotation they use half of it and more: 4 leaves as much again. With it an element is off by the mean of as
    many errors as a run has elements; those are even over their limit's width, so that they add up to sqrt(3 * run)
    times less. Limits of "group" allow for corrections as large as contributions, which grow through the widths that
    follow from them, where normal numbers' cancel: 1/149 (4 bits) and 1/64 (8 bits, smaller groups) were used. There a
    limit tells that nothing grows without end, and the comparison with the reference what is wrong.
    """
    if options.residual == "group":
        return 200
    return 4 * math.sqrt(3 * options.run_elems) if options.rotation == "hadamard" else 4
