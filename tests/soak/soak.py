"""Calls by the hundred thousand, each result checked:

    python tests/soak/soak.py --calls 1000000 --seed 1 --seconds 1200 --out soak.jsonl --summary soak.json

Every result must stay within its exact limit (limits.py) and be the same on all ranks; of sampled groups every result
equals the reference byte for byte. Between epochs, when all groups are destroyed, open files and mappings of shared
memory must be what they were, and memory must not grow. One JSON line per slice of processes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from graphs import RecordedPass  # noqa: E402
from ranks import run_ranks  # noqa: E402
from runner import Pool, Runner  # noqa: E402
from schedule import LARGEST, Epoch, Schedule  # noqa: E402

EPOCH_CALLS = 3000  # per group
LARGE_EVERY = 12  # epochs
WARM_UP = 0.3  # of a slice: memory pools fill
FEWEST_EPOCHS = 8  # of a slice whose memory is judged
SHORT_SLICE_EPOCHS = max(FEWEST_EPOCHS, LARGE_EVERY)  # so that memory is judged and a large tensor comes
# glibc gives large blocks back to the system, until it has seen one go: then it keeps such blocks as pieces of a heap,
# which are no leak and look like one. With a fixed limit it goes on giving them back. Read when a process starts.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
# A call that leaks anything leaks the smallest piece that malloc gives, 32 bytes; half of that. Besides: what fills in
# the first thousands of calls, 6 to 7 MB within 6,000 and 1 MB within the next 8,000 (three ranks on CPU, twice), and
# what torch's store keeps of each group for as long as it lives, 4.6 KB under plain Gloo and 5.8 under echo.
LEAK_BYTES_PER_CALL = 16
LEAK_BYTES_PER_GROUP = 8 << 10
LEAK_SLACK_BYTES = 8 << 20


def run_epoch(epoch: Epoch, pool: Pool, rank: int, size: int, device: str) -> tuple[int, int]:
    """(calls, calls compared with the reference) of this rank; raises where a result is wrong."""
    runners = [Runner(use, pool, rank, device) for use in epoch.uses]
    if not epoch.threads:
        for index, count in turns(runners, epoch.mixing):
            runners[index].some(count)
        for runner in runners:
            runner.finish()
    elif device == "cpu":
        in_threads([runner.all for runner in runners])
    else:
        in_threads(bodies_in_turn(runners, turns(runners, epoch.mixing), rank % torch.cuda.device_count()))
    sums = torch.tensor([runner.crc for runner in runners])
    everyone = [torch.empty_like(sums) for _ in range(size)]
    dist.all_gather(everyone, sums)
    for index, runner in enumerate(runners):
        if len({int(everyone[member][index]) for member in runner.use.ranks}) > 1:
            raise AssertionError(f"ranks {runner.use.ranks} hold different results: {runner.key}")
        if runner.member:
            dist.destroy_process_group(runner.group)
    return sum(runner.calls for runner in runners), sum(runner.mirrored for runner in runners)


def turns(runners: list[Runner], seed: int) -> list[tuple[int, int]]:
    """(runner, calls) in turn: an order among the groups that is alike on all ranks."""
    left = [len(runner.use.calls) for runner in runners]
    mixing = random.Random(seed)
    order = []
    while some := [index for index, calls in enumerate(left) if calls]:
        index = mixing.choice(some)
        count = min(left[index], mixing.randrange(1, 8))
        left[index] -= count
        order.append((index, count))
    return order


class Turnstile:
    """Lets threads through one at a time, in the order of their places, until one has failed."""

    def __init__(self) -> None:
        self.changed, self.place, self.failed = threading.Condition(), 0, False

    def enter(self, place: int) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.place == place or self.failed)
            return not self.failed

    def leave(self, failed: bool = False) -> None:
        with self.changed:
            self.place, self.failed = self.place + 1, self.failed or failed
            self.changed.notify_all()


def bodies_in_turn(runners: list[Runner], order: list[tuple[int, int]], device_index: int) -> list[Callable[[], None]]:
    """A body per runner. On a GPU calls of all groups follow each other, so their order must be one on all ranks,
    whatever thread they come from."""
    turnstile = Turnstile()

    def body(mine: int) -> None:
        torch.cuda.set_device(device_index)
        try:
            for place, (index, count) in enumerate(order):
                if index == mine and turnstile.enter(place):
                    runners[mine].some(count)
                    turnstile.leave()
            runners[mine].finish()
        except BaseException:
            turnstile.leave(failed=True)
            raise

    return [functools.partial(body, index) for index in range(len(runners))]


def in_threads(bodies: list[Any]) -> None:
    failures: list[BaseException] = []

    def guarded(body: Any) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Holder(Protocol):
    """What holds memory on purpose, which is left out of account."""

    def held_bytes(self) -> int: ...

    def held_device_bytes(self) -> int: ...


def footprint(pool: Holder) -> dict[str, int]:
    """What this process holds beside the pool, after it has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text().split()
    return {
        "rss": (int(status[status.index("VmRSS:") + 1]) << 10) - pool.held_bytes(),
        "files": len(os.listdir("/proc/self/fd")),
        "shared": sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "threads": int(status[status.index("Threads:") + 1]),
    }


