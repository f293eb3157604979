"""Records of `bench accuracy` as JSON lines, the tables and plots made from them, and its progress line.

A record is one part ("scores", "greedy" or "growth") of one row. What compares rows (the share of the uncompensated
gap that is closed) is computed when a table is made, from records of the same circumstances.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .accuracy_rows import PLAIN, REFERENCE, ROWS, SETS
from .results import append, bus_factor, by, grid, key

Record = dict[str, Any]
# What must be equal for two records to belong to one table.
SAME_RUN = (
    "device", "device_name", "gpus", "ranks", "dtype", "length", "batch", "model", "texts", "torch", "transformers",
    "source", "commit", "variables",
)  # fmt: skip
_GREEDY = ("prompts", "prompt_tokens", "new_tokens")

__all__ = ["Progress", "append", "gap_closed", "key_of", "show", "tables"]


def key_of(record: Record) -> str:
    """Equal for records of one measurement: circumstances, row, part and options."""
    return key(record, (*SAME_RUN, "row", "part", "options", *(_GREEDY if record["part"] == "greedy" else ())))


# --- what is computed from several rows ---


def gap_closed(
    row: Sequence[float], plain: Sequence[float], exact: Sequence[float], tokens: int
) -> tuple[float, float]:
    """The share of the gap between `plain` and `exact` that `row` closes, in perplexity, and its standard error.

    The three are negative log-likelihoods [windows], sums in nats over the same windows, of `tokens` tokens together.
    The error is a jackknife's over windows: it says how the share depends on which windows were read, all else equal.
    NaN where the windows' differences of `plain` and `exact` are not positive by more than three standard errors of
    their mean: then there is nothing to close.
    """
    count = len(exact)
    per_window = tokens / count

    def perplexities(without: int | None) -> tuple[float, float, float]:
        kept = count - (without is not None)
        sums = [sum(nll) - (0.0 if without is None else nll[without]) for nll in (row, plain, exact)]
        mine, theirs, best = (math.exp(total / (kept * per_window)) for total in sums)
        return mine, theirs, best

    mine, theirs, best = perplexities(None)
    if count < 2:
        return ((theirs - mine) / (theirs - best) if theirs > best else math.nan), math.nan
    lost = [theirs - best for theirs, best in zip(plain, exact, strict=True)]
    if statistics.fmean(lost) <= 3 * statistics.stdev(lost) / math.sqrt(count):
        return math.nan, math.nan
    left_out = [perplexities(window) for window in range(count)]
    shares = [(theirs - mine) / (theirs - best) for mine, theirs, best in left_out]
    return (theirs - mine) / (theirs - best), _jackknife(shares)


def _jackknife(left_out: Sequence[float]) -> float:
    """Standard error, from the values with one window left out each."""
    count, mean = len(left_out), math.fsum(left_out) / len(left_out)
    return math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in left_out))


def times_less(record: Record) -> float:
    """How many times fewer bytes a rank sent at the quantized sites than a ring all-reduce of 16 bits does; NaN where
    nothing was quantized."""
    ring = bus_factor(record["ranks"]) * record["bytes_quantized"]
    return ring / record["wire_bytes"] if record["wire_bytes"] else math.nan


# --- tables ---


def tables(made: list[Record]) -> list[tuple[str, str]]:
    """(title, text) of every set that has rows, of each run in `made`; then errors per site."""
    found = []
    for run in by(made, *SAME_RUN):
        scores = _unique(record for record in run if record["part"] == "scores")
        greedy = _unique(record for record in run if record["part"] == "greedy")
        for name, rows in parts_of(scores):
            found.append((f"{heading(run[0])}: {name}", table(rows, scores, greedy)))
        others = [name for name in scores if name not in {row.name for row in ROWS}]
        if others:
            found.append((f"{heading(run[0])}: other rows", table([REFERENCE, *others], scores, greedy)))
        growth = _unique(record for record in run if record["part"] == "growth")
        if growth:
            found.append((f"{heading(run[0])}: per site, one window", growth_table(list(growth.values()))))
    return found


def parts_of(scores: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(set, those of the rows that are in it) of the sets that have a row of their own, without which their table would
    say nothing new; ("some rows", all of them) where no set has one."""
    there = [row for row in ROWS if row.name in set(scores)]
    own = {row.sets[0] for row in there if len(row.sets) == 1}
    if not own:
        return [("some rows", [row.name for row in there])] if there else []
    return [(name, [row.name for row in there if name in row.sets]) for name in SETS if name in own]


