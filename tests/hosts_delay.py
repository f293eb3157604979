"""A cable between two hosts that takes its time: a TUN device on each, and this process, which hands every packet on
after a while. It stands in for the kernel's netem, which not every kernel has; it loses and reorders nothing.

    python hosts_delay.py PID0 PID1 SECONDS    the hosts where these processes live; prints "ready" and runs for ever
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

from hosts import INTERFACE, address, join

MTU = 60000  # few packets: each is handed on by Python
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x1, 0x1000


def open_end(pid: int, host: int) -> int:
    join(pid)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        f"addr add {address(host)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} mtu {MTU} up",
        "link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return end


def relay(ends: list[int], delay: float) -> None:
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        for end in select.select(ends, [], [], wait)[0]:
            under_way.append((time.monotonic() + delay, ends[1 - ends.index(end)], os.read(end, 65536)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    both = [open_end(int(pid), host) for host, pid in enumerate(sys.argv[1:3])]
    print("ready", flush=True)
    relay(both, float(sys.argv[3]))