def device_footprint(size: int, pool: Holder) -> dict[str, int]:
    """What is in use of this rank's GPU beyond what torch's allocator has reserved there for any rank, and what this
    process's tensors hold beside the pool. Called on all ranks alike."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    mine = torch.tensor([torch.cuda.current_device(), torch.cuda.memory_reserved()])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine)
    free, total = torch.cuda.mem_get_info()
    dist.barrier()  # nobody reserves more before all have looked
    reserved = sum(int(their_bytes) for device, their_bytes in everyone if device == mine[0])
    return {
        "device_used": total - free - reserved,
        "device_tensors": torch.cuda.memory_allocated() - pool.held_device_bytes(),
    }


def settled_footprint(pool: Holder, before: dict[str, int] | None) -> dict[str, int]:
    """Threads that nobody waits for close the last files within a moment."""
    deadline = time.monotonic() + 5
    while True:
        now = footprint(pool)
        same = before is None or all(now[name] <= before[name] for name in ("files", "shared", "threads"))
        if same or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def run_slice(
    rank: int,
    size: int,
    seed: int,
    calls: int,
    seconds: float,
    device: str,
    largest: int,
    epoch_calls: int,
    fewest_epochs: int,
) -> dict[str, Any]:
    """Epochs until one rank has made `calls` calls or the time is over, and `fewest_epochs` in any case."""
    if torch.cuda.is_available() and device == "cuda":  # the question opens the driver's files, on CPU soaks too
        torch.cuda.set_device(rank % torch.cuda.device_count())
    schedule = Schedule(
        seed, size, largest, fabrics=("peer",) if device == "cuda" else ("peer", "peer", "peer", "wire")
    )
    pool = Pool(seed, size, device)
    recorded = RecordedPass(rank, seed) if device == "cuda" else None
    start = time.monotonic()
    made = mirrored = epochs = groups = replayed = 0
    history: list[tuple[int, dict[str, int]]] = []
    while True:
        enough = epochs >= fewest_epochs and (made >= calls or time.monotonic() - start >= seconds)
        time_over = torch.tensor(int(enough))
        dist.all_reduce(time_over, op=dist.ReduceOp.MAX)
        if time_over:
            break
        epoch = schedule.epoch(epoch_calls, with_large=epochs % LARGE_EVERY == LARGE_EVERY - 1)
        new, compared = run_epoch(epoch, pool, rank, size, device)
        if recorded:
            replayed += recorded.replay(20)
        made, mirrored, epochs, groups = made + new, mirrored + compared, epochs + 1, groups + len(epoch.uses)
        held = settled_footprint(pool, history[0][1] if history else None)
        if device == "cuda":
            held |= device_footprint(size, pool)
        history.append((made, held | {"groups": groups}))
    return {
        "calls": made,
        "mirrored": mirrored,
        "epochs": epochs,
        "groups": groups,
        "replayed": replayed,
        "history": history,
        "largest": max(kind.numel for kind in pool.entries),
    }


def growth(history: list[tuple[int, dict[str, int]]]) -> list[str]:
    """What a rank held more of at the end than after the warm-up."""
    if len(history) < 2:
        return []
    later = history[int(len(history) * WARM_UP) :]
    problems = []
    for name in ("files", "shared", "threads"):
        if later[-1][1][name] > later[0][1][name]:
            problems.append(f"{name}: {later[0][1][name]} became {later[-1][1][name]}")
    if len(history) < FEWEST_EPOCHS:  # pools of memory still fill
        return problems
    third = max(1, len(later) // 3)
    for name in ("rss", "device_used", "device_tensors"):
        if name not in later[0][1]:
            continue
        early, late = (sorted(held[name] for _, held in part)[third // 2] for part in (later[:third], later[-third:]))
        allowed = LEAK_SLACK_BYTES + LEAK_BYTES_PER_CALL * (later[-1][0] - later[0][0])
        allowed += LEAK_BYTES_PER_GROUP * (later[-1][1].get("groups", 0) - later[0][1].get("groups", 0))
        if late - early > allowed:
            problems.append(f"{name} grew by {late - early} bytes, more than {allowed}")
    return problems


def soak_slice(
    seed: int,
    calls: int,
    seconds: float,
    device: str,
    largest: int,
    epoch_calls: int = EPOCH_CALLS,
    fewest_epochs: int = 1,
) -> dict[str, Any]:
    """One set of processes; the line to be recorded."""
    size = (2, 3, 2, 4)[seed % 4] if device == "cpu" else 2
    start = time.monotonic()
    arguments = (seed, calls, seconds, device, largest, epoch_calls, fewest_epochs)
    outcomes = run_ranks(run_slice, size, *arguments, timeout=seconds + 240)
    first, last = outcomes[0]["history"][0][1], outcomes[0]["history"][-1][1]
    return {
        "seed": seed,
        "ranks": size,
        "device": device,
        "calls": sum(outcome["calls"] for outcome in outcomes),
        "mirrored": sum(outcome["mirrored"] for outcome in outcomes),
        "replayed": sum(outcome["replayed"] for outcome in outcomes),
        "epochs": outcomes[0]["epochs"],
        "groups": outcomes[0]["groups"],
        "largest": outcomes[0]["largest"],
        "took_s": round(time.monotonic() - start, 1),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "footprint_first": first,
        "footprint_last": last,
        "problems": [f"rank {r}: {text}" for r, outcome in enumerate(outcomes) for text in growth(outcome["history"])],
    }


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "slices": len(lines),
        **{
            name: sum(line[name] for line in lines)
            for name in ("calls", "mirrored", "replayed", "epochs", "groups", "took_s")
        },
        **{name: sorted({line[name] for line in lines}) for name in ("torch", "cores", "date")},
        "largest_elements": max(line["largest"] for line in lines),
        "problems": [problem for line in lines for problem in line["problems"]],
        "rss_growth_mib": {
            str(line["seed"]): round((line["footprint_last"]["rss"] - line["footprint_first"]["rss"]) / 2**20, 1)
            for line in lines
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000, help="in all, counted on every rank")
    parser.add_argument("--seconds", type=float, default=1200, help="start no slice after that time")
    parser.add_argument("--slice-seconds", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1, help="of the first slice")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--largest", type=int, default=LARGEST, help="elements of the largest tensor")
    parser.add_argument("--out", type=Path, help="JSON lines, appended: a soak goes on where it stopped")
    parser.add_argument("--summary", type=Path, help="JSON")
    a = parser.parse_args()
    lines = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out and a.out.exists() else []
    end = time.monotonic() + a.seconds
    while (made := sum(line["calls"] for line in lines)) < a.calls and (left := end - time.monotonic()) > 0:
        line = soak_slice(a.seed + len(lines), a.calls - made, min(a.slice_seconds, left), a.device, a.largest)
        lines.append(line)
        if a.out:
            with a.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    summary = summarise(lines)
    if a.summary:
        a.summary.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
