"""What a rank that failed leaves in the store for the others: which groups end by it, and what of it is believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import echo_pg
from echo_pg import build, inner_backends


def run_survival(rank: int, size: int, fabric: str) -> tuple[str, float]:
    """A forwarded call fails, since rank 1 comes too late; then the group quantizes for the first time, where rank 1 is
    late again, but in time. Returns the error and the sum's deviation."""
    options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric, rotation="none", timeout=20)
    group = dist.new_group(backend="echo", timeout=timedelta(seconds=1), pg_options=options)
    tensor = torch.full((4096,), rank + 1.0, dtype=torch.bfloat16)
    time.sleep(2.5 * rank)
    with echo_pg.exact(), pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor.clone(), group=group)
    time.sleep(1.5 * rank)
    dist.all_reduce(tensor, group=group)
    return str(caught.value), float((tensor - 3).abs().max())


@pytest.mark.parametrize("fabric", ["peer", "wire"])
def test_a_group_survives_a_forwarded_call_that_failed(fabric: str) -> None:
    for rank, (text, deviation) in enumerate(run_ranks(run_survival, 2, fabric, timeout=60)):
        assert f"rank {rank} of 2: exact all_reduce number 0" in text
        assert deviation == 0, "numbers that are equal all over are on the grid"


HEADING = b"echo fault report 1, rank 1, the group "
ENDS, SURVIVES = HEADING + b"ends\n", HEADING + b"survives\n"
EXACT = b"rank 1 of 2: exact all_reduce number 3 (60000 elements, bfloat16; exact()) of group '1' failed: closed"
QUANTIZED = b"rank 1 of 2: quantized all_reduce number 3 (60000 elements, bfloat16) of group '1' failed: closed"
NO_REPORT = "what lies in the store is no report of a rank"


def store_with(first: bytes | None) -> dist.Store:
    """The store of a group in which `first` has been reported."""
    store = dist.HashStore()
    if first is not None:
        dist.PrefixStore("faults", store).set("first", first)
    return store


def first_report(store: dist.Store, rank: int = 0, size: int = 2) -> Any:
    extension = build.extension()
    return extension.first_report(store, rank, size, extension.Processes(rank, size, []))


def connecting(stored: bytes | None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A connecting that takes so long that the group's store is asked what has been reported."""
    monkeypatch.setattr(inner_backends, "_ASK_PERIOD", 0.05)
    monkeypatch.setattr(inner_backends, "_LOOK_PERIOD", 0.02)
    processes = build.extension().Processes(0, 2, [])
    place: Any = SimpleNamespace(processes=processes, own_store=store_with(stored), rank=0, size=2)

    def connect() -> str:
        time.sleep(0.5)
        return "connected"

    return lambda: inner_backends._while_all_live(connect, place, time.monotonic() + 30)


@pytest.mark.parametrize("stored", [None, SURVIVES + EXACT, SURVIVES + QUANTIZED, SURVIVES])
def test_what_a_group_survives_ends_no_connecting(stored: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connecting(stored, monkeypatch)() == "connected"


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (ENDS + QUANTIZED, "^rank 1 reports: rank 1 of 2: quantized all_reduce number 3"),
        # What such a text says of itself changes nothing, and neither does another heading within it.
        (ENDS + EXACT, "^rank 1 reports: rank 1 of 2: exact all_reduce number 3"),
        (ENDS + SURVIVES + EXACT, "^rank 1 reports: echo fault report 1"),
        (b"rank 1 reports: " + EXACT, NO_REPORT),
        (EXACT + SURVIVES, NO_REPORT),
        (SURVIVES.strip(), NO_REPORT),
        (SURVIVES.replace(b"report 1", b"report 2"), NO_REPORT),
        (SURVIVES.replace(b"rank 1", b"rank 2"), NO_REPORT),
        (SURVIVES.replace(b"rank 1", b"rank -1"), NO_REPORT),
        (SURVIVES.replace(b"rank 1", b"rank 01"), NO_REPORT),
        (SURVIVES.replace(b"rank 1", b"rank 4294967297"), NO_REPORT),
        (SURVIVES.replace(b"survives", b"survives it"), NO_REPORT),
        (b" " + SURVIVES, NO_REPORT),
        (b"", NO_REPORT),
        (b"\x80\x04\x95\n", NO_REPORT),
    ],
)
def test_anything_else_does(stored: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dist.DistBackendError, match=said):
        connecting(stored, monkeypatch)()


def test_a_text_is_cut_and_made_fit_to_be_shown() -> None:
    shown = {
        "plain \n €🏖ü": "plain \n €🏖ü".encode(),
        "?[31m ? ?": b"\x1b[31m \x00 \x7f",
        "?? ? ??? ???? ?x ?": b"\xc0\xaf \xff \xed\xa0\x80 \xf5\x80\x80\x80 \xe2x \xc3",
    }
    for text, stored in shown.items():
        assert str(first_report(store_with(ENDS + stored))) == "rank 1 reports: " + text
    # The character that the end cuts through takes two bytes more than there is room for.
    assert str(first_report(store_with(ENDS + b"x" + "€".encode() * 400_000))) == "rank 1 reports: x" + "€" * 3333
    assert str(first_report(store_with(ENDS + "€".encode() * 400_000))) == "rank 1 reports: " + "€" * 3333 + "?"


def test_the_first_that_ends_the_group_takes_the_place_of_what_it_has_survived() -> None:
    extension = build.extension()
    alone = extension.Processes(0, 1, [])

    def report(store: dist.Store, text: str) -> None:
        assert extension.fault_reports(store, 0, 1, alone, text) == ""

    store = store_with(SURVIVES.replace(b"rank 1", b"rank 0") + EXACT)
    assert first_report(store, size=1).group_survives
    for text in "this ends it", "too late":
        report(store, text)
        found = first_report(store, size=1)
        assert (found.group_survives, str(found)) == (False, "rank 0 reports: this ends it")
    spoilt = store_with(b"nonsense")
    report(spoilt, "this ends it")
    assert str(first_report(spoilt, size=1)) == NO_REPORT
    assert first_report(store_with(None)) is None
