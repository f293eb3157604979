"""Injects faults by the hundred and checks that each ends as promised:

    python tests/faults/campaign.py --injections 500 --seed 1 --out faults.jsonl --summary faults.json

One JSON line per injection: what was injected, every rank's error and after how long, what was found wrong. A campaign
that is interrupted goes on where it stopped, if it is given the same seed and file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from injections import PATIENCE, Injection, choose  # noqa: E402
from participant import Outcome, diary_of, run_injection  # noqa: E402
from ranks import RankError, run_ranks  # noqa: E402
from words import missing_words  # noqa: E402


def may_end_well(it: Injection, rank: int) -> bool:
    """Whether this rank may see no error: who skips the last call has made all it wanted to, and a process stopped at
    its very end has done its work."""
    if rank == it.victim:
        return it.action in ("skip the last", "stop")
    return False


def last_seen(folder: str, rank: int) -> tuple[str, float]:
    """What a rank that returned nothing was doing, and for how many seconds by now."""
    try:
        diary = json.loads(diary_of(folder, rank).read_text())
    except (OSError, ValueError):
        return "starting", 0.0
    return diary["doing"], time.monotonic() - diary["since"]


def judge(it: Injection, outcomes: list[Any], unfinished: dict[int, tuple[str, float]]) -> list[str]:
    """What is not as promised; `unfinished` tells of ranks that returned nothing what they were doing for how long."""
    problems = []
    for rank, outcome in enumerate(outcomes):
        gone = rank == it.victim and it.ends_process
        if isinstance(outcome, RankError):
            ended = "exit code -9" if it.action == "kill" else "exit code 3"
            if not (gone and ended in str(outcome)):
                doing, seconds = unfinished[rank]
                problems.append(f"rank {rank}: {outcome}; {doing} since {seconds:.1f} s")
            continue
        if gone:
            problems.append(f"rank {rank}: nothing struck it")
            continue
        problems += [f"rank {rank}: {problem}" for problem in outcome.problems]
        if not outcome.text and not may_end_well(it, rank):
            problems.append(f"rank {rank}: no error after {outcome.right} right results")
        if not outcome.text:
            continue
        problems += missing_words(it, rank, outcome.text)
        if rank == it.victim:
            continue
        limit = PATIENCE if it.ends_process and not it.is_noticed_late else it.timeout + PATIENCE
        if outcome.seconds > limit:
            problems.append(f"rank {rank}: {outcome.seconds:.1f} s instead of {limit:.1f}: {outcome.text}")
    return problems


def left_processes(outcomes: list[Any]) -> list[str]:
    pids = [outcome.pid for outcome in outcomes if isinstance(outcome, Outcome)]
    return [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]


def inject(number: int, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Run one injection; the line to be recorded."""
    return inject_it(choose(number, seed, device))


def inject_it(it: Injection) -> dict[str, Any]:
    """Run this injection; the line to be recorded."""
    import torch.distributed as dist

    start = time.monotonic()
    files = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outcomes = run_ranks(
            run_injection,
            it.size,
            it,
            folder,
            server.port,
            backend=None,
            check=False,
            timeout=90,
            # Over NCCL a time-out is an error then, which echo explains.
            env={"ECHO_LOG": "off", "TORCH_NCCL_BLOCKING_WAIT": "1"},
        )
        del server
        unfinished = {r: last_seen(folder, r) for r, outcome in enumerate(outcomes) if isinstance(outcome, RankError)}
    problems = judge(it, outcomes, unfinished) + left_processes(outcomes)
    # Of this campaign's processes: others of the machine may come and go.
    if left := [name for name in set(os.listdir("/dev/shm")) - files if "echo" in name]:
        problems.append(f"left in shared memory: {left}")
    seen = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Outcome)}
    waited = [outcome.seconds for rank, outcome in seen.items() if rank != it.victim and outcome.text]
    late = [rank for rank in unfinished if rank != it.victim and "did not finish" in str(outcomes[rank])]
    waited += [unfinished[rank][1] for rank in late]
    return {
        **it.as_dict(),
        "timeout_s": it.timeout,
        "latency_s": round(max(waited, default=0.0), 3),
        "right_results": sum(outcome.right for outcome in seen.values()),
        "errors": {rank: outcome.text for rank, outcome in seen.items()},
        "problems": problems,
        "took_s": round(time.monotonic() - start, 2),
    }


def campaign(numbers: list[int], seed: int, device: str, jobs: int, out: Path | None) -> list[dict[str, Any]]:
    """Inject and record. Most of an injection is waiting for a time-out, so several run at a time."""
    lines = []
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(lambda number: inject(number, seed, device), numbers):
            lines.append(line)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return lines


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and worst latencies by action, stage and fabric."""
    table: dict[str, dict[str, Any]] = defaultdict(lambda: {"injections": 0, "failed": 0, "worst_latency_s": 0.0})
    for line in lines:
        check = ", diagnostics" if line["diagnostics"] else ""
        cell = table[f"{line['action']}, {line['stage']}, {line['fabric']}{check}"]
        cell["injections"] += 1
        cell["failed"] += bool(line["problems"])
        cell["worst_latency_s"] = max(cell["worst_latency_s"], line["latency_s"])
    # The wire on devices notices an exit by its time-out: those groups have a short one, and count below.
    exits = [line["latency_s"] for line in lines if line["timeout_s"] > PATIENCE and line["action"] in ("kill", "exit")]
    others = [line["latency_s"] - line["timeout_s"] for line in lines if line["timeout_s"] < PATIENCE]
    return {
        "injections": len(lines),
        "failed": sum(bool(line["problems"]) for line in lines),
        "right_results_before_the_fault": sum(line["right_results"] for line in lines),
        "worst_latency_after_exit_s": round(max(exits, default=0.0), 2),
        "worst_latency_beyond_time_out_s": round(max(others, default=0.0), 2),
        "by_action": dict(Counter(line["action"] for line in lines)),
        "by_fault": {name: table[name] for name in sorted(table)},
    }


def about(seed: int, device: str) -> dict[str, Any]:
    """Where a campaign ran, with which sources, and how to repeat it."""
    import torch

    git = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True)
    gpus = {"gpus": f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"} if device == "cuda" else {}
    return {
        "seed": seed,
        "device": device,
        **gpus,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": git.stdout.strip() or "unknown",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--injections", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=4, help="injections at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after that time")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of injections, instead of all")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--summary", type=Path, help="JSON")
    arguments = parser.parse_args()
    lines = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()]
        if arguments.out and arguments.out.exists()
        else []
    )
    done = {line["number"] for line in lines}
    numbers = arguments.only or [number for number in range(arguments.injections) if number not in done]
    end = time.monotonic() + arguments.seconds
    while numbers and time.monotonic() < end:
        batch, numbers = numbers[: 4 * arguments.jobs], numbers[4 * arguments.jobs :]
        for line in (new := campaign(batch, arguments.seed, arguments.device, arguments.jobs, arguments.out)):
            name = f"{line['number']:4} {line['action']}, {line['stage']}, {line['fabric']}"
            print(
                f"{name}: {line['latency_s']} s (took {line['took_s']} s)",
                *line["problems"],
                sep="\n      ",
                flush=True,
            )
        lines += new
    summary = about(arguments.seed, arguments.device) | summarise(lines)
    if arguments.summary:
        arguments.summary.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({name: value for name, value in summary.items() if name != "by_fault"}, indent=1))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
