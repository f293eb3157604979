"""lm-evaluation-harness, the only module that imports it: a split model answers a task on all ranks alike.

Every rank asks the harness the same, of a model that is split by transformers; the harness believes it is alone. All
ranks see equal logits, so they make the same batches, generate the same tokens and stay in step.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from .tasks_list import Document, Task, parts

PACKAGE = "lm_eval"
# The harness's own seeds of its command line: Python's, numpy's, torch's, the one that picks examples.
SEEDS = (0, 1234, 1234, 1234)
_GENERATED_TOKENS = 48  # of copy_words: 13 words of English are some 20 tokens

_LOCAL: dict[str, dict[str, Any]] = {
    "next_words": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "copy_words": {
        "output_type": "generate_until",
        "doc_to_text": "Words: {{passage}}\nAgain: {{start}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": _GENERATED_TOKENS},
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}


@dataclass(frozen=True)
class Outcome:
    """Of one task. metrics: name -> value and, where a document is either right or wrong, "correct", a digit 1 or 0 for
    each. digest: of the documents in their order; equal where two outcomes may be compared document by document."""

    documents: int
    shots: Any
    digest: str
    metrics: dict[str, dict[str, Any]]


def why_not() -> str:
    """What is missing and how to get it; empty if nothing is."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "lm-evaluation-harness is missing. Get it with: pip install 'echo-pg[tasks]'"
    return ""


class Harness:
    """Made once per rank. documents: of each task of ours."""

    def __init__(self, tasks: tuple[Task, ...], documents: dict[str, list[Document]]) -> None:
        from lm_eval.tasks import TaskManager

        logging.getLogger(PACKAGE).setLevel(logging.ERROR)
        self._documents = documents
        # Reading what the harness knows takes ten seconds.
        self._manager = TaskManager(include_defaults=any(task.documents is None for task in tasks))

    def evaluate(self, model: Any, tokenizer: Any, task: Task, limit: int | None, batch: int) -> Outcome:
        """limit: number of documents, of each part where the task has parts; None for all."""
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        # Bars of every rank, and warnings that a model is given instead of its name, go nowhere.
        with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
            loaded = self._manager.load([task.name if task.documents is None else self._config(task)])
            self._prepare(loaded["tasks"].values(), task)
            # Log-probabilities in fp32: of bf16 logits the harness otherwise sums bf16 values, with 8 bits each.
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, softmax_dtype="float32")
            results = evaluate(lm, loaded, limit=limit, bootstrap_iters=0)
        return outcome_of(task.name, results)

    def _config(self, task: Task) -> dict[str, Any]:
        from datasets import Dataset

        split = {name: Dataset.from_list(part) for name, part in parts(self._documents[task.name]).items()}
        return _LOCAL[task.name] | {
            "task": task.name,
            "custom_dataset": lambda **_: split,
            "test_split": "test",
            "fewshot_split": "train",
            "fewshot_config": {"sampler": "first_n"},
        }

    def _prepare(self, loaded: Any, task: Task) -> None:
        """What the harness's command line does before it evaluates."""
        import random

        import numpy as np
        import torch

        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        torch.manual_seed(SEEDS[2])
        for part in loaded:
            if task.shots is not None or part.get_config("num_fewshot") is None:
                part.set_config(key="num_fewshot", value=task.shots or 0)
            part.set_fewshot_seed(seed=SEEDS[3])


def outcome_of(name: str, results: dict[str, Any]) -> Outcome:
    """From what the harness returns, with samples. Raises ValueError where a task of parts has a value that is no
    accuracy: it cannot be put together from theirs."""
    values: dict[str, list[Any]] = {}
    hashes: list[str] = []
    for part in sorted(results["samples"]):
        samples = results["samples"][part]
        for index, filtered in enumerate(dict.fromkeys(sample["filter"] for sample in samples)):
            chosen = sorted((s for s in samples if s["filter"] == filtered), key=lambda sample: sample["doc_id"])
            hashes += [sample["doc_hash"] for sample in chosen if index == 0]
            suffix = "" if filtered == "none" else f",{filtered}"
            for metric in chosen[0]["metrics"]:
                values.setdefault(metric + suffix, []).extend(sample[metric] for sample in chosen)
    metrics: dict[str, dict[str, Any]] = {}
    for metric, found in values.items():
        if all(isinstance(value, (bool, int, float)) or hasattr(value, "item") for value in found) and set(
            map(float, found)
        ) <= {0.0, 1.0}:
            correct = "".join(str(int(value)) for value in found)
            metrics[metric] = {"value": correct.count("1") / len(correct), "correct": correct}
        else:
            metrics[metric] = {"value": _whole(results, name, metric)}
    shots = sorted({results["n-shot"][part] for part in results["samples"]})
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Outcome(len(hashes), shots[0] if len(shots) == 1 else shots, digest, metrics)


def _whole(results: dict[str, Any], name: str, metric: str) -> float:
    key = metric if "," in metric else f"{metric},none"
    value = results["results"].get(name, {}).get(key, math.nan)
    if math.isnan(value):
        raise ValueError(f"{name}: {metric} is no accuracy and has no value of the whole task")
    return float(value)
