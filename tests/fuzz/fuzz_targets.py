"""What is fuzzed: each target takes any bytes and raises only where a promise is broken.

Options come from a program and from the environment, records and handles from the store, which others may write to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from echo_pg import Options, agreement, build
from echo_pg.options import is_off, log_level, option_names, replaced_backends

NAMES = option_names()
# Values of every type that a caller may hand over by mistake, beside those that a field wants.
VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        4,
        8,
        16,
        128,
        1 << 20,
        -1,
        1 << 70,
        True,
        False,
        None,
        "",
        "auto",
        "on",
        "float16",
        "hadamard",
        "symmetric",
    ),
    *(0.5, 1.0, -0.0, 1e-45, 1e39, float("nan"), float("inf"), (), ("bfloat16",), ["float32"], {}, object(), b"x"),
    *(
        "(",
        "a" * 5000,
        "(a+)+$",
        "[[:alpha:]",
        "(?i)x",
        "\\",
        "\x00",
        "\ud800",
        "torch.bfloat16",
        "local",
        "peer",
        "off",
    ),
)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def use(make: Callable[[], Options]) -> bool:
    """Whether options can be made. ValueError is the only refusal there is; what is accepted works everywhere."""
    try:
        options = make()
    except ValueError:
        return False
    fingerprint = options.fingerprint()
    assert json.loads(fingerprint)["bits"] in (4, 8)
    assert dataclasses.replace(options).fingerprint() == fingerprint
    try:
        config = options.to_config()
        decision = build.extension().decide(config, {"numel": 1 << 21, "group_desc": "tp", "op": "SUM"})
    except ValueError as error:  # the two dialects of regular expressions differ
        assert "is not a regular expression" in str(error), error
        return False
    assert isinstance(decision[0], bool) and decision[1]
    return True


def options_target(data: bytes) -> bool:
    """Pairs of bytes: which field, which value."""
    pairs = zip(data[0:16:2], data[1:16:2], strict=False)
    return use(lambda: Options(**{NAMES[name % len(NAMES)]: VALUES[value % len(VALUES)] for name, value in pairs}))


def environment_target(data: bytes) -> bool:
    """Lines: a byte that says which variable, then its text."""
    variables = {}
    for line in data.split(b"\n")[:8]:
        if line:
            names = (*NAMES, "OFF", "REPLACE", "LOG", "CUDA", "SANITIZE", "BIT", "FABRICS")
            text = line[1:].replace(b"\0", b"").decode("utf-8", "surrogateescape")
            variables[f"ECHO_{names[line[0] % len(names)].upper()}"] = text
    with environment(variables):
        assert isinstance(is_off(), bool)
        assert log_level() in ("off", "info", "debug")
        assert set(replaced_backends()) <= {"nccl", "gloo"}
        return use(Options)


def record_target(data: bytes) -> bool:
    record = agreement._read_record(data, 1)
    problem, introductions = agreement._read_verdict(data, 2)
    assert (problem is None) == (len(introductions) == 2) and all(isinstance(text, str) for text in introductions)
    if "failure" in record:
        assert isinstance(record["failure"], str) and 0 < len(record["failure"]) <= 10_000
        return problem is None
    assert isinstance(record["introduction"], str) and json.loads(data)["fingerprint"] == record["fingerprint"]
    assert agreement.describe_difference({"bits": 4}, record["fingerprint"], 1)
    return True


def handle_target(data: bytes) -> bool:
    testing = build.extension().testing
    handle = testing.read_handle(data)
    if handle is not None:
        pid, descriptor = handle
        assert pid > 0 and descriptor >= 0
        text = data.decode()
        assert set(text) <= set("0123456789 ") and [int(word) for word in text.split(" ")] == [pid, descriptor]
    again = testing.reread_introduction(data)
    assert again is None or testing.reread_introduction(again) == again
    return handle is not None or again is not None


def report_target(data: bytes) -> bool:
    import torch.distributed as dist

    extension, store = build.extension(), dist.HashStore()
    dist.PrefixStore("faults", store).set("first", data)
    found = extension.first_report(store, 0, 2, extension.Processes(0, 2, []))
    text = str(found)
    assert len(text) <= 10_000 + len("rank 1 reports: ")
    assert all(char == "\n" or (char >= " " and char != "\x7f") for char in text)
    if text == "what lies in the store is no report of a rank":
        assert not found.group_survives
        return False
    fate = "survives" if found.group_survives else "ends"
    headings = [f"echo fault report 1, rank {rank}, the group {fate}\n".encode() for rank in (0, 1)]
    assert data.startswith(tuple(headings)) and text.startswith(("rank 0 reports: ", "rank 1 reports: "))
    return True


# With inputs that are accepted, from which mutation starts.
TARGETS: dict[str, tuple[Callable[[bytes], bool], list[bytes]]] = {
    "options": (options_target, [b"", bytes((0, 2)), bytes((0, 3, 1, 5))]),
    "environment": (
        environment_target,
        [b"", b"\x004", b"\x01128\n\x02zero_aware\n\x18float32", b"\x060.25\n\x161MiB"],
    ),
    "record": (
        record_target,
        [b'{"fingerprint": {"echo": "0.1.0", "bits": 4}}', b'{"failure": "rank 1: no"}', b'[null, ["a", "b"]]'],
    ),
    "report": (
        report_target,
        [
            b"echo fault report 1, rank 0, the group survives\nrank 0 of 2: exact",
            b"echo fault report 1, rank 1, the group ends\nrank 1 of 2: \xe2\x82\xac",
        ],
    ),
    "handle": (handle_target, [b"4242 17", b"echo 1 4242 2 18446744073709551615 77"]),
}
