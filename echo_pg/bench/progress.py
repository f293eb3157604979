"""A line on stderr that says how far a long run is."""

from __future__ import annotations

import sys
import time

_WIDTH = 24
_QUIET_S = 20.0  # between lines where they cannot be overwritten


class Bar:
    """On a terminal one line that is overwritten; elsewhere a line now and then."""

    def __init__(self, label: str, total: int, enabled: bool = True) -> None:
        self.label, self.total, self.enabled = label, total, enabled
        self.terminal = sys.stderr.isatty()
        self.at, self.began, self.shown, self.said = 0, time.monotonic(), 0, time.monotonic()

    def step(self, note: str = "") -> None:
        """One more of `total` is done."""
        self.at += 1
        now = time.monotonic()
        if not self.enabled or (not self.terminal and now - self.said < _QUIET_S):
            return
        self.said = now
        full = _WIDTH * self.at // self.total
        left = (now - self.began) / self.at * (self.total - self.at)
        text = f"{self.label} [{'#' * full}{'.' * (_WIDTH - full)}] {self.at}/{self.total} {note} {left:.0f} s left"
        if self.terminal:
            print("\r" + text.ljust(self.shown), end="", file=sys.stderr, flush=True)
            self.shown = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def done(self) -> None:
        """Clear the line."""
        if self.enabled and self.terminal:
            print("\r" + " " * self.shown + "\r", end="", file=sys.stderr, flush=True)
