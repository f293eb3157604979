"""echo_pg.all_reduce and new_pass as an inference engine calls them: a prompt and tokens, several groups, several calls
under way; byte for byte as the reference says, whatever policy and min_bytes say, and exact where that is asked for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ranks import run_ranks
from reference_group import RefGroup
from test_allreduce import digest
from test_backend import contribution

SITES, HIDDEN = 6, 128
PASSES = (32, 1, 1, 1)  # tokens per pass: the prompt, then one by one
GROUPS: tuple[dict[str, Any], ...] = ({}, {"bits": 8, "rotation": "none"})


def seed(turn: int, site: int, group: int) -> int:
    return (turn * SITES + site) * len(GROUPS) + group


def run_engine(rank: int, size: int) -> tuple[list[str], list[dict[str, int]]]:
    """Sums of all passes, in the order of turn, site and group."""
    import echo_pg

    groups = [dist.new_group(backend="echo", pg_options=echo_pg.Options(policy="off", **o)) for o in GROUPS]
    found = []
    for turn, tokens in enumerate(PASSES):
        for group in groups:
            echo_pg.new_pass("forward", group)
        for site in range(0, SITES, 2):
            given = [
                [contribution(rank, tokens * HIDDEN, seed(turn, site + i, g)).view(tokens, HIDDEN) for g in range(2)]
                for i in range(2)
            ]
            # Two calls per group are under way at a time: each goes to a lane of its own.
            works = [
                echo_pg.all_reduce(given[i][g], groups[g], async_op=True) for i in range(2) for g in range(len(groups))
            ]
            for work in works:
                work.wait()
            found += [digest(given[i][g].flatten()) for i in range(2) for g in range(len(groups))]
    return found, [echo_pg.stats(group)["passes"] for group in groups]


def test_prompt_and_tokens_over_two_groups() -> None:
    size = 2
    outcomes = run_ranks(run_engine, size)
    references = [RefGroup(size, **options) for options in GROUPS]
    expected = []
    for turn, tokens in enumerate(PASSES):
        for reference in references:
            reference.new_pass()
        for site in range(SITES):
            for g, reference in enumerate(references):
                given = [contribution(rank, tokens * HIDDEN, seed(turn, site, g)) for rank in range(size)]
                expected.append(digest(reference.all_reduce(given, lane=site % 2).output))
    for found, passes in outcomes:
        assert found == expected
        assert passes == [{"forward": len(PASSES), "backward": 0, "recompute": 0}] * 2


def run_exact(rank: int, size: int) -> dict[str, int]:
    """Sums in groups of the default options, at a size that the policy would quantize."""
    import echo_pg

    inner, group = dist.new_group(backend="gloo"), dist.new_group(backend="echo")
    given = contribution(rank, 1 << 20, 1).view(-1, HIDDEN)
    expected, block, outside, later = (given.clone() for _ in range(4))
    dist.all_reduce(expected, group=inner)
    with echo_pg.exact():
        echo_pg.all_reduce(block, group)
        echo_pg.all_reduce(later, group, async_op=True).wait()
    assert block.equal(expected) and later.equal(expected)
    assert echo_pg.stats(group)["calls_quantized"] == 0
    echo_pg.all_reduce(outside, group)
    return {
        "same outside": outside.equal(expected),
        "quantized": echo_pg.stats(group)["calls_quantized"],
        **{reason: found["calls"] for reason, found in echo_pg.stats(group)["forwarded"].items()},
    }


def test_sums_in_an_exact_block_are_exact() -> None:
    assert run_ranks(run_exact, 2) == 2 * [{"same outside": False, "quantized": 1, "exact()": 2}]


def test_with_echo_off_every_sum_is_exact() -> None:
    assert run_ranks(run_exact, 2, env={"ECHO_OFF": "1"}) == 2 * [
        {"same outside": True, "quantized": 0, "policy off": 3}
    ]
