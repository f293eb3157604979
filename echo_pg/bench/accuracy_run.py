"""One rank of `bench accuracy`, from its start to its end: rows in turn, each in a process group of its own."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import options, report
from . import accuracy, growth, methods, results, scoring, smollm2
from .accuracy_results import Progress, append, key_of
from .accuracy_rows import REFERENCE, Row
from .text import digest

TIMEOUT = timedelta(minutes=10)
COUNTERS = ("calls_quantized", "bytes_quantized", "wire_bytes")
WARM_UP_TOKENS = 16
_GROWTH_TOKENS = 512  # of one window; diagnostics sum every site once more, in float64
# Whose errors per site are told: the paper's residual at two gains, ours, and none.
GROWTH_ROWS = (
    Row("growth: group", {}, paper=True),
    Row("growth: group, eta 1", {"eta": 1.0}, paper=True),
    Row("growth: local", methods.UNROTATED_TWO),
    Row("growth: local, rotation", methods.ROTATED | methods.TWO_AVERAGES),
    Row("growth: default", {}),
    Row("growth: no feedback", methods.PLAIN),
)


@dataclass
class Session:
    """What all rows share. windows, prompts: int64 [n, length + 1] and [n, length] per text, on the CPU."""

    plan: dict[str, Any]
    store: Any
    rank: int
    size: int
    device: torch.device
    shared_gpu: bool
    folder: Path
    windows: dict[str, Tensor]
    prompts: Tensor
    groups_made: int = 0

    def synchronize(self) -> float:
        """Waits for this device; returns the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Reference:
    """What the output layer reads in the 16-bit row, [tokens, hidden], and what tells it from another run's."""

    hidden: Tensor
    fingerprint: str


