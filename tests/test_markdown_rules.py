"""ci/markdown_rules.py: which links, anchors, paths and lines of Markdown are told, and which are left alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci"))

import markdown_rules
import rules

OTHER = "# Other page\n\n## How fast, and what `it` costs\n\n## Twice\n\n## Twice\n\n```\n## In a fence\n```\n"
FILES = {"docs/other.md": OTHER, "README.md": "# One\n", "ci/test": "", "docs/plots/a b.svg": "", "LICENSE": ""}


def breaches(text: str, name: str = "docs/page.md") -> list[str]:
    files = FILES | {name: text}
    return markdown_rules.breaches(name, files.__getitem__, files)


@pytest.mark.parametrize(
    "good",
    (
        "[a](other.md), [b](../README.md), [c](../LICENSE), [d](../ci/), [e](..), [f](https://example.com/x.md#y)",
        "[a](other.md#how-fast-and-what-it-costs) [b](other.md#twice) [c](other.md#twice-1) [d](#here)\n\n## Here",
        "![a plot](plots/a%20b.svg) ![a plot](<plots/a b.svg>) [mail](mailto:someone@example.com)",
        "`[a](nowhere.md)`, `ci/test --system`, `docs/other.md:12`, `tests/test_*.py`, `other/nowhere.py`",
        "```\n[a](nowhere.md) " + "long " * 40 + "\n```",
        "| " + "a table may be wide " * 10 + "|",
        "x" * 200,
        "",
    ),
)
def test_what_is_left_alone(good: str) -> None:
    assert breaches(good) == []


@pytest.mark.parametrize(
    ("bad", "told"),
    (
        ("x\n[a](nowhere.md)", "docs/page.md:2: the link to nowhere.md leads nowhere"),
        ("![a](plots/none.svg)", "docs/page.md:1: the link to plots/none.svg leads nowhere"),
        ("[a](README.md)", "docs/page.md:1: the link to README.md leads nowhere"),  # it is in the folder above
        ("[a](other.md#slow)", "docs/page.md:1: the link to other.md#slow leads nowhere: docs/other.md has no such"),
        ("[a](other.md#twice-2)", "docs/page.md:1: the link to other.md#twice-2 leads nowhere"),
        ("[a](other.md#in-a-fence)", "docs/page.md:1: the link to other.md#in-a-fence leads nowhere"),
        ("[a](#here)", "docs/page.md:1: the link to #here leads nowhere"),
        ("[![a](plots/none.svg)](other.md)", "docs/page.md:1: the link to plots/none.svg leads nowhere"),
        ("[![a](plots/a%20b.svg)](none.md)", "docs/page.md:1: the link to none.md leads nowhere"),
        ("run `ci/nothing --now`", "docs/page.md:1: there is no ci/nothing"),
        ("```\nfence\n```\nsee `tests/gone.py::test_it`", "docs/page.md:4: there is no tests/gone.py"),
        ("a word " * 19, "docs/page.md:1: a line of prose has at most 130 characters"),
    ),
)
def test_what_is_told(bad: str, told: str) -> None:
    found = breaches(bad)
    assert len(found) == 1 and found[0].startswith(told), found


def test_a_broken_link_fails_the_house_rules(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "README.md").write_text("[there](LICENSE)\n")
    (tmp_path / "LICENSE").write_text("")
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    monkeypatch.setattr(rules, "tracked_files", lambda: ["README.md", "LICENSE"])
    assert rules.main() == 0, capsys.readouterr().out
    (tmp_path / "README.md").write_text("[there](LICENCE)\n")
    assert rules.main() == 1
    assert "README.md:1: the link to LICENCE leads nowhere" in capsys.readouterr().out
