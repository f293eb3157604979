"""examples/plain_torch.py on two ranks, as its first line says to start it, with the options as shipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_plain_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/plain_torch.py"],
        cwd=ROOT, env=environment | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last, exact = map(float, re.findall(r"\d+\.\d+", done.stdout.splitlines()[0]))
    difference = float(re.search(r"steps: (\S+)", done.stdout).group(1))  # type: ignore[union-attr]
    assert last < first - 1 and difference < 0.01 * exact
    # 20 steps of 2 layers, each with 2 sums forward and 4 backward, of 2 MiB each; 4.25 of 16 bits are sent.
    assert "240 all-reduces quantized" in done.stdout
    assert "352.5 of 480.0 MiB saved" in done.stdout
    assert "4 bits" in done.stderr, "rank 0 says what it does"
