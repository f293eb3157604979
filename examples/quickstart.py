"""A real language model, tensor-parallel, with the all-reduces of every layer sent in 16, 8 and 4 bits.

    torchrun --nproc-per-node 3 examples/quickstart.py                  # all rows: the inner backend, then echo
    torchrun --nproc-per-node 3 examples/quickstart.py --backend gloo   # plain Gloo; no echo group is made

`ci/quickstart` prepares everything and runs the first line. Each row makes a process group, loads SmolLM2-135M into it
with unmodified transformers, reads ordinary English (perplexity: lower is better), writes a few words, and takes the
group down again. The rows differ in one line, `start_group`; the functions that use the model do not know what carries
their all-reduces.

Every forward pass has 61 all-reduces: one after the embedding, which stays exact, and two in each of the 30 layers.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import quickstart_report as report
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import TorchDispatchMode

from echo_pg.bench import smollm2

CHECKED_WINDOWS = 2  # windows whose logits are compared bit for bit between the inner backend and echo switched off
CONVERSION_LIMIT = timedelta(minutes=10)
DIFFERENCES = ("calls_quantized", "bytes_quantized", "wire_bytes")  # the counters of echo that the table is made from


@dataclass(frozen=True)
class Row:
    """One line of the table. `options` are those of `echo_pg.Options`; None means the inner backend itself."""

    label: str
    options: dict | None = field(default=None)


ECHO_ROWS = (
    Row("echo, 8 bits", {"bits": 8}),
    Row("echo, 4 bits (default)", {"bits": 4}),
    Row("echo, 4 bits, no feedback", {"bits": 4, "feedback": False}),
    Row("echo, 4 bits, no rotation", {"bits": 4, "rotation": "none"}),
    Row("echo, 4 bits, no feedback, no rotation", {"bits": 4, "feedback": False, "rotation": "none"}),
    Row("echo, 4 bits, first quarter 8 bits", {"bits": 4, "early_sites": 0.25}),
)
SWITCHED_OFF = Row("echo, switched off", {"policy": "off"})


class AllReduceCounter(TorchDispatchMode):
    """Counts the all-reduces that a model issues and the bytes of their tensors, whatever backend carries them."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.payload_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("c10d::allreduce_", "_c10d_functional::all_reduce"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.calls += 1
            self.payload_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        elif any(kind is not torch.Tensor and hasattr(kind, "placements") for kind in types):
            return NotImplemented  # a sharded tensor: let it become plain tensors and collectives first
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------------
# The model. Nothing below this line and above the next one knows about backends.


@torch.no_grad()
def evaluate(model, windows: torch.Tensor, step) -> tuple[float, list[str]]:
    """Perplexity over windows [n, length + 1] of token ids, and a fingerprint of each window's logits."""
    loss, fingerprints = 0.0, []
    for window in windows.to(model.device).unsqueeze(1):
        logits = model(window[:, :-1], use_cache=False).logits
        loss += torch.nn.functional.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
        fingerprints.append(hashlib.sha256(logits.cpu().contiguous().view(torch.uint8).numpy()).hexdigest())
        step()
    return math.exp(loss / windows[:, 1:].numel()), fingerprints


@torch.no_grad()
def generate(model, tokenizer, prompt: str, new_tokens: int) -> str:
    """The most likely continuation, token by token."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@torch.no_grad()
def count_all_reduces(model, window: torch.Tensor) -> AllReduceCounter:
    """One forward pass of one window; it also warms everything up before the clock runs."""
    with AllReduceCounter() as counter:
        model(window[None, :-1].to(model.device), use_cache=False)
    return counter


# ---------------------------------------------------------------------------------------------------------------------
# The process groups.


@dataclass
class Session:
    """What all rows share."""

    store: dist.Store
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    inner: str
    groups_made: int = 0


def start_group(session: Session, row: Row) -> None:
    """The one place where rows differ. Each group gets its own corner of the store, so that none reads old keys."""
    session.groups_made += 1
    common = {
        "store": dist.PrefixStore(f"row-{session.groups_made}", session.store),
        "rank": session.rank,
        "world_size": session.world_size,
    }
    if row.options is None:
        dist.init_process_group(session.inner, **common)
        return
    import echo_pg

    # min_bytes=0: while text is generated the tensors hold one token, less than echo would care to quantize.
    dtype_name = str(session.dtype).removeprefix("torch.")
    options = echo_pg.Options(min_bytes=0, dtypes=(dtype_name,), **row.options)
    dist.init_process_group("echo", pg_options=options, **common)


def synchronize(session: Session) -> float:
    """Waits for the device and for all ranks; returns the time."""
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    dist.barrier(device_ids=None if session.device.index is None else [session.device.index])
    return time.perf_counter()


def run_row(session: Session, row: Row, folder: Path, tokenizer, windows, args, progress) -> dict:
    """One line of the table."""
    start_group(session, row)
    model = smollm2.load_model(folder, session.dtype)
    progress.start(row.label, len(windows) + 2)
    counted = count_all_reduces(model, windows[0])
    progress.step()

    before = echo_stats(row)
    began = synchronize(session)
    perplexity, fingerprints = evaluate(model, windows, progress.step)
    evaluated = synchronize(session)
    during = {key: value - before[key] for key, value in echo_stats(row).items() if key in DIFFERENCES}
    text = generate(model, tokenizer, args.prompt, args.new_tokens) if args.new_tokens else ""
    generated = synchronize(session)
    progress.step()
    progress.done()

    quantized = check_sites(model, row, during, len(windows))
    # A ring all-reduce sends 2 (P - 1) / P of its tensor from each rank; that is what a call left exact is charged.
    ring = 2 * (session.world_size - 1) / session.world_size
    exact_bytes = counted.payload_bytes * len(windows) - during["bytes_quantized"]
    result = {
        "label": row.label,
        "options": row.options,
        "perplexity": perplexity,
        "sent_bytes": round(ring * exact_bytes) + during["wire_bytes"],
        "echo_stats": echo_stats(row) if row.options else None,
        "all_reduces_per_forward": counted.calls,
        "quantized_per_forward": quantized,
        "evaluation_s": evaluated - began,
        "tokens_per_s": args.new_tokens / (generated - evaluated),
        "generated": text,
        "fingerprints": fingerprints,
    }
    del model
    dist.destroy_process_group()
    return result


def echo_stats(row: Row) -> dict:
    """Echo's own counters of the group that stands; zeros where echo is not in use."""
    if row.options is None:
        return dict.fromkeys(DIFFERENCES, 0)
    import echo_pg

    return echo_pg.stats(dist.group.WORLD)


