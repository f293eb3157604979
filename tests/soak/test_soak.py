"""A short soak; ci/soak is the long one. And that its limits are limits: what is a step off is beyond them."""

from __future__ import annotations

import limits
import pytest
import schedule
import soak
import torch
from reference_group import RefGroup
from torch import Tensor


def test_a_short_soak() -> None:
    line = soak.soak_slice(5, calls=12_000, seconds=15, device="cpu", largest=1 << 21)
    assert not line["problems"] and line["calls"] > 1000, line


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
    looseness = 40 if options.get("residual") == "group" else 8 if options.get("rotation") else 4
    assert max(used) > 1 / looseness
