"""Speed over a cable between two hosts (network namespaces on this machine, the kernel's token bucket as the limit):
echo against Gloo, in turn in one run, so that both meet the same disturbances.

    python tests/hosts_speed.py --output ci/baseline/hosts_cpu.json

A row has the median over the calls of the slowest rank's seconds. `link_mbit` is what one plain TCP connection carries
at that limit. Both hosts share this machine's cores, so from some rate on their work counts more than the cable.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import INTERFACE, Hosts, address, join
from ranks import run_ranks

ROWS: dict[str, dict[str, Any] | None] = {
    "gloo": None,
    "echo as shipped": {},
    "echo, no rotation": {"rotation": "none"},
    "echo, no feedback": {"feedback": False},
    "echo, neither": {"rotation": "none", "feedback": False},
    "echo 8 bits": {"bits": 8},
}
SIZES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
LIMITS_MBIT = (1000, 10000, 0)  # 0: none
TCP_PORT, STORE_PORT = 29500, 29501
TCP_BYTES = 192 << 20


def measure(rank: int, size: int, pids: list[int], calls: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    import echo_pg

    join(pids[rank * len(pids) // size])
    store = dist.TCPStore(address(0), STORE_PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups = {"gloo": dist.group.WORLD} | {
        name: dist.new_group(
            backend="echo", pg_options=echo_pg.Options(policy="all", min_bytes=0, fabric="wire", **options)
        )
        for name, options in ROWS.items()
        if options is not None
    }
    rows = []
    for label, number_of_bytes in sizes.items():
        source = torch.randn(number_of_bytes // 2, generator=torch.Generator().manual_seed(rank)).bfloat16()
        exact = source.float()
        dist.all_reduce(exact)
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        errors = {}
        for call in range(calls + 1):
            for name, group in groups.items():
                tensor = source.clone()
                dist.barrier()
                start = time.monotonic()
                dist.all_reduce(tensor, group=group)
                slowest = torch.tensor(time.monotonic() - start)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if call > 0:
                    seconds[name].append(slowest.item())
                errors[name] = float((tensor.float() - exact).norm() / exact.norm())
        base = statistics.median(seconds["gloo"])
        for name, group in groups.items():
            median = statistics.median(seconds[name])
            if name != "gloo":
                stats = echo_pg.stats(group)
                assert stats["fabric"] == "wire" and stats["calls_forwarded"] == 0
            assert errors[name] < {"gloo": 0.01, "echo 8 bits": 0.02}.get(name, 0.25), (name, errors[name])
            rows.append(
                {"size": label, "row": name, "calls": calls, "median_s": round(median, 5)}
                | {"gloo_over_it": round(base / median, 3), "error": round(errors[name], 5)}
            )
    return rows


def tcp_rate(rank: int, size: int, pids: list[int]) -> float:
    """Mbit/s of one connection from the first host to the second."""
    join(pids[rank])
    if rank == 1:
        with socket.create_server((address(1), TCP_PORT)) as server:
            receiver, _ = server.accept()
            with receiver:
                left, start, buffer = TCP_BYTES, time.monotonic(), bytearray(1 << 20)
                while left > 0:
                    left -= receiver.recv_into(buffer)
                return TCP_BYTES * 8 / 1e6 / (time.monotonic() - start)
    for _ in range(100):
        try:
            sender = socket.create_connection((address(1), TCP_PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with sender:
        chunk = bytes(1 << 20)
        for _ in range(TCP_BYTES >> 20):
            sender.sendall(chunk)
    return 0.0


def environment() -> dict[str, Any]:
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=9, help="timed, after one that is not")
    parser.add_argument("--ranks-per-host", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--limits", type=int, nargs="*", default=list(LIMITS_MBIT), help="Mbit/s, 0: none")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    given = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "runs": []}
    for limit in given.limits:
        with Hosts(2) as hosts:
            if limit:
                hosts.limit_rate(limit)
            rate = run_ranks(tcp_rate, 2, hosts.pids, backend=None, timeout=120)[1]
            for per_host in given.ranks_per_host:
                sizes = {name: SIZES[name] for name in given.sizes}
                rows = run_ranks(
                    measure, 2 * per_host, hosts.pids, given.calls, sizes,
                    backend=None, env={"GLOO_SOCKET_IFNAME": INTERFACE, "ECHO_LOG": "off"}, timeout=900,
                )[0]  # fmt: skip
                run = {"limit_mbit": limit, "link_mbit": round(rate), "hosts": 2, "ranks_per_host": per_host}
                report["runs"].append(run | {"rows": rows})
                for row in rows:
                    print(run, row, flush=True)
                given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
