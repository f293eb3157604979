"""Hosts on one machine: network namespaces of their own, joined by virtual links (iproute2, veth), as two machines with
a cable are. Ranks of different hosts share neither the network's loopback nor memory.

Needs root, or a kernel that lets users make user namespaces. Where neither is so, making `Hosts` raises NoHosts.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_NAMESPACES = ("user", "net", "ipc", "uts")
_ANY_KIND = 0


class NoHosts(Exception):
    """Why there can be no hosts here."""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Hosts:
    """`with Hosts(2) as hosts:` hosts on one switch, or, with `delay` in seconds, two on a cable that takes so long
    each way. `join(hosts.pids[0])` moves the calling process onto the first one.
    """

    def __init__(self, count: int = 2, delay: float = 0.0) -> None:
        assert delay == 0.0 or count == 2
        self.count, self.delay = count, delay
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The links go with the namespaces, and these with the last process in them."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()

    @property
    def pids(self) -> list[int]:
        """Of processes that live on each host and keep its namespaces."""
        return [holder.pid for holder in self._holders[1 : 1 + self.count]]

    def configure(self, host: int, command: str) -> None:
        """Run a command of iproute2 there: `link set eth0 down`, or `tc qdisc ...` if it begins with "tc"."""
        words = command.split()
        program = [] if words[0] == "tc" else ["ip"]
        self._run(self._holders[1 + host], *program, *words)

    def limit_rate(self, megabits: int) -> None:
        """What every host may send, by the kernel's token bucket. The bucket holds what a link sends in 1 ms, at least
        two of the largest packets."""
        burst_bytes = max(128 << 10, megabits * 1000 // 8)
        for host in range(self.count):
            rate = f"rate {megabits}mbit burst {burst_bytes} latency 100ms"
            self.configure(host, f"tc qdisc replace dev {INTERFACE} root tbf {rate}")

    def _build(self) -> None:
        # A switch between the hosts, in a namespace of its own; the user namespace around all of them makes this
        # process's user their root.
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        switch = self._hold(["unshare", *own_user, "--net"])
        for _ in range(self.count):
            self._hold([*self._inside(switch), "unshare", "--net", "--ipc", "--uts"])
        if self.delay > 0:
            relay = [sys.executable, str(Path(__file__).with_name("hosts_delay.py"))]
            self._start([*self._inside(switch), *relay, *map(str, self.pids), str(self.delay)], "ready")
            return
        self._run(switch, *["ip", "link", "add", "switch", "type", "bridge"])
        self._run(switch, *["ip", "link", "set", "switch", "up"])
        for host, pid in enumerate(self.pids):
            self._run(switch, *f"ip link add port{host} type veth peer name {INTERFACE} netns {pid}".split())
            self._run(switch, *f"ip link set port{host} master switch up".split())
            for command in (
                f"addr add {address(host)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            ):
                self.configure(host, command)

    def _hold(self, prefix: list[str]) -> subprocess.Popen[str]:
        """A process that does nothing in new namespaces."""
        return self._start([*prefix, "sh", "-c", "echo made; exec sleep 1000000"], "made")

    def _start(self, command: list[str], word: str) -> subprocess.Popen[str]:
        """A process that is killed at the end; returns once it has said `word`."""
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError as error:
            raise NoHosts(str(error)) from None
        self._holders.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != f"{word}\n":
            raise NoHosts(f"{' '.join(command)}: {process.communicate()[1].strip()}")
        return process

    @staticmethod
    def _inside(holder: subprocess.Popen[str]) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(holder.pid), *user, "--net"]

    def _run(self, holder: subprocess.Popen[str], *command: str) -> None:
        try:
            done = subprocess.run([*self._inside(holder), *command], capture_output=True, text=True)
        except FileNotFoundError as error:
            raise NoHosts(str(error)) from None
        if done.returncode != 0:
            raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


def join(pid: int) -> None:
    """Move this process, which must have one thread, onto the host where `pid` lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = Path("/proc/self/ns")
    # All are opened first: in another user namespace /proc no longer answers questions about these.
    folders = [(Path(f"/proc/{pid}/ns") / name, own / name) for name in _NAMESPACES]
    opened = [
        os.open(theirs, os.O_RDONLY | os.O_CLOEXEC) for theirs, mine in folders if theirs.readlink() != mine.readlink()
    ]
    for descriptor in opened:
        if libc.setns(descriptor, _ANY_KIND) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"setns: {os.strerror(error)}")
        os.close(descriptor)
