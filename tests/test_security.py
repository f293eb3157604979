"""What others may do to a group: write into its store, be another user of the host, set environment variables. The
readers themselves are in tests/cpp/memory_test.cpp and test_fuzz.py."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_backend import contribution, is_close

SECRET = b"not to be touched"
DESCRIPTORS = 64  # of a process that an intruder tries to open


class MeddledStore(dist.Store):
    """What this rank writes is first given to `meddle(key, value)`; everything written is remembered."""

    def __init__(self, path: str, size: int, meddle: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self.inner = dist.FileStore(path, size)
        self.meddle = meddle
        self.written: list[tuple[str, bytes]] = []

    def set(self, key: str, value: Any) -> None:
        given = value.encode() if isinstance(value, str) else bytes(value)
        self.written.append((key, given))
        self.inner.set(key, self.meddle(key, given))

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.inner.wait(keys, timeout)


# torch keeps the part in C++ alone, which asks the part in Python.
_kept: list[MeddledStore] = []


def honest(_key: str, value: bytes) -> bytes:
    return value


def start(rank: int, size: int, path: str, meddle: Callable[[str, bytes], bytes], **options: Any) -> MeddledStore:
    import echo_pg

    store = MeddledStore(path, size, meddle)
    _kept.append(store)
    chosen = echo_pg.Options(policy="all", min_bytes=0, **options)
    limit = timedelta(seconds=20)
    dist.init_process_group("echo", store=store, rank=rank, world_size=size, pg_options=chosen, timeout=limit)
    return store


def outcome(rank: int, size: int, path: str, meddle: Callable[[str, bytes], bytes], **options: Any) -> tuple[str, str]:
    """The error of making a group and of its first call, "" if there was none; and the fabric."""
    import echo_pg

    try:
        start(rank, size, path, meddle, **options)
        tensor = contribution(rank)
        dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return str(error), ""
    assert is_close(tensor, size)
    return "", str(echo_pg.stats(dist.group.WORLD)["fabric"])


# What rank 1 publishes instead of the handle of its memory, "{pid}" its process and "{file}" a descriptor of a file of
# the right size that must stay as it is.
HANDLES = {
    "a path": "/etc/passwd",
    "a path behind a number": "{pid}/../../../{pid} 3",
    "another process": "1 3",
    "another file of this process": "{pid} {file}",
    "a descriptor that is not open": "{pid} 9999",
    "nothing": "",
    "binary": "\x00\x01\x02",
    "very long": "9" * 100_000,
}
INTRODUCTIONS = {"nothing": "", "another version": "echo 2 1 1 1 1", "binary": "\x00", "another host": "echo 1 1 1 1 1"}


def run_handle(rank: int, size: int, folder: str, name: str, fabric: str) -> tuple[str, str]:
    untouched = Path(folder) / "untouched"
    pattern = re.compile(r"/peer/\d+/1$")

    def meddle(key: str, value: bytes) -> bytes:
        # The handle is the one text of the rounds that begins with this process's number.
        if not pattern.search(key) or not value.startswith(f"{os.getpid()} ".encode()):
            return value
        untouched.write_bytes(SECRET)
        descriptor = os.open(untouched, os.O_RDWR)
        size_of = os.stat(f"/proc/self/fd/{value.split()[1].decode()}").st_size
        os.truncate(descriptor, size_of)
        return HANDLES[name].format(pid=os.getpid(), file=descriptor).encode()

    result = outcome(rank, size, f"{folder}/store", meddle if rank == 1 else honest, fabric=fabric)
    assert rank == 0 or untouched.read_bytes().rstrip(b"\0") == SECRET
    return result


@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_that_names_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    for error, _ in run_ranks(run_handle, 2, str(tmp_path), name, "peer", backend=None):
        assert "fabric='peer' was asked for, but rank 0: " in error, error
        assert re.search("is no handle of its process|no unnamed file|opening a peer's shared memory", error), error


def test_without_usable_handles_the_group_does_without_peer_memory(tmp_path: Path) -> None:
    for error, fabric in run_ranks(run_handle, 2, str(tmp_path), "another file of this process", "auto", backend=None):
        assert (error, fabric) == ("", "wire")


def run_introduction(rank: int, size: int, folder: str, name: str) -> tuple[str, str]:
    def meddle(key: str, value: bytes) -> bytes:
        if not key.endswith("rank/1") or b"introduction" not in value:
            return value
        return json.dumps(json.loads(value) | {"introduction": INTRODUCTIONS[name]}).encode()

    return outcome(rank, size, f"{folder}/store", meddle if rank == 1 else honest)


@pytest.mark.parametrize("name", INTRODUCTIONS)
def test_an_introduction_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    for error, fabric in run_ranks(run_introduction, 2, str(tmp_path), name, backend=None):
        if name == "another host":
            assert (error, fabric) == ("", "wire")
        else:
            assert "what rank 1 said of itself in the store is no introduction" in error, error


def run_record(rank: int, size: int, folder: str, text: str) -> tuple[str, str]:
    def meddle(key: str, value: bytes) -> bytes:
        return text.encode() if key.endswith(f"rank/{rank}") and b"fingerprint" in value else value

    return outcome(rank, size, f"{folder}/store", meddle if rank == 1 else honest)


@pytest.mark.parametrize("text", ["", "[]", '{"fingerprint": 3}', "[" * 100_000, pickle.dumps(os.system, 0).decode()])
def test_a_record_that_is_none_is_refused_on_all_ranks(text: str, tmp_path: Path) -> None:
    for error, _ in run_ranks(run_record, 2, str(tmp_path), text, backend=None):
        assert "rank 1: what it wrote into the store is no record of a rank" in error, error


def run_without_pickle(rank: int, size: int, folder: str) -> list[tuple[str, bytes]]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    before = pickle.loads, pickle.load, pickle.Unpickler
    pickle.loads, pickle.load, pickle.Unpickler = refuse, refuse, refuse  # type: ignore[assignment, misc]
    try:
        store = start(rank, size, f"{folder}/store", honest)
        tensor = contribution(rank)
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
    finally:
        pickle.loads, pickle.load, pickle.Unpickler = before  # type: ignore[misc]
    # Beside echo's keys lie those of the inner Gloo, which writes addresses in a form of its own.
    return [(key, value) for key, value in store.written if "/echo/" in f"/{key}" and "/pass/" not in key]


def test_what_echo_writes_into_the_store_is_text_and_nothing_is_unpickled(tmp_path: Path) -> None:
    for written in run_ranks(run_without_pickle, 2, str(tmp_path), backend=None):
        assert any(b"fingerprint" in value for _, value in written) and len(written) > 4
        for key, value in written:
            text = value.decode("ascii")
            if re.search(r"(rank/\d|verdict)$", key):
                json.loads(text)
            else:
                assert re.fullmatch(r"|\d+ \d+|echo 1 \d+ \d+ \d+ [ -~]+", text), (key, text)


def intrude(pid: int) -> list[str]:
    """What this process is allowed to do to another: nothing, if it is another user's."""
    libc = ctypes.CDLL(None, use_errno=True)
    attempts: dict[str, Callable[[], Any]] = {
        "list descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "list mappings": lambda: os.listdir(f"/proc/{pid}/map_files"),
        "read mappings": lambda: Path(f"/proc/{pid}/maps").read_text(),
        "see names": lambda: [name for name in os.listdir("/dev/shm") if "echo" in name],
        "trace": lambda: libc.ptrace(16, pid, 0, 0) == 0,
        "signal": lambda: os.kill(pid, 0) is None,
    }
    for flags in (os.O_RDONLY, os.O_RDWR):
        for name in ("mem", *(f"fd/{descriptor}" for descriptor in range(DESCRIPTORS))):
            attempts[f"open {name} {flags}"] = lambda name=name, flags=flags: os.open(f"/proc/{pid}/{name}", flags)
    allowed = []
    for what, attempt in attempts.items():
        try:
            if attempt():
                allowed.append(what)
        except OSError:
            continue
    return allowed


