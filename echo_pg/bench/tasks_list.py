"""What `bench tasks` asks: the paper's tasks as the harness defines them, and two of our own, cut from a text.

The paper takes "the standard shot count of the harness" for each task; the numbers here are those of
lm-evaluation-harness 0.4.13, given explicitly, so that another version asks alike. It does not say which of the
harness's variants of GPQA it means: here it is the one that is answered by a single choice without examples, over the
main set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]

_CONTEXT_WORDS = 24
_CHOICE_WORDS = 6
_CHOICES = 4
_COPIED_WORDS = 16
_GIVEN_WORDS = 3
_SHOT_DOCUMENTS = 8  # of each local task, kept out of what is asked


@dataclass(frozen=True)
class Task:
    """shots: examples in the prompt, None for the harness's own number. documents: of a task of ours, made from a text;
    None for a task of the harness, whose documents it downloads."""

    name: str
    shots: int | None = None
    documents: Callable[[str], list[Document]] | None = None


def next_words(text: str) -> list[Document]:
    """Which of four stretches of a paragraph follows its beginning; the other three are what comes after that."""
    found: list[Document] = []
    for words in _paragraphs(text, _CONTEXT_WORDS + _CHOICES * _CHOICE_WORDS):
        stretches = [
            " ".join(words[start : start + _CHOICE_WORDS])
            for start in range(_CONTEXT_WORDS, _CONTEXT_WORDS + _CHOICES * _CHOICE_WORDS, _CHOICE_WORDS)
        ]
        if len(set(stretches)) < _CHOICES:
            continue
        label = len(found) % _CHOICES
        found.append(
            {
                "context": " ".join(words[:_CONTEXT_WORDS]),
                "choices": [*stretches[1 : label + 1], stretches[0], *stretches[label + 1 :]],
                "label": label,
            }
        )
    return found


def copy_words(text: str) -> list[Document]:
    """A stretch of a paragraph with its words in another order, to be repeated; the first words are given."""
    found = []
    for paragraph in _paragraphs(text, _COPIED_WORDS):
        words = [word for _, word in sorted(enumerate(paragraph[:_COPIED_WORDS]), key=lambda item: _order(repr(item)))]
        given, rest = (" ".join(part) for part in (words[:_GIVEN_WORDS], words[_GIVEN_WORDS:]))
        found.append({"passage": " ".join(words), "start": given, "rest": rest})
    return found


def _paragraphs(text: str, least: int) -> list[list[str]]:
    """The words of every paragraph that has `least` of them, each paragraph once. Their order is that of a hash: any
    number of first ones is a sample of the whole text."""
    chosen = {paragraph for paragraph in re.split(r"\n\s*\n", text) if len(paragraph.split()) >= least}
    return [paragraph.split() for paragraph in sorted(chosen, key=_order)]


def _order(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def parts(documents: list[Document]) -> dict[str, list[Document]]:
    """Those that examples are taken from, and those that are asked. Raises ValueError where none is left to ask."""
    if len(documents) <= _SHOT_DOCUMENTS:
        raise ValueError(f"the text gives {len(documents)} documents, and {_SHOT_DOCUMENTS} of them serve as examples")
    return {"train": documents[:_SHOT_DOCUMENTS], "test": documents[_SHOT_DOCUMENTS:]}


LOCAL = (Task("next_words", 0, next_words), Task("copy_words", 2, copy_words))
PAPER = (
    Task("wikitext", 0),
    Task("piqa", 0),
    Task("arc_easy", 0),
    Task("arc_challenge", 0),
    Task("hellaswag", 0),
    Task("winogrande", 0),
    Task("mmlu", 0),
    Task("mmlu_pro", 5),
    Task("gpqa_main_zeroshot", 0),
    Task("gsm8k", 5),
)
KNOWN = {task.name: task for task in (*LOCAL, *PAPER)}


def choose(names: str) -> tuple[Task, ...]:
    """Of names with a comma between them; "local" and "paper" stand for the lists, other names are tasks of the
    harness. Raises ValueError for none."""
    found: dict[str, Task] = {}
    for name in (part.strip() for part in names.split(",")):
        for task in {"local": LOCAL, "paper": PAPER, "": ()}.get(name, (KNOWN.get(name, Task(name)),)):
            found[task.name] = task
    if not found:
        raise ValueError(f"--tasks {names!r} names no task; known are local, paper, {', '.join(KNOWN)}")
    return tuple(found.values())
