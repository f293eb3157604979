"""The check that all ranks of a new group have the same options and code, over the group's store, before any other
exchange.

Every rank writes a record; rank 0 reads them all, compares with its own and writes a verdict, which the others read.
Records are JSON: {"fingerprint": ..., "introduction": text}, or {"failure": text} of a rank that cannot take part, so
that its peers learn why at once instead of timing out. The introduction says which process a rank is: those of this
host are watched while the others wait.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .answers import answer_within

# How long rank 0, whose process may host the store, stays after a failed check so that the others can read why.
_FAREWELL = timedelta(seconds=5)
_MOST_FAILURE_CHARS = 10_000

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two questions to the store
_FIRST_LOOK, _LONGEST_PERIOD = 0.2, 1.0  # seconds until the first look at the processes, and at most between two
_GRACE = 0.5  # seconds that a question may take after the time-out
_LAST_MOMENTS = 0.5  # seconds from the end of a process's connections to its own
_MOST_WATCHED = 64  # ranks: in larger groups the questions would bury the store


@dataclass(frozen=True)
class ProcessWatch:
    """How the ranks' processes are watched: this one's introduction, a function that tells whether a process that
    introduced itself so has ended, and by rank the introductions that are known beforehand."""

    introduction: str
    has_exited: Callable[[str], bool]
    known: dict[int, str]


NO_WATCH = ProcessWatch("", lambda introduction: False, {})


class Agreement:
    """One group's check. Construct it first thing on every rank: each construction counts as one more group on this
    store. Raises DistBackendError where that does not answer within `timeout`."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, processes: ProcessWatch = NO_WATCH
    ) -> None:
        from torch.distributed import PrefixStore

        self.rank, self.size, self.processes = rank, size, processes
        self._deadline = time.monotonic() + timeout.total_seconds()
        # A program may destroy a group and make another of the same name on the same store; the count keeps their keys
        # apart.
        visit = self._ask(store.add, f"echo/visits/{rank}", 1) if size > 1 else 1
        self.store = PrefixStore(f"echo/{visit}", store)

    def withdraw(self, reason: str) -> None:
        """Tell the others that this rank does not join, without waiting for anyone. Never raises: the reason itself is
        about to be raised."""
        if self.size == 1:
            return
        with contextlib.suppress(Exception):
            text = f"rank {self.rank}: {reason}"
            self._write({"failure": text})
            if self.rank == 0:
                self._give_verdict(text)
            else:
                self._ask(self.store.set, f"seen/{self.rank}", "")

    def reach(self, fingerprint: str, timeout: timedelta) -> list[str]:
        """Return the introductions of all ranks when all have the same fingerprint. Raises DistBackendError naming
        what differs, who is missing or who has exited, or that the store does not answer."""
        introduction = self.processes.introduction
        if self.size == 1:
            return [introduction]
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._write({"fingerprint": json.loads(fingerprint), "introduction": introduction})
        if self.rank != 0:
            self._await(["verdict"], timeout)
            problem, introductions = _read_verdict(self._ask(self.store.get, "verdict"), self.size)
            self._ask(self.store.set, f"seen/{self.rank}", "")
        else:
            self._await([f"rank/{peer}" for peer in range(1, self.size)], timeout)
            records = self._ask(self._records)
            problem = self._compare(json.loads(fingerprint), records)
            introductions = [introduction, *(record.get("introduction", "") for record in records)]
            self._give_verdict(problem, introductions)
        if problem:
            raise self._refusal(problem)
        return list(introductions)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return answer_within(self._left(), question, *arguments)
        except (TimeoutError, RuntimeError) as error:  # torch's own where the server has ended
            raise self._refusal(f"{self._who_is_gone()}{error}") from error

    def _refusal(self, problem: str) -> Exception:
        from torch.distributed import DistBackendError

        return DistBackendError(f"echo: rank {self.rank} of {self.size}: this group cannot be created: {problem}")

    def _who_is_gone(self) -> str:
        """The process that may have taken the store with it, as the beginning of an error; empty if all known ones
        live."""
        known = {peer: introduction for peer, introduction in self.processes.known.items() if peer != self.rank}
        deadline = time.monotonic() + _LAST_MOMENTS
        while known:
            for peer, introduction in known.items():
                if self.processes.has_exited(introduction):
                    return f"the process of rank {peer} has exited; "
            if time.monotonic() >= deadline:
                break
            time.sleep(_LONGEST_PAUSE)
        return ""

    def _left(self) -> float:
        """Seconds that a question may take."""
        return max(self._deadline - time.monotonic(), 0) + _GRACE

    def _write(self, record: dict[str, Any]) -> None:
        self._ask(self.store.set, f"rank/{self.rank}", json.dumps(record))

    def _give_verdict(self, problem: str | None, introductions: list[str] | None = None) -> None:
        self._ask(self.store.set, "verdict", json.dumps([problem, introductions]))
        if problem:
            seen = [f"seen/{peer}" for peer in range(1, self.size)]
            with contextlib.suppress(Exception):
                answer_within(_FAREWELL.total_seconds() + _GRACE, self.store.wait, seen, _FAREWELL)

    def _compare(self, mine: dict[str, Any], records: list[dict[str, Any]]) -> str | None:
        for peer, record in enumerate(records, start=1):
            if failure := record.get("failure"):
                return failure
            if (theirs := record["fingerprint"]) != mine:
                return describe_difference(mine, theirs, peer)
        return None

    def _records(self) -> list[dict[str, Any]]:
        keys = [f"rank/{peer}" for peer in range(1, self.size)]
        texts = self.store.multi_get(keys) if self.store.has_extended_api() else [self.store.get(key) for key in keys]
        return [_read_record(text, peer) for peer, text in enumerate(texts, start=1)]

    def _await(self, keys: list[str], timeout: timedelta) -> None:
        start = time.monotonic()
        try:
            self._poll(keys)
        except Exception as error:
            waited = f"after {time.monotonic() - start:.1f} s (time-out {timeout.total_seconds():g} s)"
            problem = f"rank {self.rank} waited: {self._who_is_missing()} {waited}: {error}"
            if self.rank == 0:
                with contextlib.suppress(Exception):  # for those who come later
                    self._ask(self.store.set, "verdict", json.dumps([problem, None]))
            raise self._refusal(problem) from error

    def _poll(self, keys: list[str]) -> None:
        """Until the store has the keys. Its own wait hears of nothing else, so it is asked again and again."""
        pause, period, next_look = _FIRST_PAUSE, _FIRST_LOOK, time.monotonic() + _FIRST_LOOK
        while not self._holds(keys):
            now = time.monotonic()
            if now >= self._deadline:
                raise TimeoutError("timed out")
            if now >= next_look and self.size <= _MOST_WATCHED:
                self._look_at_processes(keys)
                period = min(2 * period, _LONGEST_PERIOD)
                next_look = now + period
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _holds(self, keys: list[str]) -> bool:
        return bool(answer_within(self._left(), self.store.check, keys))

    def _look_at_processes(self, keys: list[str]) -> None:
        for peer in range(self.size):
            key = f"rank/{peer}"
            introduction = self.processes.known.get(peer, "")
            if not introduction and self._holds([key]):
                introduction = _read_record(self._ask(self.store.get, key), peer).get("introduction", "")
            # Asked in this order: what a process said before it ended counts.
            exited = peer != self.rank and introduction and self.processes.has_exited(introduction)
            if exited and not self._holds(keys):
                raise ChildProcessError(f"the process of rank {peer} has exited")

    def _who_is_missing(self) -> str:
        try:
            missing = [peer for peer in range(self.size) if not self._holds([f"rank/{peer}"])]
        except Exception:
            return f"{self._who_is_gone()}the store no longer answers rank {self.rank}"
        if not missing:
            return f"all {self.size} ranks came, but rank 0 gave no verdict"
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return f"{len(missing)} of {self.size} ranks did not come (rank {shown})"


