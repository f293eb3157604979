"""A short soak on device tensors, over two streams, with replays; ci/soak 1200 cuda is the long one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "soak"))

import soak


def test_a_short_soak(record_property: Callable[[str, object], None]) -> None:
    """Of short epochs, as many as are judged whatever the machine's speed: two ranks that share an H200 make 175 calls
    of a rank in a second, an epoch in 4.5 s; on one half as fast it takes 110 s in all."""
    line = soak.soak_slice(
        3, calls=20_000, seconds=90, device="cuda", largest=1 << 24, epoch_calls=350,
        fewest_epochs=soak.SHORT_SLICE_EPOCHS,
    )  # fmt: skip
    for name in ("calls", "mirrored", "replayed", "epochs", "groups"):
        record_property(name, line[name])
    for name, held in line["footprint_first"].items():
        record_property(f"{name}_growth", line["footprint_last"][name] - held)
    assert not line["problems"] and line["mirrored"] > 0 and line["replayed"] > 0, line
    assert line["epochs"] >= soak.SHORT_SLICE_EPOCHS, line
