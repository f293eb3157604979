"""`python -m echo_pg doctor`: what is installed and whether it fits; under torchrun also a live check over the ranks.

The live check makes a group, compares a quantized all-reduce with the exact one and over the ranks, and times both in
turn; it takes at most 20 seconds and ends with a non-zero exit code if anything is wrong.
"""

import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import __version__, build, log, options, report
from .options import Options

_TIME_LIMIT_S = 20.0
_SIZES_ELEMS = (1 << 16, 1 << 20, 1 << 22)
# A 4-bit round trip of normally distributed numbers errs by some 10% in norm; three times that is a defect, not
# rounding.
_ERROR_LIMIT = 0.3


def main(device: str = "auto") -> int:
    """Print the report; returns the exit code: 0 if all is well."""
    launched = options.launched_ranks()
    first = launched is None or launched[0] == 0
    problems = _installation(say=print if first else lambda *_: None)
    if launched and not problems:
        problems = _live_check(*launched, device)
    if first:
        if not launched:
            print("\nFor a live check over two ranks:  torchrun --nproc-per-node 2 -m echo_pg doctor")
        print("\n" + ("\n".join(f"PROBLEM: {problem}" for problem in problems) or "All is well."))
    return 1 if problems else 0


def _installation(say: Callable[..., None]) -> list[str]:
    """Print what is here; returns what must be repaired."""
    import torch
    import torch.distributed as dist

    built = build.info()
    say(f"echo_pg {__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}")
    if built is None:
        return [str(build.why_unusable())]
    archs = f" ({built.CUDA_ARCHS})" if built.CUDA_ARCHS else ""
    say(f"built for torch {built.TORCH}, CUDA {built.CUDA}{archs}, Python {built.PYTHON}, with {built.FLAGS}")
    say(f"source {built.SOURCE_HASH}, protocol {built.PROTOCOL}")
    try:
        extension = build.extension()
    except ImportError as error:
        return [str(error)]
    say("extension: " + ", ".join(f"{name} {value}" for name, value in extension.build_flags().items()))
    say(f"inner backends: {_inner_backends(dist)}")
    say(f"CUDA tensors: {_cuda_prospects(torch, extension)}")
    registered = "ECHO" in dist.Backend._plugins
    say(f'backend "echo": {"registered by import torch" if registered else "not registered"}')
    for name, value in options.variables_in_effect().items():
        say(f"  {name}={value}")
    problems = []
    if not registered:
        problems.append(
            "import torch did not register the backend: is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set? Programs then have to "
            "import echo_pg after torch"
        )
    try:
        chosen = Options()
        sizes = (f"{log.byte_size(chosen.min_bytes_on(device))} on {device}" for device in options.TUNED_MIN_BYTES)
        say(f"min_bytes: {', '.join(sizes)}")
    except ValueError as error:
        problems.append(str(error))
    return problems


def _inner_backends(dist: Any) -> str:
    found = [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    return ", ".join(found) or "none"


def _cuda_prospects(torch: Any, extension: Any) -> str:
    """Whether all-reduces of CUDA tensors can be quantized here, and if not why they are forwarded."""
    if torch.version.hip:
        return "forwarded (ROCm is not supported)"
    if not torch.version.cuda:
        return "none (torch without CUDA)"
    if not extension.build_flags()["cuda"]:
        return "built without CUDA: forwarding to NCCL"
    if not torch.cuda.is_available():
        return "none (no usable GPU)"
    count = torch.cuda.device_count()
    obstacles = {i: text for i in range(count) if (text := extension.cuda_obstacle(i))}
    forwarded = [f"forwarded to NCCL on cuda:{i} ({text})" for i, text in obstacles.items()]
    return ", ".join([f"{count - len(obstacles)} usable", *forwarded])


def _live_check(rank: int, size: int, local_rank: int, device_name: str) -> list[str]:
    """Make a group and try it. Returns the problems that this rank or, by exchange, any other rank saw."""
    import torch
    import torch.distributed as dist

    use_cuda = torch.cuda.is_available() if device_name == "auto" else device_name == "cuda"
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    deadline = time.monotonic() + _TIME_LIMIT_S
    chosen = Options(policy="all", min_bytes=0, dtypes=("bfloat16",), early_sites=0)
    try:
        dist.init_process_group("echo", pg_options=chosen, timeout=timedelta(seconds=_TIME_LIMIT_S))
        mine = _try_group(torch, dist, rank, size, device, deadline)
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, mine)
        dist.destroy_process_group()
    except Exception as error:
        return [f"rank {rank}: {type(error).__name__}: {error}"]
    return sorted({problem for problems in everyone for problem in problems})


def _try_group(torch: Any, dist: Any, rank: int, size: int, device: Any, deadline: float) -> list[str]:
    if size == 1 or options.is_off():
        print(f"live: {'ECHO_OFF=1' if size > 1 else 'one rank'}, every call is forwarded")
        return []
    problems = []
    for numel in _SIZES_ELEMS:
        if time.monotonic() > deadline - _TIME_LIMIT_S / 2:
            break
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(
            device, torch.bfloat16
        )
        report.new_pass("forward")
        before = report.stats(dist.group.WORLD)
        quantized = _reduced(dist, x)
        after = report.stats(dist.group.WORLD)
        with report.exact():
            exact = _reduced(dist, x)
        if after["calls_quantized"] != before["calls_quantized"] + 1:
            return [
                f"an all-reduce of {device.type} tensors was not quantized: {report.explain(x, group=dist.group.WORLD)}"
            ]
        error = ((quantized.double() - exact.double()).norm() / exact.double().norm()).item()
        if not error < _ERROR_LIMIT:
            problems.append(f"rank {rank}: the sum of {numel} elements is off by {error:.1%}")
        of_rank_0 = quantized.clone()
        dist.broadcast(of_rank_0, 0)
        if not torch.equal(of_rank_0.view(torch.int16), quantized.view(torch.int16)):
            problems.append(f"ranks 0 and {rank} hold different bytes after an all-reduce of {numel} elements")
        ours, theirs = _times(torch, dist, x)
        if rank == 0:
            times = f"echo {ours * 1e3:.2f} ms, inner {theirs * 1e3:.2f} ms ({theirs / ours:.2f}x)"
            where = f"{size} ranks, fabric {after['fabric']}, {log.byte_size(x.nbytes)} on {device.type}"
            print(f"live: {where}: {times}, error {error:.1%}")
    if rank == 0:
        print(f"live: fabric {_fabric_of(report.stats(dist.group.WORLD))}")
    return problems


def _fabric_of(stats: dict[str, Any]) -> str:
    """Which way codes travel, and why where peer memory was tried and not had."""
    if stats["fabric"] == "peer":
        return "peer: codes go straight into memory of the peers"
    reason = stats["fabric_reason"] or "as Options(fabric=...) says"
    return f"{stats['fabric']}: codes go through the inner backend ({reason})"


def _reduced(dist: Any, x: Any) -> Any:
    y = x.clone()
    dist.all_reduce(y)
    return y


def _times(torch: Any, dist: Any, x: Any, rounds: int = 7) -> tuple[float, float]:
    """Median seconds of (echo, inner backend), measured in turn so that both meet the same disturbances."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for exactly, kept in enumerate(samples):
            y = x.clone()
            report.new_pass("forward")
            dist.barrier()
            start = time.perf_counter()
            if exactly:
                with report.exact():
                    dist.all_reduce(y)
            else:
                dist.all_reduce(y)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            kept.append(time.perf_counter() - start)
    return statistics.median(samples[0]), statistics.median(samples[1])
