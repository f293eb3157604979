"""The command `python -m echo_pg bench allreduce`: its arguments, its ranks, its report."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from .. import log, options
from . import cases, launch, plot, results

_EPILOGUE = """\
Every row is checked first: all ranks hold the same bytes, the error is at most what rounding explains, and the
call was quantized. Then the rows run in turn. Rows of echo use policy="all" and min_bytes=0; "default" keeps the
shipped options, min_bytes and dtypes included, except for policy="all": a direct call belongs to no module, so the
shipped policy "auto" would leave it exact. Rows with feedback time the second site of a pass, the first that adds a
correction. ECHO_* variables that are set count for every row, and the report names them.

Under torchrun the ranks are torchrun's; otherwise they are started here.
"""
_MOST_RANKS = 64
_TIMEOUT = timedelta(minutes=10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the all-reduce against Gloo (CPU tensors) or NCCL (CUDA tensors)."
    parser.epilog = _EPILOGUE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", metavar="N[,N...]", help="group sizes, one run each; default 2")
    parser.add_argument("--sizes", metavar="S[,S...]", help='bytes, or "64KiB,1MiB"; default 64 KiB up in powers of 4')
    parser.add_argument("--dtypes", metavar="T[,T...]", help="default bf16,fp32 on CPU and bf16 on CUDA")
    parser.add_argument("--rows", metavar="R[,R...]", help="default all; the baseline always runs: " + _row_names())
    parser.add_argument("--iterations", type=int, help="measured ones; default 20 on CPU, 80 on CUDA")
    parser.add_argument("--warmup", type=int, help="iterations before them; default 3 on CPU, 30 on CUDA")
    parser.add_argument("--commit", default="", help="what to record where the checkout has no git")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-out"),
        metavar="DIR",
        help="for JSON lines and plots; default %(default)s",
    )
    parser.add_argument(
        "--report-only", type=Path, metavar="FILE.jsonl", help="measure nothing, show what was measured"
    )


def _row_names() -> str:
    return "; ".join(f"{device}: {', '.join(row.name for row in rows)}" for device, rows in cases.ROWS.items())


def main(chosen: argparse.Namespace) -> int:
    """0 if all went well, 1 if a rank or a check failed, 2 for arguments that make no sense."""
    try:
        if chosen.report_only is not None:
            return _show(results.read(chosen.report_only), chosen.report_only, chosen.out)
        launched = options.launched_ranks()
        plan = _plan(chosen, launched)
        out = chosen.out
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, ImportError, OSError) as error:
        print(f"bench allreduce: {error}", file=sys.stderr)
        return 2
    path = out / f"allreduce-{chosen.device}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.jsonl"
    return launch.run_sizes(
        "allreduce", _run_rank, plan["ranks"], launched, path, plan, str(path),
        show=functools.partial(_show, tables=False),
    )  # fmt: skip


def _plan(chosen: argparse.Namespace, launched: tuple[int, int, int] | None) -> dict[str, Any]:
    """The arguments, checked: what every rank is told. Raises ValueError, naming value and limit."""
    launch.require()
    device = chosen.device
    most, why = _MOST_RANKS, "on one host"
    if device == "cuda":
        import torch

        most, why = torch.cuda.device_count(), "(the GPUs of this host)"
        if most < 2 and launched is None:
            raise ValueError(f"--device cuda needs two GPUs, {most} found")
    if launched is not None:
        size = launched[1]
        if size < 2 or (chosen.ranks is not None and chosen.ranks != str(size)):
            wanted = f", --ranks is {chosen.ranks}" if chosen.ranks is not None else ""
            raise ValueError(f"torchrun started {size} rank(s){wanted}; they must be equal and at least 2")
        ranks: tuple[int, ...] = (size,)
    else:
        ranks = cases.choose_ranks(chosen.ranks or "2", most, why)
    warmup, iterations = cases.DEFAULT_ITERATIONS[device]
    warmup = warmup if chosen.warmup is None else chosen.warmup
    iterations = iterations if chosen.iterations is None else chosen.iterations
    for name, value, least in (("--warmup", warmup, 0), ("--iterations", iterations, 1)):
        if not least <= value <= 100_000:
            raise ValueError(f"{name}: {value} must be from {least} to 100000")
    dtypes = cases.choose_dtypes(device, chosen.dtypes)
    return {
        "device": device,
        "ranks": ranks,
        "dtypes": dtypes,
        "sizes": cases.choose_sizes(device, chosen.sizes, dtypes),
        "rows": tuple(row.name for row in cases.choose_rows(device, chosen.rows)),
        "warmup": warmup,
        "iterations": iterations,
        "commit": chosen.commit,
    }


def _run_rank(
    rank: int, size: int, store_path: str | None, plan: dict[str, Any], path: str, local_rank: int | None = None
) -> None:
    """One rank from its start to its end; rank 0 writes the records and shows them as they come."""
    import torch
    import torch.distributed as dist

    from . import measure

    options.set_unless_given("ECHO_LOG", "off")
    threads = max(1, len(results.usable_cores()) // size)
    if plan["device"] == "cuda":
        # Multicast is not available on every machine, and no other row uses it.
        options.set_unless_given("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.set_device(rank if local_rank is None else local_rank)
    else:
        torch.set_num_threads(threads)
    store = dist.FileStore(store_path, size) if store_path is not None else None
    place = {"store": store, "rank": rank, "world_size": size} if store is not None else {}
    dist.init_process_group("gloo", timeout=_TIMEOUT, **place)
    settings = measure.Settings(
        device=plan["device"],
        sizes=plan["sizes"],
        rows=cases.choose_rows(plan["device"], ",".join(plan["rows"])),
        warmup=plan["warmup"],
        iterations=plan["iterations"],
        local_rank=local_rank,
    )
    common = results.circumstances(plan["device"], threads, local_rank) | {"warmup": plan["warmup"]}
    common["commit"] = plan["commit"] or common["commit"]
    bench = measure.Rank(settings)
    for dtype in plan["dtypes"]:
        reporter = _Reporter(common, size, dtype, Path(path), enabled=rank == 0)
        bench.measure(dtype, reporter.begin, reporter.say, reporter.done)
    dist.destroy_process_group()


class _Reporter:
    """Progress on stderr, one line that is overwritten on a terminal and one per size elsewhere; results on stdout."""

    def __init__(self, common: results.Record, ranks: int, dtype: str, path: Path, enabled: bool) -> None:
        self.common, self.ranks, self.dtype, self.path, self.enabled = common, ranks, dtype, path, enabled
        self.terminal = sys.stderr.isatty()
        self.title, self.began, self.shown = "", 0.0, 0

    def begin(self, size_bytes: int) -> None:
        self.title = f"{self.dtype}, {self.ranks} ranks, {log.byte_size(size_bytes)}"
        self.began = time.monotonic()
        if self.enabled and not self.terminal:
            print(f"measuring {self.title} ...", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self.enabled and self.terminal:
            line = f"{self.title}: {text}, {time.monotonic() - self.began:.0f} s"
            print("\r" + line.ljust(self.shown), end="", file=sys.stderr, flush=True)
            self.shown = len(line)

    def done(self, size_bytes: int, rows: list[results.Measured]) -> None:
        if not self.enabled:
            return
        if self.terminal:
            print("\r" + " " * self.shown + "\r", end="", file=sys.stderr, flush=True)
        made = results.records(self.common, self.ranks, self.dtype, size_bytes, rows)
        if not self.path.exists():
            print(f"{results.header(made[0])}\n{results.legend(made)}")
        results.append(self.path, made)
        print(f"\n{results.table(made)}", flush=True)


def _show(made: list[results.Record], path: Path, out: Path, tables: bool = True) -> int:
    """Tables (of each size, unless they were shown while they were made), summaries, plots."""
    if tables:
        print(f"{results.header(made[0])}\n{results.legend(made)}")
        for group in results.by(made, "dtype", "ranks", "bytes"):
            print(f"\n{results.table(group)}")
    for group in results.by(made, "dtype", "ranks"):
        print(f"\n{results.summary(group)}")
    print(f"\n{path}")
    return plot.show(plot.draw, made, out, path.stem)