def check_sites(model, row: Row, during: dict, forwards: int) -> int:
    """Quantized all-reduces per forward pass. Fails unless they are exactly the two of every layer (or none)."""
    idle = row.options is None or row.options.get("policy") == "off"
    expected = 0 if idle else 2 * model.config.num_hidden_layers
    if during["calls_quantized"] != expected * forwards:
        raise RuntimeError(
            f"{row.label}: {during['calls_quantized']} quantized all-reduces in {forwards} forward passes, "
            f"expected {expected} in each. `python -m echo_pg doctor` says more."
        )
    return expected


def check_switched_off(session: Session, baseline: dict, folder: Path, tokenizer, windows, args, progress) -> str:
    """Echo with policy "off" must give the very bits of the inner backend."""
    quiet = argparse.Namespace(**{**vars(args), "new_tokens": 0})
    result = run_row(session, SWITCHED_OFF, folder, tokenizer, windows[:CHECKED_WINDOWS], quiet, progress)
    if result["fingerprints"] != baseline["fingerprints"][:CHECKED_WINDOWS]:
        raise RuntimeError(f'With policy="off" the logits differ from those of {session.inner}.')
    return f'Echo with policy="off" gives bit for bit the logits of {session.inner}: checked.'


# ---------------------------------------------------------------------------------------------------------------------


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bf16, as large models run; fp32 on a CPU whose bf16 matrix product is much slower than its fp32 one."""
    if device.type == "cuda":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 512, dtype=dtype)
        left @ right
        began = time.perf_counter()
        for _ in range(3):
            left @ right
        seconds[dtype] = time.perf_counter() - began
    return torch.bfloat16 if seconds[torch.bfloat16] < 2 * seconds[torch.float32] else torch.float32


def start_session(args) -> tuple[Session, Path]:
    """Meets the other ranks, settles device and dtype, and has rank 0 convert the model while the others wait."""
    store, rank, world_size = next(iter(rendezvous("env://")))
    use_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.device_count() >= world_size)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers splits a model over GPUs wherever it sees any
    if rank == 0:
        store.set("dtype", str(fastest_dtype(device)).removeprefix("torch."))
        smollm2.prepare_model(args.out, world_size)
        store.set("model is ready", "yes")
    store.wait(["model is ready"], CONVERSION_LIMIT)
    dtype = getattr(torch, store.get("dtype").decode())
    inner = "nccl" if use_cuda else "gloo"
    session = Session(store, rank, world_size, device, dtype, inner)
    return session, smollm2.prepare_model(args.out, world_size)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", choices=("echo", "gloo", "nccl"), default="echo", help="echo: all rows")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("quickstart-out"), help="folder for everything written")
    parser.add_argument("--windows", type=int, default=8, help="windows of text to read")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens to generate")
    parser.add_argument("--prompt", default="Once upon a time, there was a little")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    session, folder = start_session(args)
    tokenizer = smollm2.load_tokenizer(folder)
    windows = smollm2.english_windows(tokenizer, args.windows, args.length)
    progress = report.Progress(shown=session.rank == 0)
    plain = Row(f"{session.inner}, {8 * session.dtype.itemsize} bits")
    baseline = run_row(session, plain, folder, tokenizer, windows, args, progress)
    rows, checks = [baseline], []
    if args.backend == "echo":
        checks.append(check_switched_off(session, baseline, folder, tokenizer, windows, args, progress))
        rows += [run_row(session, row, folder, tokenizer, windows, args, progress) for row in ECHO_ROWS]
    progress.close()
    if session.rank == 0:
        show_and_save(session, args, folder, rows, checks)


def show_and_save(session: Session, args, folder: Path, rows: list[dict], checks: list[str]) -> None:
    tokens = args.windows * args.length
    dtype_name = str(session.dtype).removeprefix("torch.")
    results = {
        **report.machine(session.device),
        "model": smollm2.describe(folder),
        "ranks": session.world_size,
        "dtype": dtype_name,
        "tokens_scored": tokens,
        "text_sha256": hashlib.sha256(smollm2.english_text().encode()).hexdigest(),
        "checks": checks,
        "rows": rows,
    }
    title = f"SmolLM2-135M on {session.world_size} tensor-parallel ranks, {tokens:,} tokens, {results['device']}"
    report.save(results, args.out / "results.json")
    report.plot(rows, title, args.out / "quickstart.png")
    print(f"\n{title}\n\n{report.table(rows)}\n\n{report.generations(rows, args.prompt)}\n")
    print("\n".join([*checks, f"Plot and numbers: {args.out / 'quickstart.png'}, {args.out / 'results.json'}"]))


if __name__ == "__main__":
    main()
