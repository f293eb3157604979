"""What echo says on its own: one line when a group first quantizes, one when it ends, a warning when it never does.
ECHO_LOG=off|info|debug.

The C++ side reports events with their numbers; the wording is here.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from . import options

logger = logging.getLogger("echo_pg")

_LEVELS = {"off": logging.CRITICAL + 1, "info": logging.INFO, "debug": logging.DEBUG}
_SEVERITIES = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class _Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is at that moment, so that a redirected stream is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("[echo] %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr


def connect(extension: Any) -> None:
    """Set the level from ECHO_LOG, give the logger a handler unless the program has one, and take the extension's
    events."""
    logger.setLevel(_LEVELS[options.log_level()])
    if not logger.handlers:
        logger.addHandler(_Stderr())
        logger.propagate = False
    extension.set_log_callback(on_event)
    extension.set_log_calls(logger.isEnabledFor(logging.DEBUG))


def on_event(event: str, payload: dict[str, Any]) -> None:
    """Called by the extension, from any thread."""
    say = _EVENTS.get(event)
    if say is None:
        logger.debug("%s %s", event, payload)
    else:
        say(payload)


def byte_size(count: float) -> str:
    """12345678 -> '11.8 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def _call(p: dict[str, Any]) -> None:
    several = f" and {p['tensors'] - 1} more" if p["tensors"] > 1 else ""
    where = {"none": "outside a pass"}.get(p["context"], f"in {p['context']}")
    logger.debug(
        "group %s: all_reduce %s %s %s%s %s: %s",
        _name(p), p["op"], p["dtype"], p["shape"], several, where, p["reason"] if not p["quantized"] else "quantized",
        extra={"call": p},
    )  # fmt: skip


def _first_quantized(p: dict[str, Any]) -> None:
    rotation = f", rotation {p['rotation_size']}" if p.get("rotation_size") else ""
    feedback = f"on ({byte_size(p.get('state_bytes', 0))} of state)" if p.get("feedback") else "off"
    logger.info(
        "group %s: quantizing over %d ranks (fabric %s, %d bits, %s%s, feedback %s, %s)",
        _name(p), p["size"], p["fabric"], p["bits"], p["quantizer"], rotation, feedback, p.get("device", "cpu"),
    )  # fmt: skip


def _destroyed(p: dict[str, Any]) -> None:
    quantized = f"{p['calls_quantized']} calls quantized ({byte_size(p['bytes_quantized'])})"
    forwarded = f"{p['calls_forwarded']} forwarded ({byte_size(p['bytes_forwarded'])})"
    # Programs make many groups, and most of some never carry an all-reduce; where they make groups of one rank, each
    # rank would have a line. A program of one rank wants to know.
    silent = p["calls_quantized"] + p["calls_forwarded"] == 0 or (p["size"] == 1 and _several_ranks())
    level = logging.DEBUG if silent else logging.INFO
    logger.log(level, "group %s ends: %s, %s%s", _name(p), quantized, forwarded, _because(p))


def _nothing_quantized(p: dict[str, Any]) -> None:
    # With sequence parallelism the all-reduces that remain are losses and norms: their reasons would mislead.
    scattered = p.get("reduce_scatters")
    because = f": sequence parallelism is not quantized (reduce-scatter {scattered})" if scattered else _because(p)
    logger.warning("group %s: nothing was quantized in three passes%s", _name(p), because)


def _notice(p: dict[str, Any]) -> None:
    logger.log(_SEVERITIES.get(p.get("level", "info"), logging.INFO), "%s", p["message"])


def _several_ranks() -> bool:
    launched = options.launched_ranks()
    return launched is not None and launched[1] > 1


def _name(p: dict[str, Any]) -> str:
    """The group's description; torch gives none to a group inside the checking wrapper of its debug mode."""
    return p["group"] or "(unnamed)"


def _because(p: dict[str, Any]) -> str:
    reasons = p.get("reasons") or []
    return ": " + ", ".join(f"{reason} ({calls})" for reason, calls in reasons[:3]) if reasons else ""


_EVENTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "call": _call,
    "first_quantized": _first_quantized,
    "destroyed": _destroyed,
    "nothing_quantized": _nothing_quantized,
    "notice": _notice,
}
