"""What a process has open, for tests that look for what is left behind."""

from __future__ import annotations

import contextlib
import gc
import re
from collections import Counter
from pathlib import Path


def held() -> Counter[str]:
    """What this process has open, and its mappings of shared memory."""
    gc.collect()
    found = [line.split(" ", 5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [name for name in found if "/dev/shm" in name]
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(re.sub(r"\d+", "", str(link.readlink())))
    return Counter(found)
