"""A short soak on device tensors, over two streams, with replays; ci/soak 1200 cuda is the long one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "soak"))

import soak


def test_a_short_soak() -> None:
    line = soak.soak_slice(3, calls=20_000, seconds=60, device="cuda", largest=1 << 24)
    assert not line["problems"] and line["calls"] > 2000 and line["mirrored"] > 0 and line["replayed"] > 0, line
