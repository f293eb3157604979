"""What the statistics say was sent: 2(P-1)/P * N * w bytes per rank, plus padding accounted for to the byte.

w is bits/8 + parameter bytes/g per element. Padding is what the layout adds: segments rounded up to whole groups, tiles
to 16 bytes, and one 64-byte record per peer and call.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

RECORD_BYTES = 64
WIRE_TILE_ELEMS = 1 << 18  # elements of a segment that travel together, rounded up to whole groups

CASES = [
    {"bits": 4, "group_size": 128, "quantizer": "zero_aware"},
    {"bits": 4, "group_size": 128, "quantizer": "symmetric"},
    {"bits": 8, "group_size": 40, "quantizer": "asymmetric"},
    {"bits": 4, "group_size": 1024, "quantizer": "zero_aware"},
]
NUMELS = [1, 127, 128, 100_000, 2_000_003]


def run_cases(rank: int, size: int, fabric: str) -> list[dict[str, Any]]:
    import echo_pg

    found = []
    for case in CASES:
        for numel in NUMELS:
            options = echo_pg.Options(policy="all", min_bytes=0, feedback=False, fabric=fabric, **case)
            group = dist.new_group(backend="echo", pg_options=options)
            for _ in range(2):
                dist.all_reduce(torch.ones(numel, dtype=torch.bfloat16), group=group)
            found.append(echo_pg.stats(group))
            dist.destroy_process_group(group)
    return found


def group_bytes(case: dict[str, Any]) -> int:
    return case["group_size"] * case["bits"] // 8 + (2 if case["quantizer"] == "symmetric" else 4)


def ideal_bytes(case: dict[str, Any], numel: int, size: int) -> int:
    per_element = Fraction(group_bytes(case), case["group_size"])
    return math.ceil(Fraction(2 * (size - 1), size) * numel * per_element)


def tile_layout_bytes(case: dict[str, Any], numel: int, size: int, tile_groups: int) -> int:
    """Bytes of one call's tiles, cut as the wire composition cuts them."""
    left, total = math.ceil(math.ceil(numel / case["group_size"]) / size), 0
    while left > 0:
        groups = min(left, tile_groups)
        total += math.ceil(groups * group_bytes(case) / 16) * 16
        left -= groups
    return 2 * (size - 1) * total


@pytest.mark.parametrize("fabric", ("wire", "peer"))
@pytest.mark.parametrize("size", (2, 3))
def test_wire_bytes_are_the_formula_plus_padding(size: int, fabric: str) -> None:
    outcomes = run_ranks(run_cases, size, fabric, timeout=120)
    assert all(outcome == [stats | {"rank": rank} for stats in outcomes[0]] for rank, outcome in enumerate(outcomes))
    cases = [(case, numel) for case in CASES for numel in NUMELS]
    for (case, numel), stats in zip(cases, outcomes[0], strict=True):
        sent, padding = stats["wire_bytes"], stats["wire_padding_bytes"]
        assert sent - padding == 2 * ideal_bytes(case, numel, size), (case, numel)
        if fabric == "wire":
            tile_groups = math.ceil(WIRE_TILE_ELEMS / case["group_size"])
            per_call = tile_layout_bytes(case, numel, size, tile_groups) + (size - 1) * RECORD_BYTES
            assert sent == 2 * per_call, (case, numel)
        # Less than a group per rank for the segments, 16 bytes per tile, a record per peer.
        tiles = 2 + 2 * (size - 1) * math.ceil(numel / size / case["group_size"] / 8)
        most = 2 * size * group_bytes(case) + 16 * tiles + (size - 1) * RECORD_BYTES
        assert 0 <= padding <= 2 * most, (case, numel)
