"""A small set of configurations in which every two options meet in every feasible pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, int]]  # two (factor, index of level)

FACTORS: dict[str, Sequence[Any]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "bits": (4, 8),
    "quantizer": ("zero_aware", "asymmetric", "symmetric"),
    "group_size": (16, 24, 40, 128, 136, 1000, 1024),
    "rotation_size": (0, 2, 8, 16, 128, 1024),  # 0: rotation="none"
    "scale_dtype": ("auto", "float16", "bfloat16"),
    "residual": ("local", "group", "off"),  # "off": feedback=False
    "state_dtype": ("auto", "tensor", "float32", "int8"),
    "averages": ("two", "one"),  # "one": a = 0, m1 does not exist
    "eta": (0.75, 0.9, 1.0),
    "size": (2, 3, 4, 8),
    "shape": ("one", "seven", "short", "full", "ragged", "empty", "thousands"),
    "clip": (1.0, 0.95),
    "tau": (0.125, 0.0, 1.0),
    "direction": ("forward", "backward"),
    "early_sites": (0, 2, 0.5),
    "rescale": ("auto", "on", "off"),
}
# Where an option has no effect it keeps its first level, so that no row spends a pair on it.
ONLY_WITH: dict[str, Callable[[Row], bool]] = {
    "state_dtype": lambda row: row.get("residual") != "off",
    "averages": lambda row: row.get("residual") != "off",
    "eta": lambda row: row.get("residual") != "off",
    "tau": lambda row: row.get("quantizer", "zero_aware") == "zero_aware",
    "early_sites": lambda row: row.get("direction") != "backward",
}


def allowed(row: Row) -> bool:
    """Whether a row, maybe with factors still missing, breaks no rule."""
    run, group_size = row.get("rotation_size", 0), row.get("group_size")
    if run and group_size and group_size % run:
        return False
    return all(row.get(name, FACTORS[name][0]) == FACTORS[name][0] or rule(row) for name, rule in ONLY_WITH.items())


def numel_of(row: Row) -> int:
    """Elements of a row's tensors: what `shape` means depends on the group size and the number of ranks."""
    g, size = row["group_size"], row["size"]
    return {
        "one": 1,
        "seven": 7,
        "short": g - 1,
        "full": 2 * size * g,  # two whole groups for every rank
        "ragged": (2 * size - 1) * g + 3,  # odd or even, the last rank's second group is partial
        "empty": g if size < 4 else (size + 1) * g,  # ranks at the end own nothing
        "thousands": 4999,
    }[row["shape"]]


def options_of(row: Row) -> Row:
    """Keyword arguments for echo_pg.Options and for the reference group."""
    same = ("bits", "quantizer", "group_size", "scale_dtype", "state_dtype", "eta", "clip", "tau")
    return {name: row[name] for name in (*same, "early_sites", "rescale")} | {
        "rotation": "hadamard" if row["rotation_size"] else "none",
        "rotation_size": row["rotation_size"],
        "feedback": row["residual"] != "off",
        "residual": "local" if row["residual"] == "off" else row["residual"],
        "a": 0.35 if row["averages"] == "two" else 0.0,
    }


def complete(
    row: Row, factors: Mapping[str, Sequence[Any]], rule: Callable[[Row], bool], rng: random.Random | None = None
) -> Row | None:
    """Some full allowed row that extends `row`, or None."""
    if not rule(row):
        return None
    missing = next((name for name in factors if name not in row), None)
    if missing is None:
        return row
    levels = list(factors[missing])
    if rng is not None:
        rng.shuffle(levels)
    extended = (complete(row | {missing: level}, factors, rule, rng) for level in levels)
    return next((full for full in extended if full is not None), None)


def pairs_of(row: Row, factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    items = [(name, list(factors[name]).index(row[name])) for name in factors if name in row]
    return {frozenset(pair) for pair in itertools.combinations(items, 2)}


def feasible_pairs(factors: Mapping[str, Sequence[Any]], rule: Callable[[Row], bool]) -> set[Pair]:
    found = set()
    for one, two in itertools.combinations(factors, 2):
        for i, j in itertools.product(range(len(factors[one])), range(len(factors[two]))):
            if complete({one: factors[one][i], two: factors[two][j]}, factors, rule):
                found.add(frozenset(((one, i), (two, j))))
    return found


def pairwise(
    factors: Mapping[str, Sequence[Any]] = FACTORS, rule: Callable[[Row], bool] = allowed, seed: int = 0
) -> list[Row]:
    """Rows that cover every feasible pair; equal arguments give equal rows.

    Greedy: a row starts from an uncovered pair, then factor by factor takes the level that covers most new pairs
    among those that can still be completed.
    """
    rng = random.Random(seed)
    uncovered = feasible_pairs(factors, rule)
    rows: list[Row] = []
    while uncovered:
        start = min(uncovered, key=sorted)
        row: Row = {name: factors[name][level] for name, level in sorted(start)}
        order = [name for name in factors if name not in row]
        rng.shuffle(order)
        for name in order:
            candidates = [row | {name: level} for level in rng.sample(list(factors[name]), len(factors[name]))]
            candidates = [candidate for candidate in candidates if complete(candidate, factors, rule)]
            row = max(candidates, key=lambda candidate: len(pairs_of(candidate, factors) & uncovered))
        uncovered -= pairs_of(row, factors)
        rows.append({name: row[name] for name in factors})
    return rows
