"""Who counts as ended: a process whose connections are closed, a moment before the system says so, and no other."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from echo_pg import build

extension = build.extension()

HOLDER = """
import os, resource, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.eventfd(0) for _ in range(min(hard - 100, 50_000))]  # closed after the output, which has a lower number
print("ready", flush=True)
time.sleep(60)
"""
LEADER_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def introduction_of(pid: int) -> str:
    words = extension.introduction().split()
    return " ".join([*words[:2], str(pid), *words[3:]])


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_process_whose_connections_are_closed_has_ended() -> None:
    for _ in range(3):
        process = start(HOLDER)
        assert not extension.has_exited(introduction_of(process.pid))
        process.kill()
        assert process.stdout is not None and process.stdout.read() == ""  # closed, as a connection would be
        ended = extension.has_exited(introduction_of(process.pid))
        process.wait()
        assert ended and extension.has_exited(introduction_of(process.pid))


def test_a_process_whose_first_thread_alone_has_ended_lives() -> None:
    process = start(LEADER_ENDS)
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{process.pid}/stat")
    try:
        while stat.read_text().rpartition(") ")[2][0] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stat.read_text().rpartition(") ")[2][0] == "Z"
        assert not extension.has_exited(introduction_of(process.pid))
    finally:
        process.kill()
        process.wait()
    assert extension.has_exited(introduction_of(process.pid))