def run_rank(rank: int, size: int, store_path: str | None, plan: dict[str, Any], local_rank: int | None = None) -> None:
    """Measures what the file lacks; rank 0 writes it there."""
    session, common = _start(rank, size, store_path, plan, rank if local_rank is None else local_rank)
    there = {key_of(record) for record in results.read_if_there(Path(plan["path"]), "accuracy")} if rank == 0 else set()
    unmeasured = _agree_on_unmeasured(session, common, there)
    progress = Progress(f"{size} ranks", sum(map(len, unmeasured.values())), shown=rank == 0)
    reference: dict[str, Reference] = {}
    tokens: list[Tensor] = []
    for row in (*plan["rows"], *GROWTH_ROWS):
        for part in unmeasured.get(row.name, ()):
            began = time.perf_counter()
            progress.begin(f"{row.name}: {part}")
            made = _measure(session, row, part, reference, tokens, progress.say)
            progress.done()
            record = common | made | {"seconds": round(time.perf_counter() - began, 3)}
            if rank == 0 and key_of(record) not in there:
                append(Path(plan["path"]), [record])
    progress.close()


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and the store at which it meets the others."""

    store: Any
    device: torch.device
    gpus: int
    threads: int

    def shared(self, size: int) -> bool:
        """Whether ranks share a GPU."""
        return 0 < self.gpus < size


def settle(rank: int, size: int, store_path: str | None, kind: str, local_rank: int) -> Place:
    """Chooses the rank's device of the kind "cpu" or "cuda", and silences what frameworks say while loading."""
    options.set_unless_given("ECHO_LOG", "off")
    on_gpu = kind == "cuda"
    gpus = torch.cuda.device_count() if on_gpu else 0
    if on_gpu and not gpus:
        raise RuntimeError("--device cuda, but torch sees no GPU")
    if on_gpu and gpus < size and size % gpus:
        raise RuntimeError(f"{size} ranks do not divide among {gpus} GPUs; CUDA_VISIBLE_DEVICES=0 puts all on one")
    device = torch.device("cuda", local_rank % gpus) if on_gpu else torch.device("cpu")
    options.tell_frameworks(rank, size, device.index)
    threads = max(1, len(results.usable_cores()) // size)
    torch.set_num_threads(threads)
    if on_gpu:
        torch.cuda.set_device(device)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if store_path is not None:
        store: Any = dist.FileStore(store_path, size)
    else:
        from torch.distributed.rendezvous import rendezvous

        store = next(iter(rendezvous("env://")))[0]
    return Place(store, device, gpus, threads)


def _start(
    rank: int, size: int, store_path: str | None, plan: dict[str, Any], local_rank: int
) -> tuple[Session, dict[str, Any]]:
    """Settles the device, meets the other ranks, prepares model and text; returns also what all records have in
    common."""
    place = settle(rank, size, store_path, plan["device"], local_rank)
    folder = model_folder(Path(plan["model"]), rank, size, place.store)
    windows, prompts, texts = _read_texts(plan, smollm2.load_tokenizer(folder))
    session = Session(plan, place.store, rank, size, place.device, place.shared(size), folder, windows, prompts)
    common = results.circumstances(plan["device"], place.threads, place.device.index)
    common["commit"] = plan["commit"] or common["commit"]
    fields = ("dtype", "length", "batch", "prompts", "prompt_tokens", "new_tokens")
    common |= {"bench": "accuracy", "ranks": size, "gpus": place.gpus}
    common |= {"model": smollm2.describe(folder), "texts": texts}
    common |= {name: plan[name] for name in fields} | {"transformers": version("transformers")}
    common["seed"] = None  # nothing is drawn: windows and prompts lie at equal distances
    return session, common


def model_folder(given: Path, rank: int, size: int, store: Any) -> Path:
    """The model for `size` ranks; rank 0 converts it while the others wait."""
    if (given / "config.json").is_file():
        return given
    if rank == 0:
        smollm2.prepare_model(given, size)
        store.set("model is ready", "yes")
    store.wait(["model is ready"], TIMEOUT)
    return smollm2.prepare_model(given, size)


def _read_texts(plan: dict[str, Any], tokenizer: Any) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Windows evenly spread over each text, prompts from the gaps' middles, and the texts' identities."""
    windows, prompts, texts = {}, [], {}
    count = -(-plan["tokens"] // plan["length"])
    for index, name in enumerate(plan["texts"]):
        text = (Path(plan["text"]) / f"{name}.txt").read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(text)["input_ids"])
        windows[name] = _spread(ids, count, plan["length"] + 1, 0.0, name)
        share = plan["prompts"] // len(plan["texts"]) + (index < plan["prompts"] % len(plan["texts"]))
        prompts.append(_spread(ids, share, plan["prompt_tokens"], 0.5, name))
        texts[name] = {"sha256": digest(text), "tokens": count * plan["length"], "windows": count}
    return windows, torch.cat(prompts), texts


def _spread(ids: Tensor, count: int, length: int, offset: float, name: str) -> Tensor:
    """`count` stretches of `length` tokens at equal distances; the first starts after `offset` of such a distance."""
    distance = len(ids) / max(count, 1)
    if distance < length:
        raise ValueError(f"{name} has {len(ids)} tokens: too few for {count} stretches of {length}")
    starts = [min(int((i + offset) * distance), len(ids) - length) for i in range(count)]
    return torch.stack([ids[start : start + length] for start in starts]) if count else ids.new_empty((0, length))


def _agree_on_unmeasured(session: Session, common: dict[str, Any], there: set[str]) -> dict[str, list[str]]:
    """Row -> parts to be measured: those that are not `there`. Rank 0 decides, because it alone writes the file. Where
    anything is compared with the 16-bit row, that one runs too, recorded already or not."""
    plan = session.plan
    if session.rank == 0:
        unmeasured: dict[str, list[str]] = {}
        wanted = [(row, "scores") for row in plan["rows"]]
        wanted += [(row, "greedy") for row in plan["rows"] if row.name in plan["greedy"]]
        wanted += [(row, "growth") for row in GROWTH_ROWS if plan["growth"]]
        for row, part in wanted:
            record = common | {"row": row.name, "part": part, "options": _options_of(session, row, part)}
            if key_of(record) not in there:
                unmeasured.setdefault(row.name, []).append(part)
        for part in ("scores", "greedy"):
            if any(part in parts for parts in unmeasured.values()) and part not in unmeasured.get(REFERENCE, []):
                unmeasured.setdefault(REFERENCE, []).append(part)
        session.store.set(f"unmeasured {session.size}", json.dumps(unmeasured))
    return dict(json.loads(session.store.get(f"unmeasured {session.size}")))


def _options_of(session: Session, row: Row, part: str) -> dict[str, Any] | None:
    return results.plain_options(_chosen(session, row, part))


def _chosen(session: Session, row: Row, part: str) -> Any:
    changed = Row(row.name, row.changes | {"diagnostics": True}, paper=row.paper) if part == "growth" else row
    return accuracy.row_options(changed, session.plan, session.shared_gpu)


def _measure(
    session: Session,
    row: Row,
    part: str,
    reference: dict[str, Reference],
    tokens: list[Tensor],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One part of one row in a group of its own: what the record says of it. The 16-bit row fills `reference` (hidden
    states by text) and `tokens` (its continuations)."""
    chosen = _chosen(session, row, part)
    session.groups_made += 1
    dist.init_process_group(
        "echo",
        pg_options=chosen,
        store=dist.PrefixStore(f"row-{session.groups_made}", session.store),
        rank=session.rank,
        world_size=session.size,
        timeout=TIMEOUT,
    )
    say("loading")
    model = smollm2.load_model(session.folder, getattr(torch, session.plan["dtype"]))
    if row.name != REFERENCE:
        # Makes peer memory, and tells `early_sites` given as a share how many sites a pass has.
        scoring.hidden_states(model, session.prompts[:1, : WARM_UP_TOKENS + 1], 1, lambda: None)
    forwards, before = scoring.Forwards(model), report.stats(dist.group.WORLD)
    if part == "scores":
        found = _scores(session, model, row, reference, say)
    elif part == "greedy":
        found = _greedy(session, model, row, tokens)
    else:
        found = {"sites": growth.measure(model, next(iter(session.windows.values()))[:1, : _GROWTH_TOKENS + 1], chosen)}
    forwards.remove()
    after = report.stats(dist.group.WORLD)
    counted = {name: after[name] - before[name] for name in COUNTERS}
    sites, quantized = 2 * model.config.num_hidden_layers, counted["calls_quantized"]
    check(row.name, chosen, session.device.type, forwards.site_bytes, sites, quantized)
    found |= counted | {"state_bytes": after["state_bytes"], "fabric": after["fabric"]}
    found |= {"row": row.name, "sets": list(row.sets), "plain": row.plain, "part": part}
    del model
    gc.collect()
    dist.destroy_process_group()
    return found | {"options": results.plain_options(chosen), "forwards": len(forwards.site_bytes)}


def check(name: str, chosen: Any, device_type: str, site_bytes: list[int], sites: int, quantized: int) -> None:
    """Every site of every pass must have been quantized, where the options say so; else the row means nothing."""
    least = chosen.min_bytes_on(device_type)
    expected = 0 if chosen.policy == "off" else sum(sites for size in site_bytes if size >= least)
    if quantized != expected:
        raise RuntimeError(
            f"{name}: {quantized} quantized all-reduces in {len(site_bytes)} forward passes, expected {expected}"
        )


def _scores(
    session: Session, model: Any, row: Row, reference: dict[str, Reference], say: Callable[[str], None]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, windows in session.windows.items():
        began, batches = session.synchronize(), iter(range(1, len(windows) + 1))

        def step(name: str = name, batches: Any = batches) -> None:
            say(f"{name} {next(batches)}")

        hidden = scoring.hidden_states(model, windows, session.plan["batch"], step)
        read = session.synchronize()
        is_reference = row.name == REFERENCE
        if is_reference:
            reference[name] = Reference(hidden, scoring.fingerprint(hidden)[:16])
        scored = scoring.score(model, windows, hidden, None if is_reference else reference[name].hidden)
        found[name] = {
            "perplexity": scored.perplexity,
            "kl": scored.kl,
            "same_top": scored.same_top,
            "nll": [round(value, 6) for value in scored.nll],
            "reference": reference[name].fingerprint,
            "forward_s": round(read - began, 4),
            "score_s": round(session.synchronize() - read, 4),
        }
    return {"scores": found}


def _greedy(session: Session, model: Any, row: Row, tokens: list[Tensor]) -> dict[str, Any]:
    began = session.synchronize()
    made = scoring.continuations(model, session.prompts, session.plan["new_tokens"])
    seconds = session.synchronize() - began
    if row.name == REFERENCE:
        tokens.append(made)
    per_text = len(session.prompts) // len(session.windows)
    found = scoring.agreement(made, tokens[0]) | {"tokens": made.numel(), "generate_s": round(seconds, 3)}
    return {"greedy": found | {"of_first_text": scoring.agreement(made[:per_text], tokens[0][:per_text])}}
