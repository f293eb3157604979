"""What a campaign injects: one fault of one rank at one stage, from a seed, covering every combination in turn."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass
from typing import Any

ACTIONS = ("kill", "stop", "exit", "throw")
# Where a process is struck. The first four by a timer or between calls, the others exactly, by the extension's hook.
BROAD_STAGES = ("creating", "before", "within", "forwarded")
STEPS = ("created", "mapped", "begun", "pushed", "reduced", "gather seen", "updated", "ended", "closing")
# What a rank does that goes on.
DIVERGENCES = ("late", "skip", "skip the last", "size", "dtype", "bits", "shape", "order", "forward")

CALLS = 3  # then they start over, in a pass of their own
TIMED_CALLS = 900  # at most, where a timer strikes
TIMEOUT = 2.0  # seconds, of groups whose faults are noticed by it
LONG_TIMEOUT = 60.0  # of groups whose faults must be noticed in spite of it
PATIENCE = 5.0  # seconds, beyond the time-out, or after an exit


@dataclass(frozen=True)
class Injection:
    """One fault. `stage` is a stage or step where a process is struck, or "call" for what a rank does otherwise."""

    number: int
    seed: int
    action: str  # of ACTIONS or DIVERGENCES
    stage: str
    fabric: str
    diagnostics: bool
    size: int
    victim: int
    call: int
    tile: int
    after: float  # seconds, for what a timer does
    store: str  # "launcher", "file" or "rank 0": who keeps the rendezvous
    residual: str
    dtype: str
    device: str = "cpu"

    @property
    def ends_process(self) -> bool:
        return self.action in ("kill", "exit")

    @property
    def timeout(self) -> float:
        """Of the group under test: long wherever it must not be what ends the call."""
        waits = self.action in ("stop", "late", "skip", "skip the last", "order", "forward")
        waits = waits or (self.action == "throw" and self.stage in ("before", "forwarded"))
        short = TIMEOUT if self.device == "cpu" else 2 * TIMEOUT
        return short if waits and not self.ends_process else LONG_TIMEOUT

    @property
    def numel(self) -> int:
        """Of a call: with groups of 1024 in 8 bits and 4 MiB of buffers several tiles, where tiles matter."""
        return 600_000 if self.stage in STEPS or self.stage == "within" else 60_000

    @property
    def timed(self) -> bool:
        if self.action == "throw":
            return False
        return self.stage in ("creating", "within") or (self.stage == "forwarded" and self.action in ACTIONS)

    @property
    def forwarded(self) -> bool:
        return self.stage == "forwarded"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def combinations(device: str = "cpu") -> list[tuple[str, str, str, bool]]:
    """(action, stage, fabric, diagnostics) of every kind of fault."""
    steps = STEPS if device == "cpu" else ()
    struck = [
        (action, stage, fabric, False)
        for action, stage, fabric in itertools.product(ACTIONS, BROAD_STAGES + steps, ("peer", "wire"))
        if not (fabric == "wire" and stage in ("created", "mapped"))  # steps of peer memory alone
        and not (action == "throw" and stage in ("closing", "within"))  # destruction throws nothing
        and not (device == "cuda" and (stage == "forwarded" or fabric == "wire"))
    ]
    diverging = [
        (action, stage, fabric, diagnostics)
        for action, stage, fabric, diagnostics in itertools.product(
            DIVERGENCES, ("call", "forwarded"), ("peer", "wire"), (False, True)
        )
        # What is forwarded is compared with diagnostics alone, and has neither bits nor a fabric.
        if not (
            stage == "forwarded" and (not diagnostics or fabric == "wire" or action not in ("size", "dtype", "shape"))
        )
        and not (action == "bits" and diagnostics)
        and not (device == "cuda" and (stage == "forwarded" or diagnostics or fabric == "wire" or action == "forward"))
    ]
    return struck + diverging


def choose(number: int, seed: int, device: str = "cpu") -> Injection:
    """Injection `number` of the campaign with this seed; a campaign of n covers the n first combinations of a shuffled
    list, then starts over with other details."""
    kinds = combinations(device)
    order = random.Random(f"{seed}/{number // len(kinds)}")
    order.shuffle(kinds)
    action, stage, fabric, diagnostics = kinds[number % len(kinds)]
    chance = random.Random(f"{seed}/{number}/details")
    size = chance.choice((2, 3, 3, 4)) if device == "cpu" else 2
    in_tile = stage in ("pushed", "reduced", "gather seen", "updated")
    in_call = in_tile or stage in ("begun", "ended", "before", "call", "forwarded", "within")
    last = CALLS - (1 if action == "skip" else 0)  # a skipped call shows at the next one
    tiles = 2 if fabric == "wire" or size > 3 else 4
    victim = chance.randrange(size)
    # A store whose process is stopped answers nobody, and torch's clients wait for it without a limit.
    stores = ("launcher", "launcher", "file", "launcher" if action == "stop" and victim == 0 else "rank 0")
    return Injection(
        number=number,
        seed=seed,
        action=action,
        stage=stage,
        fabric=fabric,
        diagnostics=diagnostics,
        size=size,
        victim=victim,
        call=CALLS - 1 if action == "skip the last" else chance.randrange(last) * in_call,
        tile=chance.randrange(tiles) * in_tile if fabric == "peer" or size == 2 else 0,
        after=chance.uniform(0.0, 0.06 if stage == "creating" else 0.03),
        store=chance.choice(stores),
        residual=chance.choice(("local", "group")),
        dtype=chance.choice(("bfloat16", "float16")),
        device=device,
    )
