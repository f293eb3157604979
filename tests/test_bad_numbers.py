"""Numbers that break naive quantizers, through the public surface over real ranks: the documented result byte for byte
(tests/reference.py follows backend/core/NUMERICS.md), the same bytes on all ranks, no trace in the next pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import data
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_group import TWO_AVERAGES, RefGroup
from test_allreduce import digest, first_difference
from torch import Tensor

NUMEL = 3 * 128 * 5 + 77  # groups of every owner, and a partial last one


def uniform(values: Callable[[torch.dtype], list[float]]) -> Callable[[int, torch.dtype, torch.Generator], Tensor]:
    """Elements drawn from a few values."""

    def make(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
        table = torch.tensor(values(dtype), dtype=torch.float64).to(dtype)
        return table[torch.randint(len(table), (NUMEL,), generator=gen)]

    return make


def extremes(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    return [info.max, info.min, info.tiny, -info.tiny, info.smallest_normal, 1.0, -1.0, 0.0, info.max / 2]


def subnormals(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    steps = [info.smallest_normal * info.eps * k for k in (1, 2, 3, 7)]  # the smallest subnormal and multiples of it
    return [*steps, *[-s for s in steps], 0.0, -0.0]


def sparse_bad(value: float) -> Callable[[int, torch.dtype, torch.Generator], Tensor]:
    """Ordinary values with the bad one in one element of some groups of one rank."""

    def make(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
        x = torch.randn(NUMEL, generator=gen).to(dtype)
        if rank == 1:
            x[5], x[128 * 9 + 127], x[-1] = value, value, value
        return x

    return make


def opposite_infinities(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    x = torch.randn(NUMEL, generator=gen).to(dtype)
    x[::300] = math.inf if rank == 0 else -math.inf
    return x


def outlier_per_group(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    x = torch.randn(NUMEL, generator=gen) * 1e-3
    x[torch.arange(7, NUMEL, 128)] = 3e4
    return x.to(dtype)


def zeros_on_some_ranks(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    return torch.randn(NUMEL, generator=gen).to(dtype) if rank == 1 else torch.zeros(NUMEL, dtype=dtype)


def nan_payloads(rank: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """NaN with other bits than the canonical ones, which alone may be delivered."""
    x = torch.randn(NUMEL, generator=gen).to(dtype)
    bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[::500] = {torch.float32: -0x7FFFF, torch.bfloat16: -0x7B, torch.float16: 0x7D55}[dtype]
    assert x[0].isnan()
    return x


KINDS: dict[str, Callable[[int, torch.dtype, torch.Generator], Tensor]] = {
    "nan": sparse_bad(math.nan),
    "inf": sparse_bad(math.inf),
    "-inf": sparse_bad(-math.inf),
    "inf against -inf": opposite_infinities,
    "nan of other bits": nan_payloads,
    "subnormals": uniform(subnormals),
    "negative zeros": uniform(lambda _: [-0.0]),
    "zeros of both signs": uniform(lambda _: [0.0, -0.0]),
    "extremes of the format": uniform(extremes),
    "all equal": uniform(lambda _: [0.1]),
    "all equal to the largest": uniform(lambda dtype: [torch.finfo(dtype).max]),
    "huge and tiny": uniform(lambda dtype: [torch.finfo(dtype).max / 4, -torch.finfo(dtype).max / 4, 1e-6, -1e-6]),
    "one outlier per group": outlier_per_group,
    "zeros on some ranks": zeros_on_some_ranks,
}

# What changes how a bad number travels: rotation spreads it over its run, fp16 scales overflow sooner, "group" keeps
# contributions in the state, rescaling takes the largest magnitude of all ranks.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("bfloat16", TWO_AVERAGES),
    ("float16", {}),
    ("float32", {}),
    ("bfloat16", {"residual": "group", "state_dtype": "tensor"}),
    ("float16", {"rescale": "on", "residual": "group", "state_dtype": "float32"}),
    ("float32", {"scale_dtype": "float16", "quantizer": "symmetric", "rotation_size": 32}),
    ("bfloat16", {"bits": 8, "quantizer": "asymmetric", "clip": 0.95, "rotation": "none"}),
]


def contribution(kind: str, rank: int, dtype_name: str, site: int) -> Tensor:
    gen = torch.Generator().manual_seed(1000 * list(KINDS).index(kind) + 10 * rank + site)
    return KINDS[kind](rank, getattr(torch, dtype_name), gen)


def clean(dtype_name: str, size: int, site: int) -> list[Tensor]:
    return data.contributions("activations", size, NUMEL, getattr(torch, dtype_name), site=site)


def run_kinds(rank: int, size: int, fabric: str) -> list[list[Tensor]]:
    """Per setting and kind: a clean site, a bad one and a clean one, then a pass of two clean sites."""
    import echo_pg

    found = []
    for dtype_name, options in SETTINGS:
        group = dist.new_group(
            backend="echo",
            pg_options=echo_pg.Options(policy="all", min_bytes=0, dtypes=(dtype_name,), fabric=fabric, **options),
        )
        for kind in KINDS:
            results = []
            echo_pg.new_pass("forward", group)
            for site in range(5):
                if site == 3:
                    echo_pg.new_pass("forward", group)
                x = contribution(kind, rank, dtype_name, site) if site == 1 else clean(dtype_name, size, site)[rank]
                dist.all_reduce(x, group=group)
                results.append(x)
            found.append(results)
        assert echo_pg.stats(group)["fault"] == ""
        dist.destroy_process_group(group)
    return found


def check_kind(kind: str, dtype_name: str, options: dict[str, Any], by_rank: list[list[Tensor]]) -> None:
    size = len(by_rank)
    group = RefGroup(size, **options)
    where = f"{kind}, {dtype_name}, {options}"
    for site in range(5):
        if site == 3:
            group.new_pass()
        x = (
            [contribution(kind, rank, dtype_name, site) for rank in range(size)]
            if site == 1
            else clean(dtype_name, size, site)
        )
        expected = group.all_reduce(x).output
        for rank, results in enumerate(by_rank):
            if digest(results[site]) != digest(expected):
                pytest.fail(f"rank {rank}, site {site}: {first_difference(results[site], expected)}; {where}")
        bad = torch.stack([t.isfinite().logical_not() for t in x]).any(0)
        assert not (expected.isfinite() & bad).any(), f"a contribution that is not finite shows: {where}"
    # The feedback of a pass with a bad site is gone with its pass: two sites of a fresh group give the same bytes.
    fresh = RefGroup(size, **options)
    for site in (3, 4):
        again = fresh.all_reduce(clean(dtype_name, size, site)).output
        assert digest(by_rank[0][site]) == digest(again), f"a bad site reaches the next pass: {where}"


@pytest.mark.parametrize(("size", "fabric"), [(2, "peer"), (3, "wire"), (4, "peer")])
def test_bad_numbers_give_the_documented_bytes_and_leave_no_trace(size: int, fabric: str) -> None:
    outcomes = run_ranks(run_kinds, size, fabric, timeout=120)
    index = 0
    for dtype_name, options in SETTINGS:
        for kind in KINDS:
            check_kind(kind, dtype_name, options, [outcome[index] for outcome in outcomes])
            index += 1
    assert index == len(outcomes[0])
