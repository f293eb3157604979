"""A communicator of the reference: options as users give them, passes, and the state slots between sites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from reference import FORMATS, Codec, Feedback, Site, State, all_reduce
from torch import Tensor

# The numeric fields of echo_pg.Options.
DEFAULTS: dict[str, Any] = {
    "bits": 4,
    "group_size": 128,
    "quantizer": "zero_aware",
    "rotation": "hadamard",
    "rotation_size": 0,
    "scale_dtype": "auto",
    "tau": 0.125,
    "clip": 1.0,
    "feedback": True,
    "residual": "local",
    "eta": 0.9,
    "a": 0.0,
    "beta1": 0.7,
    "beta2": 0.0,
    "state_dtype": "auto",
    "early_sites": 0,
    "early_bits": 8,
    "rescale": "auto",
}


# Two averages with the paper's coefficients, and no rotation.
TWO_AVERAGES: dict[str, Any] = {"rotation": "none", "eta": 0.75, "a": 0.35, "beta1": 0.7, "beta2": 0.3}


class RefGroup:
    """Simulates all `size` ranks. `options` are those of DEFAULTS."""

    def __init__(self, size: int, **options: Any) -> None:
        assert options.keys() <= DEFAULTS.keys(), sorted(options.keys() - DEFAULTS.keys())
        self.size = size
        self.options = DEFAULTS | options
        self._slots: dict[tuple[str, int, int, torch.dtype], State | None] = {}
        self._sites: dict[str, int] = {}  # of the running pass, by direction
        self._last_sites: dict[str, int] = {}  # of the last completed pass

    def codec(self, dtype: torch.dtype) -> Codec:
        o = self.options
        largest = o["group_size"] & -o["group_size"]
        run = (o["rotation_size"] or largest) if o["rotation"] == "hadamard" else 0
        scale_dtype = o["scale_dtype"]
        if scale_dtype == "auto":
            scale_dtype = "float16" if dtype == torch.float16 else "bfloat16"
        return Codec(o["bits"], o["group_size"], o["quantizer"], run, scale_dtype, o["tau"], o["clip"])

    def feedback(self, dtype: torch.dtype) -> Feedback:
        o = self.options
        state_dtype = o["state_dtype"]
        if state_dtype == "auto":
            state_dtype = "int8" if o["residual"] == "local" else "tensor"
        if state_dtype == "tensor":
            state_dtype = next(name for name, known in FORMATS.items() if known == dtype)
        return Feedback(o["feedback"], o["residual"], o["eta"], o["a"], o["beta1"], o["beta2"], state_dtype)

    def new_pass(self, direction: str = "forward") -> None:
        """The next site of `direction` is a first site, for every lane, numel and dtype."""
        self._slots = {slot: state for slot, state in self._slots.items() if slot[0] != direction}
        if self._sites.get(direction):
            self._last_sites[direction] = self._sites[direction]
        self._sites[direction] = 0

    def all_reduce(
        self, contributions: Sequence[Tensor], direction: str = "forward", *, no_grad: bool = False, lane: int = 0
    ) -> Site:
        """One site of the running pass. `no_grad`: a forward pass that may use early-site 8-bit."""
        assert len(contributions) == self.size
        dtype = contributions[0].dtype
        codec = self.codec(dtype)
        if no_grad and self._is_early(direction):
            codec = replace(codec, bits=self.options["early_bits"])
        automatic = codec.scale_dtype == "float16" and direction == "backward"
        slot = (direction, lane, contributions[0].numel(), dtype)
        site = all_reduce(
            contributions,
            codec,
            self.feedback(dtype),
            self._slots.get(slot),
            rescale=self.options["rescale"] == "on" or (self.options["rescale"] == "auto" and automatic),
        )
        self._slots[slot] = site.state
        self._sites[direction] = self._sites.get(direction, 0) + 1
        return site

    def _is_early(self, direction: str) -> bool:
        count = self.options["early_sites"]
        if direction != "forward":
            return False
        if isinstance(count, float):
            if direction not in self._last_sites:
                return True  # the length of a pass is not known yet
            count = math.floor(count * self._last_sites[direction])
        return self._sites.get(direction, 0) < count