def as_another_user(pid: int) -> str:
    """What intrude() finds when it runs as nobody, and as whom it ran."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os.write(writer, f"{intrude(pid)} as {os.geteuid()}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def run_beside_an_intruder(rank: int, size: int, folder: str) -> list[str]:
    """What an intruder may do to this rank before, while and after memory is shared: its handle is open in between."""
    found: list[str] = []

    def meddle(key: str, value: bytes) -> bytes:
        if value.startswith(f"{os.getpid()} ".encode()):
            assert int(value.split()[1]) < DESCRIPTORS, "the handle is among what the intruder tries"
            found.append(as_another_user(os.getpid()))
        return value

    start(rank, size, f"{folder}/store", meddle)
    tensor = contribution(rank)
    dist.all_reduce(tensor)
    assert is_close(tensor, size)
    assert "trace" not in intrude(os.getpid()) and "open mem 2" in intrude(os.getpid()), "this user itself may"
    return [*found, as_another_user(os.getpid())]


def test_another_user_of_the_host_reads_writes_and_stops_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("OTHER USERS ARE NOT TESTED: only root can be another user")
    for found in run_ranks(run_beside_an_intruder, 2, str(tmp_path), backend=None):
        assert found == ["[] as 65534"] * 2, found


def run_environment(rank: int, size: int) -> tuple[set[str], set[str]]:
    """Files that the process has mapped, and what it did that an audit would ask about."""
    import echo_pg

    deeds: set[str] = set()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            deeds.add(f"write {arguments[0]}")
        elif event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "ctypes.dlopen",
            "os.mkdir",
            "os.rename",
            "os.remove",
        ):
            deeds.add(f"{event} {arguments[0]}")

    sys.addaudithook(audit)
    for fabric in ("peer", "wire"):
        options = echo_pg.Options(policy="all", min_bytes=0, fabric=fabric)
        group = dist.new_group(backend="echo", pg_options=options)
        dist.all_reduce(contribution(rank), group=group)
        dist.destroy_process_group(group)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}, deeds


def test_the_environment_makes_it_load_and_write_nothing_else(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "echo_pg").mkdir()
    (evil / "libecho.so").write_bytes(b"\x7fELF")
    (evil / "_C.py").write_text("raise SystemExit('loaded')")
    names = (
        "HOME",
        "PATH",
        "LIBRARY",
        "LIBRARY_PATH",
        "PLUGIN",
        "CONFIG",
        "CACHE",
        "TMPDIR",
        "SHM",
        "CUDA",
        "SANITIZE",
    )
    variables = {f"ECHO_{name}": str(evil / "libecho.so") for name in names}
    variables |= {
        "ECHO_LOG": str(evil / "log"),
        "ECHO_REPLACE": str(evil),
        "ECHO_ALLOW": str(evil),
        "TMPDIR": str(evil),
    }
    clean, hostile = (run_ranks(run_environment, 2, env=env) for env in ({}, variables))
    before = sorted(path.name for path in evil.iterdir())
    for (mapped, deeds), (mapped_then, deeds_then) in zip(clean, hostile, strict=True):
        assert mapped_then - mapped <= {"[heap]"} and deeds_then == deeds, (mapped_then - mapped, deeds_then - deeds)
        assert not any(str(tmp_path) in name for name in mapped_then | deeds_then)
        assert not any(deed.startswith("write") for deed in deeds)
    assert before == sorted(path.name for path in evil.iterdir()) == ["_C.py", "echo_pg", "libecho.so"]
