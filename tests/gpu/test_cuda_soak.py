"""A short soak on device tensors, over two streams, with replays; ci/soak 1200 cuda is the long one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "soak"))

import soak


def test_a_short_soak(record_property: Callable[[str, object], None]) -> None:
    """Of short epochs, so that memory is judged and a large tensor comes."""
    line = soak.soak_slice(3, calls=20_000, seconds=100, device="cuda", largest=1 << 24, epoch_calls=700)
    for name in ("calls", "mirrored", "replayed", "epochs", "groups"):
        record_property(name, line[name])
    for name, held in line["footprint_first"].items():
        record_property(f"{name}_growth", line["footprint_last"][name] - held)
    assert not line["problems"] and line["mirrored"] > 0 and line["replayed"] > 0, line
    assert line["epochs"] >= max(soak.FEWEST_EPOCHS, soak.LARGE_EVERY), line
