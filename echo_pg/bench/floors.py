"""`python -m echo_pg bench floors`: how near the rows of `bench allreduce` on GPUs come to what links and memory allow.

Two floors, each as if the other cost nothing; a call that hides all of one behind the other takes the larger of both.

    link    bytes that a rank sends / bandwidth of a peer copy
    memory  bytes that a rank's own memory serves / bandwidth of a copy within the device. Of N elements: the tensor is
            read and written once, the state is read and written once, and codes that miss the second-level cache are
            stored and loaded, pushed by P - 1 ranks and gathered from all P:
            (2 (P - 1) + 2 P) / P * code bytes of the tensor
    update  what the update of a call with residual "group" moves on a stream of its own, by the same bandwidth: it
            reads the contribution and the codes that the call has kept, and reads and writes the state. The call then
            reads c alone, and keeps a copy of the contribution and the codes of P - 1 segments besides (its own are
            kept where they would lie anyway). A call that updates in its own kernel reads the tensor twice, since what
            is off is known only after the sum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..option_values import parse_bytes
from . import results
from .results import Record

# Measured between and within H200s of one host (18 NVLinks): 1 GiB one way, 2 GiB.
LINK_GBPS, COPY_GBPS = 389.0, 4200.0
COLUMNS = ["row", "median ms", "link ms", "memory ms", "larger floor / median", "update ms"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__.split("\n\n")[0].split(": ", 1)[1]
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="of bench allreduce --device cuda")
    parser.add_argument("--link", type=float, default=LINK_GBPS, metavar="GB/s", help="of a peer copy; %(default)s")
    parser.add_argument("--copy", type=float, default=COPY_GBPS, metavar="GB/s", help="within a GPU; %(default)s")
    parser.add_argument("--size", default="1GiB", help="default %(default)s")


def main(chosen: argparse.Namespace) -> int:
    try:
        size = parse_bytes(chosen.size)
        if not (chosen.link > 0 and chosen.copy > 0):
            raise ValueError(f"--link {chosen.link:g} and --copy {chosen.copy:g} must be more than 0")
        records = results.read(chosen.file)
    except (OSError, ValueError) as error:
        print(f"bench floors: {error}", file=sys.stderr)
        return 2
    rows = [
        describe(record, chosen.link, chosen.copy)
        for record in records
        if record["bytes"] == size and record["path"] == "peer" and record["device"] == "cuda"
    ]
    if not rows:
        print(f"bench floors: {chosen.file} has no row of {chosen.size} over GPUs' peer memory", file=sys.stderr)
        return 2
    print(results.grid([COLUMNS, *rows]))
    return 0


def describe(record: Record, link_gbps: float, copy_gbps: float) -> list[str]:
    """The cells of a row."""
    milliseconds = record["median_ms"]
    link = record["wire_bytes"] / link_gbps / 1e6
    in_call, after = memory_bytes(record)
    memory, update = in_call / copy_gbps / 1e6, after / copy_gbps / 1e6
    if record.get("then_update"):
        memory += update
    share = max(link, memory) / milliseconds
    cells = [record["label"], f"{milliseconds:.2f}", f"{link:.2f}", f"{memory:.2f}", f"{100 * share:.0f} %"]
    return [*cells, f"{update:.2f}" if update else ""]


def memory_bytes(record: Record) -> tuple[float, float]:
    """What the memory of one rank serves in a call and in the update that comes after it, see above."""
    import torch

    from .. import Options, build

    testing = build.extension().testing
    options, ranks, size = Options(**record["options"]), record["ranks"], record["bytes"]
    like = torch.empty(1 << 20, dtype=getattr(torch, record["dtype"]))
    state = testing.state_bytes(like, options.to_config()) * size / (like.numel() * like.itemsize)
    # A rank sends its share of codes to each peer twice, as contribution and as part of the sum.
    codes = record["wire_bytes"] * ranks / (2 * (ranks - 1))
    exchanged = (2 * (ranks - 1) + 2 * ranks) / ranks * codes
    if not (options.feedback and options.residual == "group"):
        return 2 * size + 2 * state + exchanged, 0
    if size < testing.deferred_update_bytes:
        return 3 * size + 2 * state + exchanged, 0
    c = state / (2 if options.a else 1)
    return 3 * size + c + exchanged + (ranks - 1) / ranks * codes, size + 2 * state + codes
