"""Fuzzes the targets: for long with atheris (`pip install atheris`), which is led by coverage, or for some rounds
by seeded mutation alone, as the tests do.

    python tests/fuzz/fuzz.py --seconds 120            every target in turn, atheris
    python tests/fuzz/fuzz.py --rounds 100000 --only record
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Of the targets, which are imported where atheris watches.
NAMES = ("options", "environment", "record", "report", "handle")
TOKENS = (
    b"null",
    b'"',
    b"{",
    b"}",
    b":",
    b"[" * 40,
    b"1e999",
    b"-",
    b" ",
    b"\n",
    b"NaN",
    b"fingerprint",
    b"\xff",
    b"0",
    b"9" * 30,
)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A few edits: bytes changed, inserted, removed and doubled."""
    text = bytearray(data)
    for _ in range(1 + chance.randrange(5)):
        at = chance.randrange(len(text) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            text[at:at] = bytes([chance.randrange(256)])
        elif kind == 1:
            text[at:at] = chance.choice(TOKENS)
        elif kind == 2:
            del text[at : at + 1 + chance.randrange(4)]
        elif kind == 3 and at < len(text):
            text[at] ^= 1 << chance.randrange(8)
        else:
            text[at:at] = text[chance.randrange(len(text) + 1) :][:20]
    return bytes(text)


def mutate_for(name: str, rounds: int, seed: int = 0) -> dict[str, int]:
    """Inputs tried and accepted. What a target accepts joins the inputs that mutation starts from."""
    from fuzz_targets import TARGETS

    target, seeds = TARGETS[name]
    chance, pool, accepted = random.Random(f"{name} {seed}"), list(seeds), 0
    for data in seeds:
        target(data)
    for _ in range(rounds):
        data = mutate(chance.choice(pool), chance)
        if target(data):
            accepted += 1
            if len(pool) < 200:
                pool.append(data)
    return {"inputs": rounds, "accepted": accepted}


def lead_by_coverage(name: str, seconds: int) -> None:
    """Does not return: libFuzzer ends the process, with an error if a target raised."""
    import atheris

    with atheris.instrument_imports(include=["echo_pg", "json"]):
        from fuzz_targets import TARGETS
    target, seeds = TARGETS[name]
    corpus = HERE / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(data)

    def run(data: bytes) -> None:
        target(data)

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-print_final_stats=1", "-timeout=10", str(corpus)], run)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=0, help="per target, with atheris")
    parser.add_argument("--rounds", type=int, default=0, help="per target, without")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        lead_by_coverage(given.only, given.seconds)
    names = [given.only] if given.only else NAMES
    status = 0
    for name in names:
        start = time.monotonic()
        if given.rounds:
            print(json.dumps({"target": name, **mutate_for(name, given.rounds)}), flush=True)
            continue
        command = [sys.executable, __file__, "--inside", "--only", name, "--seconds", str(given.seconds or 60)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("stat::number_of_executed_units")]
        inputs = int(found[-1].split()[-1]) if found else 0
        report = {
            "target": name,
            "inputs": inputs,
            "seconds": round(time.monotonic() - start),
            "failed": done.returncode != 0,
        }
        print(json.dumps(report), flush=True)
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
