"""The schedule of a soak: from a seed, equal on all ranks, epochs of groups that are made, used and destroyed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from reference_group import TWO_AVERAGES

POOL = 4  # entries per kind of tensor
LARGEST = 64 << 20  # elements
MIRRORED_LARGEST = 20_000  # elements; the reference takes a millisecond for as many

# Options beside the fabric; the limits assume nothing of the coefficients of feedback but eta.
PALETTE: tuple[dict[str, Any], ...] = (
    {},
    {"bits": 8},
    {"feedback": False},
    {"bits": 8, "feedback": False, "group_size": 32, "rotation": "none"},
    TWO_AVERAGES | {"residual": "group"},
    TWO_AVERAGES | {"bits": 8, "residual": "group", "group_size": 64},
    TWO_AVERAGES,
    {"rotation_size": 32, "group_size": 64, "bits": 8},
    TWO_AVERAGES | {"quantizer": "symmetric", "bits": 8},
    {"quantizer": "asymmetric", "state_dtype": "float32"},
    TWO_AVERAGES | {"state_dtype": "tensor", "group_size": 256},
    {"scale_dtype": "float16", "rescale": "on"},
)
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Kind:
    """Of a tensor: what entries of the pool are made for."""

    numel: int
    dtype: str


@dataclass(frozen=True)
class Call:
    kind: Kind
    entry: int
    burst: int = 0  # calls that are in flight together have one number; 0: waited for at once
    starts_pass: bool = False


@dataclass
class GroupUse:
    """A group and its calls, in the order of one thread."""

    ranks: tuple[int, ...]
    options: dict[str, Any]
    fabric: str
    mirrored: bool  # compared with the reference, byte for byte
    calls: list[Call] = field(default_factory=list)


@dataclass
class Epoch:
    uses: list[GroupUse]
    threads: bool  # each group is used by a thread of its own; else calls of all groups are mixed
    mixing: int  # seed of the mixture


def size_of(chance: random.Random) -> int:
    """Small ones mostly, every power of two in between, some odd."""
    numel = int(2 ** chance.triangular(0, 20, 6))
    return max(1, numel + chance.choice((0, 0, 1, -1, 3)))


class Schedule:
    """Endless; `kinds` is what its pool needs, `large` a kind that comes rarely."""

    def __init__(self, seed: int, size: int, largest: int, fabrics: tuple[str, ...]) -> None:
        self.size, self.fabrics = size, fabrics
        self.chance = random.Random(f"soak {seed}")
        self.kinds = [Kind(size_of(self.chance), self.chance.choice(DTYPES)) for _ in range(14)]
        self.large = Kind(int(2 ** self.chance.uniform(21, math.log2(largest))) if seed % 8 else largest, "bfloat16")

    def epoch(self, calls: int, with_large: bool) -> Epoch:
        chance = self.chance
        uses = [self._use(chance, calls) for _ in range(chance.choice((1, 2, 2, 3)))]
        if with_large:
            uses[0].mirrored = False
            uses[0].calls[len(uses[0].calls) // 2 : 0] = [Call(self.large, chance.randrange(2)) for _ in range(2)]
        return Epoch(uses, chance.random() < 0.3, chance.getrandbits(32))

    def _use(self, chance: random.Random, calls: int) -> GroupUse:
        whole = tuple(range(self.size))
        ranks = whole
        if self.size > 2 and chance.random() < 0.4:
            ranks = tuple(sorted(chance.sample(whole, chance.randrange(2, self.size))))
        mirrored = chance.random() < 0.06
        some = chance.sample(self.kinds, 5)
        if mirrored:
            some = [kind for kind in some if kind.numel <= MIRRORED_LARGEST] or [Kind(1000, "bfloat16")]
        use = GroupUse(ranks, chance.choice(PALETTE), chance.choice(self.fabrics), mirrored)
        total = calls // 10 if mirrored else calls
        # Calls take as long as their elements: the more of them, the fewer calls.
        while len(use.calls) < total:
            use.calls += self._pass(chance, some)
        return use

    def _pass(self, chance: random.Random, some: list[Kind]) -> list[Call]:
        weights = [1 / (1 + kind.numel / 10_000) for kind in some]
        calls: list[Call] = []
        for _ in range(chance.randrange(4, 40)):
            burst = chance.randrange(2, 6) if chance.random() < 0.15 else 1
            number = chance.getrandbits(30) + 1 if burst > 1 else 0
            for kind in chance.choices(some, weights, k=burst):
                calls.append(Call(kind, chance.randrange(POOL), number, starts_pass=not calls))
        return calls
