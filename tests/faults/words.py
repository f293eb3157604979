"""What an error must name: the rank that raises it and its operation, what it waited for, and the rank at fault. As
whole phrases in their places, since words like "reports" and "waiting for" stand in most errors, in what others report
too."""

from __future__ import annotations

import re

from injections import Injection

ELEMENTS = r"\d+ elements, \w+"
STAGES = "copying the contribution|exchange|copying the result|comparing plans|preparing the call"
EXACT = rf"exact all_reduce number \d+ \({ELEMENTS}; [^;]+\) of group '[^']*' failed(?: \(comparing plans\))?: "
OPERATION = (
    rf"(?:quantized all_reduce number \d+ \({ELEMENTS}\) of group '[^']*' failed \((?:{STAGES})\): "
    rf"|a quantized all_reduce over (?:peer memory|the wire) failed on the device: |{EXACT}"
    r"|(?:this group|group '[^']*') cannot be created: )"
)
BEFORE = r"(?:this group has failed and does not resume; make a new one\. First failure: )?(?:echo: )?"
# Where a rank ends because another one has said what ended it, that one's words follow.
RELAY = r"(?:rank \d+ reports: |a peer reports, rank \d+: |waiting for the others, told to stop by rank \d+: )"
PLACE = r"\(rank \d+ waited in (?:push|gather), lane \d+, expected ticket [0-9a-f]+, saw [0-9a-f]+\)"
CALLS = r"rank \d+ calls an? (?:quantized|exact) all_reduce of \[[\d, ]+\] \w+ \([^;]+?\)"
CALLED = r"rank \d+ called \(number \d+ after \d+ exact ones, numel \d+, [^()]*\)"
THROWN = "an exception that a test asked for"
# Forwarded calls fail in Gloo's words, with the line of its source.
GLOO = r"(?:\[\S+\.cc:\d+\] \w|Application timeout caused pair closure)"


def opening(rank: int | str, size: int, operation: str = OPERATION) -> str:
    return rf"rank {rank} of {size}: {operation}"


def exit_of(rank: int) -> str:
    return rf"the process of rank {rank} has exited"


def waited_for(victim: int) -> str:
    """What ended the operation, in the place of the error that says so."""
    exited = exit_of(victim)
    return "|".join(
        (
            rf"{exited} {PLACE}",
            rf"{exited}(?:; |$)",
            rf"(?:{exited}, and )?the store no longer answers rank \d+ after \d+ ms \(",
            rf"rank \d+ did not come within \d+ ms {PLACE}",
            rf"rank \d+(?:, \d+)* did not come within \d+ ms \((?:timed out after \d+ ms|{exited})",
            r"waiting for the ranks' descriptions of this call: .",
            r"waiting for the (?:codes|sums) of all ranks for tile \d+ of \d+: .",
            r"(?:making the inner group for \w+ tensors: \w+: rank \d+ of \d+: group '[^']*' cannot be created: )?"
            r"waiting for the connections of all ranks \((?:pass|wire), Gloo\): .",
            r"rank \d+ waited: (?:all \d+ ranks came, but rank 0 gave no verdict|\d+ of \d+ ranks did not come "
            rf"\(rank [\d, ]+\)|(?:{exited}; )?the store no longer answers rank \d+) after \d+\.\d s "
            r"\(time-out [\d.]+ s\): ",
            rf"rank \d+ is in another call {PLACE}",
            rf"ranks disagree: {CALLS}, {CALLS}",
            rf"ranks disagree on a quantized all_reduce: {CALLED}, {CALLED}",
            r"ranks must agree: bits is \d on rank 0 and \d on rank \d+\.",
            rf"the group was aborted by rank {victim}(?:; |$)",
            rf"(?:fabric='peer' was asked for, but )?rank {victim}: {THROWN}",
            rf"rank {victim}: pg_options must be ",
        )
    )


def at_fault(it: Injection) -> str:
    """The rank whose fault it is, as such."""
    rank = it.victim
    if it.ends_process:
        return rf"\b{exit_of(rank)}\b"
    return "|".join(
        (
            rf"\brank (?:\d+, )*{rank}(?:, \d+)* did not come within \d+ ms",
            rf"ranks did not come \(rank (?:\d+, )*{rank}\b",
            rf"\brank {rank} gave no verdict",
            rf"\brank {rank} reports nothing \(",
            rf"(?:\brank {rank} reports|\ba peer reports, rank {rank}|\btold to stop by rank {rank}): "
            rf"{BEFORE}{opening(rank, it.size)}",
            # Of two that are in different calls each says it of the other.
            rf"\brank {rank} is in another call {PLACE}|\brank \d+ is in another call \(rank {rank} waited ",
            rf"\brank {rank} (?:calls an? (?:quantized|exact) all_reduce of|called \(number) ",
            rf"\bthe group was aborted by rank {rank}(?:; |$)",
            rf"\bbits is \d on rank 0 and \d on rank {rank or r'[1-9]'}\.",
            rf"\brank {rank}: (?:{THROWN}|pg_options must be )",
        )
    )


def decisions(it: Injection) -> dict[str, str]:
    """Where one rank forwards what the others quantize, every rank's error, the victim's too, says who did which."""
    if it.action != "forward":
        return {}
    others = "|".join(str(other) for other in range(it.size) if other != it.victim)
    return {
        f"that rank {it.victim} forwarded": rf"\brank {it.victim}(?: of {it.size}:| calls an) exact all_reduce\b",
        "who quantized": rf"\brank (?:{others})(?: of {it.size}:| calls a) quantized all_reduce\b",
    }


def required(it: Injection, rank: int) -> dict[str, str]:
    """By what it is: the pattern that must be found in the error of this rank."""
    if rank == it.victim:
        return decisions(it)
    own, relayed = rf"\A{BEFORE}{opening(rank, it.size)}", rf"{RELAY}{BEFORE}"
    reasons = (
        rf"{own}(?:{relayed}{opening(r'[0-9]+', it.size)})*(?:{waited_for(it.victim)})",
        rf"{own}{relayed}{opening(it.victim, it.size)}{THROWN}",
        rf"\A{opening(rank, it.size, EXACT)}{GLOO}",
    )
    return {
        f"its own rank {rank} and operation": own,
        "what it waited for": "|".join(reasons),
        f"rank {it.victim} as the one at fault": at_fault(it),
    } | decisions(it)


def missing_words(it: Injection, rank: int, text: str) -> list[str]:
    """What the error of a rank fails to name."""
    return [
        f"rank {rank}: the error does not name {what}: {text}"
        for what, pattern in required(it, rank).items()
        if not re.search(pattern, text)
    ]
