"""What a campaign injects: one fault of one rank at one stage, from a seed, covering every combination in turn."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

ACTIONS = ("kill", "stop", "exit", "throw")
# Where a process is struck. These by a timer or between calls; "waiting": in a call in which it waits for all others,
# who come later. On a device its kernel does.
BROAD_STAGES = ("creating", "before", "within", "waiting", "forwarded")
# Exactly, by the extension's hook.
MAKING = ("created", "mapped")  # of peer memory
STEPS = (*MAKING, "begun", "pushed", "reduced", "gather seen", "updated", "ended", "closing")
# Over peer memory of devices a call is one kernel: what the host does before it and after it.
DEVICE_STEPS = (*MAKING, "begun", "launched", "updated", "ended", "closing")
# What a rank does that goes on.
DIVERGENCES = ("late", "skip", "skip the last", "size", "dtype", "bits", "shape", "order", "forward")

CALLS = 3  # then they start over, in a pass of their own
TIMED_CALLS = 900  # at most, where a timer strikes
TIMEOUT = 2.0  # seconds, of groups whose faults are noticed by it
LONG_TIMEOUT = 60.0  # of groups whose faults must be noticed in spite of it
HOLD = 1.0  # seconds by which the others come later than a victim that is struck while it waits
UPDATED_LATER = (1 << 23) + 40  # elements of a call whose state a kernel of its own brings up to date, on devices
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
        return short if (waits and not self.ends_process) or self.is_noticed_late else LONG_TIMEOUT

    @property
    def numel(self) -> int:
        """Of a call: with groups of 1024 in 8 bits and 4 MiB of buffers several tiles, where tiles matter."""
        if self.is_updated_later:
            return UPDATED_LATER
        return 600_000 if self.stage in STEPS + DEVICE_STEPS or self.stage == "within" else 60_000

    @property
    def is_updated_later(self) -> bool:
        """Struck between a call on a device and the update of its state, which comes where calls are large, alike, and
        in bfloat16 and 4 bits, from the second one on."""
        return self.device == "cuda" and self.fabric == "peer" and self.stage == "updated"

    @property
    def is_noticed_late(self) -> bool:
        """Also an exit, by the time-out alone: what is under the wire on devices does not look at processes."""
        return self.device == "cuda" and self.fabric == "wire"

    @property
    def bits(self) -> int:
        return 4 if self.is_updated_later else 8

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
    steps = {"peer": STEPS if device == "cpu" else DEVICE_STEPS, "wire": STEPS}
    struck = [
        (action, stage, fabric, False)
        for fabric in ("peer", "wire")
        for action, stage in itertools.product(ACTIONS, BROAD_STAGES + steps[fabric])
        if not (fabric == "wire" and stage in MAKING)
        and not (action == "throw" and stage in ("closing", "within", "waiting"))  # what is waited in throws nothing
        and not (device == "cuda" and stage == "forwarded")
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
        and not (device == "cuda" and (stage == "forwarded" or diagnostics or action == "forward"))
        # Gloo, which carries the codes where ranks share a GPU, ends a process that gets less than it waits for.
        and not (device == "cuda" and fabric == "wire" and action in ("size", "skip"))
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
    size = chance.choice((2, 3, 3, 4) if device == "cpu" else (2, 2, 3))
    in_tile = stage in ("pushed", "reduced", "gather seen", "updated")
    in_call = in_tile or stage in ("begun", "ended", "before", "call", "forwarded", "within", "waiting", "launched")
    last = CALLS - (1 if action == "skip" else 0)  # a skipped call shows at the next one
    tiles = 2 if fabric == "wire" or size > 3 else 4
    victim = chance.randrange(size)
    # A store whose process is stopped answers nobody, and torch's clients wait for it without a limit.
    stores = ("launcher", "launcher", "file", "launcher" if action == "stop" and victim == 0 else "rank 0")
    tile = chance.randrange(tiles) * in_tile if fabric == "peer" or size == 2 else 0
    call = CALLS - 1 if action == "skip the last" else chance.randrange(last) * in_call
    found = Injection(
        number=number,
        seed=seed,
        action=action,
        stage=stage,
        fabric=fabric,
        diagnostics=diagnostics,
        size=size,
        victim=victim,
        call=call,
        tile=tile if device == "cpu" else 0,
        after=chance.uniform(0.0, 0.06 if stage == "creating" else 0.03),
        store=chance.choice(stores),
        residual=chance.choice(("local", "group")),
        dtype=chance.choice(("bfloat16", "float16")),
        device=device,
    )
    if stage == "waiting":  # not in what the first call does before it
        return replace(found, call=max(call, 1))
    if found.is_updated_later:
        return replace(found, call=max(call, 1), residual="group", dtype="bfloat16")
    return found