def _unique(records: Iterable[Record]) -> dict[str, Record]:
    """By row, the first of each."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record["row"], record)
    return found


def heading(record: Record) -> str:
    texts = ", ".join(f"{about['tokens']:,} tokens of {name}" for name, about in record["texts"].items())
    return f"{record['model']['name']}, {record['ranks']} ranks on {record['device_name']}, {texts}"


def table(rows: list[str], scores: dict[str, Record], greedy: dict[str, Record]) -> str:
    """One line per row; per text perplexity, share of the gap closed, divergence, share of equal top tokens."""
    texts = list(next(iter(scores.values()))["texts"])
    short = [name.split("-")[0] for name in texts]
    head = ["row"]
    for name in short:
        head += [f"{name} ppl", "gap closed", "KL, nats", "same top"]
    head += ["x fewer bytes", "greedy same", "until first"]
    lines = [head]
    for name in rows:
        record = scores[name]
        line = [name]
        for text in texts:
            found = record["scores"][text]
            line += [f"{found['perplexity']:.3f}", _gap(record, text, scores), *_distance(found)]
        times = times_less(record)
        line.append("-" if math.isnan(times) else f"{times:.2f}")
        said = greedy.get(name, {}).get("greedy")
        line += [f"{said['same_tokens']:.1%}", f"{said['same_prefix']:.1f}"] if said else ["", ""]
        lines.append(line)
    return grid(lines)


def _distance(found: dict[str, Any]) -> list[str]:
    return ["-", "-"] if found["kl"] is None else [f"{found['kl']:.5f}", f"{found['same_top']:.2%}"]


def gap_of(record: Record, text: str, scores: dict[str, Record]) -> tuple[float, float]:
    """`gap_closed` of a record; NaN where the rows that it takes are not there."""
    plain, exact = scores.get(record["plain"]), scores.get(REFERENCE)
    if plain is None or exact is None:
        return math.nan, math.nan
    mine, theirs, best = (row["scores"][text]["nll"] for row in (record, plain, exact))
    return gap_closed(mine, theirs, best, record["texts"][text]["tokens"])


def _gap(record: Record, text: str, scores: dict[str, Record]) -> str:
    share, error = gap_of(record, text, scores)
    if math.isnan(share):
        return "-"
    return f"{share:.1%}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def growth_table(made: list[Record]) -> str:
    """Per row: the first site, the mean of the last ten, the largest; x' and its range against those of x at the same
    site, and the norm of delta against that of the first site (q_k / q_0)."""
    lines = [["row", "x'/x last", "x'/x most", "range last", "range most", "delta k/0 last", "partial/delta last"]]
    for record in made:
        sites = record["sites"]
        line = [record["row"]]
        for name in ("x", "range"):
            values = [growth_of(site, name) for site in sites]
            line += ["-", "-"] if None in values else [f"{_mean(values[-10:]):.2f}", f"{max(values):.2f}"]
        delta = [site["delta_rms"] for site in sites]
        line.append(f"{_mean(delta[-10:]) / delta[0]:.2f}")
        line.append(f"{_mean([site['partial_rms'] for site in sites[-10:]]) / _mean(delta[-10:]):.2f}")
        lines.append(line)
    return grid(lines)


def growth_of(site: dict[str, float], what: str) -> Any:
    """x' against x at one site: their rms ("x") or the range of their groups of elements ("range"); None if x' is not
    known."""
    if "sent_rms" not in site:
        return None
    return site["sent_rms"] / site["x_rms"] if what == "x" else site["range_growth"]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def show(made: list[Record], path: Path, out: Path) -> int:
    """All tables and plots of a file."""
    from . import accuracy_plot, plot

    for title, text in tables(made):
        print(f"\n{title}\n{text}")
    print(
        f"\ngap closed: of the perplexity between 16 bits and the same bits sent plainly ({PLAIN}; the paper's method\n"
        "without feedback for its rows), ± a jackknife's standard error over windows; x fewer bytes: than a ring of\n"
        f"16 bits sends at the quantized sites; until first: tokens before the first that differs\n{path}"
    )
    return plot.show(accuracy_plot.draw, made, out, path.stem)


class Progress:
    """A bar on stderr: one line that is overwritten on a terminal, one per step elsewhere. Silent unless shown."""

    def __init__(self, title: str, steps: int, shown: bool) -> None:
        self.title, self.steps, self.shown = title, steps, shown
        self.terminal = sys.stderr.isatty()
        self.began, self.finished, self.width, self.label = time.monotonic(), 0, 0, ""

    def begin(self, label: str) -> None:
        self.label, self.step_began = label, time.monotonic()
        self.say("")

    def say(self, text: str) -> None:
        if not (self.shown and self.terminal):
            return
        bar = ("#" * (20 * self.finished // max(self.steps, 1))).ljust(20, ".")
        line = f"{self.title} [{bar}] {self.finished}/{self.steps} {self.left()} {self.label} {text}"
        print("\r" + line.ljust(self.width), end="", file=sys.stderr, flush=True)
        self.width = len(line)

    def left(self) -> str:
        """What the steps so far make of the rest."""
        if not self.finished:
            return ""
        return f"{(time.monotonic() - self.began) / self.finished * (self.steps - self.finished):.0f} s left"

    def done(self) -> None:
        self.finished += 1
        if self.shown and not self.terminal:
            seconds = time.monotonic() - self.step_began
            print(
                f"{self.title} {self.finished}/{self.steps} {self.label} {seconds:.1f} s", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        if self.shown and self.terminal:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr, flush=True)
