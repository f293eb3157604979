"""Values of options: how an environment variable's text is read, and what counts as a number."""

import math
import re
import struct
from typing import Any

TRUE_WORDS, FALSE_WORDS = ("1", "true", "on", "yes"), ("0", "false", "off", "no", "")
COUNT_LIMIT = 1 << 62  # of what the extension counts in 64 bits
AUTO = "auto"
_UNITS = {"": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


def parse_boolean(text: str) -> bool:
    if text.lower() in TRUE_WORDS + FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    raise ValueError("use 1 or 0")


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise ValueError("use a number of bytes, or a number with KiB, MiB or GiB")
    return int(found[1]) * _UNITS[found[2]]


def parse_bytes_or_auto(text: str) -> int | str:
    if text.strip().lower() == AUTO:
        return AUTO
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO}") from None


def parse_count_or_fraction(text: str) -> int | float:
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else float(text)


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def is_unicode(text: str) -> bool:
    """False where an environment variable was no UTF-8, whose bytes Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_float32(value: Any) -> bool:
    """Whether a number is finite also after rounding to the fp32 that kernels take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return abs(value) < 3.4e38


def to_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
