"""One rank of `bench tasks`, from its start to its end: rows in turn, each in a process group of its own."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import report
from . import accuracy, accuracy_run, results, scoring, smollm2, tasks_harness
from .accuracy_results import Progress
from .accuracy_rows import REFERENCE, Row
from .tasks_list import Task
from .tasks_report import key_of
from .text import digest


@dataclass
class Session:
    """What all rows share. model: a folder, or a name on the Hub."""

    plan: dict[str, Any]
    rank: int
    size: int
    place: accuracy_run.Place
    model: str
    tokenizer: Any
    harness: Any
    groups_made: int = 0


def run_rank(rank: int, size: int, store_path: str | None, plan: dict[str, Any], local_rank: int | None = None) -> None:
    """Measures what the file lacks; rank 0 writes it there, task by task."""
    session, common = _start(rank, size, store_path, plan, rank if local_rank is None else local_rank)
    missing = _agree_on_missing(session, common)
    progress = Progress(f"{size} ranks", sum(map(len, missing.values())), shown=rank == 0)
    for row in plan["rows"]:
        tasks = [task for task in plan["tasks"] if task.name in missing.get(row.name, ())]
        if not tasks:
            continue
        progress.begin(f"{row.name}: loading")
        about, chosen = _about(session, row)
        _make_group(session, about["backend"], chosen)
        model = smollm2.load_model(session.model, getattr(torch, plan["dtype"]))
        # Makes peer memory, and tells `early_sites` given as a share how many sites a pass has.
        scoring.hidden_states(model, torch.zeros(1, accuracy_run.WARM_UP_TOKENS + 1, dtype=torch.long), 1, lambda: None)
        for task in tasks:
            progress.begin(f"{row.name}: {task.name}")
            made = _measure(session, model, row, task, chosen)
            progress.done()
            if rank == 0:
                results.append(Path(plan["path"]), [common | about | made])
        del model
        gc.collect()
        dist.destroy_process_group()
    progress.close()


def _start(
    rank: int, size: int, store_path: str | None, plan: dict[str, Any], local_rank: int
) -> tuple[Session, dict[str, Any]]:
    """Settles the device, meets the other ranks, prepares model, texts and harness; returns also what all records have
    in common."""
    place = accuracy_run.settle(rank, size, store_path, plan["device"], local_rank)
    model = plan["hub"] or str(accuracy_run.model_folder(Path(plan["model"]), rank, size, place.store))
    documents, texts = _documents(plan)
    harness = tasks_harness.Harness(plan["tasks"], documents)
    session = Session(plan, rank, size, place, model, smollm2.load_tokenizer(model), harness)
    common = results.circumstances(plan["device"], place.threads, place.device.index)
    common["commit"] = plan["commit"] or common["commit"]
    common |= {"bench": "tasks", "ranks": size, "gpus": place.gpus, "model": _describe(model, plan["hub"])}
    common |= {name: plan[name] for name in ("dtype", "batch", "limit")} | {"texts": texts}
    common |= {name: version(name) for name in ("transformers", *plan["packages"])}
    common["seed"] = list(tasks_harness.SEEDS)
    return session, common


def _documents(plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the tasks of ours, by their names, and the text they are cut from; nothing where none was chosen."""
    ours = [task for task in plan["tasks"] if task.documents is not None]
    if not ours:
        return {}, {}
    text = (Path(plan["text"]) / f"{plan['text_name']}.txt").read_text(encoding="utf-8")
    return {task.name: task.documents(text) for task in ours}, {plan["text_name"]: {"sha256": digest(text)}}


def _describe(model: str, hub: str) -> dict[str, Any]:
    if not hub:
        return smollm2.describe(Path(model))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hub)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {"name": hub} | {name: getattr(config, name) for name in names}


def _agree_on_missing(session: Session, common: dict[str, Any]) -> dict[str, list[str]]:
    """Row -> names of the tasks to be measured: those that are not in the file. Rank 0 decides, because it alone writes
    there."""
    key = f"missing {session.size}"
    if session.rank == 0:
        there = {key_of(record) for record in results.read_if_there(Path(session.plan["path"]), "tasks")}
        missing: dict[str, list[str]] = {}
        for row in session.plan["rows"]:
            about = common | _about(session, row)[0]
            for task in session.plan["tasks"]:
                if key_of(about | {"task": task.name}) not in there:
                    missing.setdefault(row.name, []).append(task.name)
        session.place.store.set(key, json.dumps(missing))
    return dict(json.loads(session.place.store.get(key)))


def _about(session: Session, row: Row) -> tuple[dict[str, Any], Any]:
    """What a record says of its row, and the row's Options; the 16-bit row has none, it runs on the exact backend."""
    about: dict[str, Any] = {"row": row.name, "plain": row.plain}
    if row.name == REFERENCE:
        return about | {"backend": session.plan["exact"] or _exact(session), "options": None}, None
    chosen = accuracy.row_options(row, session.plan, session.place.shared(session.size))
    return about | {"backend": "echo", "options": results.plain_options(chosen)}, chosen


def _exact(session: Session) -> str:
    """NCCL refuses two ranks on one GPU."""
    return "gloo" if session.place.device.type == "cpu" or session.place.shared(session.size) else "nccl"


def _make_group(session: Session, backend: str, chosen: Any) -> None:
    session.groups_made += 1
    dist.init_process_group(
        backend,
        pg_options=chosen,
        store=dist.PrefixStore(f"row-{session.groups_made}", session.place.store),
        rank=session.rank,
        world_size=session.size,
        timeout=accuracy_run.TIMEOUT,
    )


def _measure(session: Session, model: Any, row: Row, task: Task, chosen: Any) -> dict[str, Any]:
    """One task with the group that stands: what the record says of it."""
    began, forwards, before = time.perf_counter(), scoring.Forwards(model), _stats(chosen)
    outcome = session.harness.evaluate(model, session.tokenizer, task, session.plan["limit"], session.plan["batch"])
    forwards.remove()
    after = _stats(chosen)
    counted = {name: after[name] - before[name] for name in accuracy_run.COUNTERS}
    if chosen is not None:
        sites = 2 * model.config.num_hidden_layers
        accuracy_run.check(
            row.name, chosen, session.place.device.type, forwards.site_bytes, sites, counted["calls_quantized"]
        )
    return counted | {
        "task": task.name,
        "shots": outcome.shots,
        "documents": outcome.documents,
        "digest": outcome.digest,
        "metrics": outcome.metrics,
        "forwards": len(forwards.site_bytes),
        "seconds": round(time.perf_counter() - began, 3),
    }


def _stats(chosen: Any) -> dict[str, int]:
    """Echo's counters of the group that stands; zeros where it is not echo's."""
    if chosen is None:
        return dict.fromkeys(accuracy_run.COUNTERS, 0)
    return report.stats(dist.group.WORLD)
