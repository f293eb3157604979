"""The check that all ranks of a new group have the same options and code, over the group's store, before any other
exchange.

Every rank writes a record; rank 0 reads them all, compares with its own and writes a verdict, which the others read.
Records are JSON: {"fingerprint": ...}, or {"failure": text} of a rank that cannot take part, so that its peers learn
why at once instead of timing out.
"""

import contextlib
import json
import time
from datetime import timedelta
from typing import Any

# How long rank 0, whose process may host the store, stays after a failed check so that the others can read why.
_FAREWELL = timedelta(seconds=5)


class Agreement:
    """One group's check. Construct it first thing on every rank: each construction counts as one more group on this
    store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore

        self.rank, self.size = rank, size
        # A program may destroy a group and make another of the same name on the same store; the count keeps their keys
        # apart.
        visit = store.add(f"echo/visits/{rank}", 1) if size > 1 else 1
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
                self.store.set(f"seen/{self.rank}", "")

    def reach(self, fingerprint: str, timeout: timedelta) -> None:
        """Return when all ranks have the same fingerprint. Raises DistBackendError naming what differs or who is
        missing."""
        if self.size == 1:
            return
        from torch.distributed import DistBackendError

        self._write({"fingerprint": json.loads(fingerprint)})
        if self.rank != 0:
            self._await(["verdict"], timeout)
            problem = json.loads(self.store.get("verdict"))
            self.store.set(f"seen/{self.rank}", "")
        else:
            self._await([f"rank/{peer}" for peer in range(1, self.size)], timeout)
            problem = self._compare(json.loads(fingerprint))
            self._give_verdict(problem)
        if problem:
            raise DistBackendError(f"echo: this group cannot be created. {problem}")

    def _write(self, record: dict[str, Any]) -> None:
        self.store.set(f"rank/{self.rank}", json.dumps(record))

    def _give_verdict(self, problem: str | None) -> None:
        self.store.set("verdict", json.dumps(problem))
        if problem:
            with contextlib.suppress(Exception):
                self.store.wait([f"seen/{peer}" for peer in range(1, self.size)], _FAREWELL)

    def _compare(self, mine: dict[str, Any]) -> str | None:
        keys = [f"rank/{peer}" for peer in range(1, self.size)]
        texts = self.store.multi_get(keys) if self.store.has_extended_api() else [self.store.get(key) for key in keys]
        for peer, text in enumerate(texts, start=1):
            record = json.loads(text)
            if failure := record.get("failure"):
                return str(failure)
            if (theirs := record["fingerprint"]) != mine:
                return describe_difference(mine, theirs, peer)
        return None

    def _await(self, keys: list[str], timeout: timedelta) -> None:
        from torch.distributed import DistBackendError

        start = time.monotonic()
        try:
            self.store.wait(keys, timeout)
        except Exception as error:
            waited = f"after {time.monotonic() - start:.1f} s (time-out {timeout.total_seconds():g} s)"
            problem = f"{self._who_is_missing()} {waited}"
            if self.rank == 0:
                with contextlib.suppress(Exception):  # for those who come later
                    self.store.set("verdict", json.dumps(problem))
            raise DistBackendError(f"echo: this group cannot be created. {problem}: {error}") from error

    def _who_is_missing(self) -> str:
        try:
            missing = [peer for peer in range(self.size) if not self.store.check([f"rank/{peer}"])]
        except Exception:
            return f"The store no longer answers rank {self.rank}"
        if not missing:
            return f"All {self.size} ranks came, but rank 0 gave no verdict"
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return f"{len(missing)} of {self.size} ranks did not come ({shown})"


def describe_difference(mine: dict[str, Any], theirs: dict[str, Any], peer: int) -> str:
    """In words what differs between rank 0 and `peer`, followed by both fingerprints."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    parts = [f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {peer}" for name in names]
    return f"Ranks must agree: {'; '.join(parts)}.\n  rank 0: {json.dumps(mine)}\n  rank {peer}: {json.dumps(theirs)}"