def _read_record(text: str | bytes, peer: int) -> dict[str, Any]:
    """What a rank wrote: its "fingerprint" and its "introduction", or a "failure". What is no record counts as a
    failure: whoever can write to the store can stop a group from being made, and nothing more."""
    try:
        record = json.loads(text)
        failure, introduction = record.get("failure", ""), record.get("introduction", "")
        if isinstance(failure, str) and isinstance(introduction, str):
            if failure:
                return {"failure": failure[:_MOST_FAILURE_CHARS]}
            if isinstance(record["fingerprint"], dict):
                return {"fingerprint": record["fingerprint"], "introduction": introduction}
    except (ValueError, RecursionError, KeyError, AttributeError):
        pass
    return {"failure": f"rank {peer}: what it wrote into the store is no record of a rank"}


def _read_verdict(text: str | bytes, size: int) -> tuple[str | None, list[str]]:
    """The problem, or None and the introductions of all ranks."""
    try:
        problem, introductions = json.loads(text)
        if problem and isinstance(problem, str):
            return problem, []
        if problem is None and len(introductions) == size and all(isinstance(each, str) for each in introductions):
            return None, list(introductions)
    except (ValueError, TypeError, RecursionError):
        pass
    return "what stands in the store is no verdict of rank 0", []


def describe_difference(mine: dict[str, Any], theirs: dict[str, Any], peer: int) -> str:
    """In words what differs between rank 0 and `peer`, followed by both fingerprints."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    parts = [f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {peer}" for name in names]
    return f"ranks must agree: {'; '.join(parts)}.\n  rank 0: {json.dumps(mine)}\n  rank {peer}: {json.dumps(theirs)}"
