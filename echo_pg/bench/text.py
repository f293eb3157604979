"""Two kinds of English for the benches that run a language model, from two Debian packages; as a command:

    python -m echo_pg.bench.text DIR

writes DIR/{prose,technical}-{train,tune,heldout}.txt and DIR/sources.json (packages, versions, sizes, sha256).
Prose is the package `anarchism` (An Anarchist FAQ: long essays), technical English is `python3.11-doc` (Python's own
manual); tags, code blocks and tables are taken out. A page goes to one of the three parts as a whole, by the hash of
its name alone, so that another version of a package splits alike. It needs apt-get and dpkg-deb, but neither root nor
installing.

What a part is for: weights are trained on `train`, options are chosen on `tune`, and `heldout` is for nothing but
the numbers that are reported; no decision may rest on it.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("train", "tune", "heldout")
SOURCES_FILE = "sources.json"
_SHORTEST_PAGE = 3000  # characters; pages with less are lists of links


@dataclass(frozen=True)
class Kind:
    """One kind of text: a package, the folder of its pages, the pages that hold no sentences."""

    name: str
    package: str
    pages: str
    left_out: str  # regular expression on the path of a page


KINDS = (
    Kind("prose", "anarchism", "usr/share/doc/anarchism/html", r"^(links|new|translations|contact|pdf|index)"),
    Kind(
        "technical", "python3.11-doc", "usr/share/doc/python3.11/html", r"^_|^(genindex|py-modindex|search)|changelog"
    ),
)


class _Sentences(html.parser.HTMLParser):
    """Collects the running text of a page; blocks become paragraphs, code and everything around the page is dropped."""

    _DROPPED = frozenset({"script", "style", "head", "pre", "table", "nav", "title"})
    _BLOCKS = frozenset({"p", "div", "li", "ul", "ol", "dt", "dd", "dl", "br", "hr", "blockquote", "section",
                         "h1", "h2", "h3", "h4", "h5", "h6"})  # fmt: skip
    _NAVIGATION = frozenset({"related", "sphinxsidebar", "footer", "headerlink", "mobile-nav"})
    _EMPTY = frozenset({"br", "hr", "img", "input", "link", "meta"})  # these have no end tag

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._dropping: list[str] = []  # the outermost dropped element and those open within it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if self._dropping or tag in self._DROPPED or classes & self._NAVIGATION:
            if tag not in self._EMPTY:
                self._dropping.append(tag)
        elif tag in self._BLOCKS:
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            if tag in self._dropping:  # an element that was not closed ends with the one around it
                while self._dropping.pop() != tag:
                    pass
        elif tag in self._BLOCKS:
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._dropping:
            self.pieces.append(data)


def sentences(page: str) -> str:
    """The text of an HTML page: paragraphs of one line each, an empty line between them."""
    parser = _Sentences()
    parser.feed(page)
    parser.close()
    paragraphs = (" ".join(text.split()) for text in re.split(r"\n\s*\n", "".join(parser.pieces)))
    return "\n\n".join(text for text in paragraphs if text)


def part_of(page: str) -> str:
    """The part that a page belongs to, by its path: a tenth each for tune and heldout."""
    tenth = int(hashlib.sha256(page.encode()).hexdigest(), 16) % 10
    return {0: "heldout", 1: "tune"}.get(tenth, "train")


def digest(text: str) -> str:
    """How results name a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(out: Path) -> dict[str, Any]:
    """Writes the folder, and returns what sources.json says. Raises CalledProcessError where a package is not to be
    had."""
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"packages": {}, "texts": {}}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            made["packages"][kind.package] = _fetch(kind.package, Path(folder))
            pages = list(_pages(Path(folder) / kind.pages, kind.left_out))
        for part in PARTS:
            chosen = [text for name, text in pages if part_of(name) == part]
            text = "\n\n".join(chosen) + "\n"
            (out / f"{kind.name}-{part}.txt").write_text(text, encoding="utf-8")
            made["texts"][f"{kind.name}-{part}"] = {
                "package": kind.package, "pages": len(chosen), "characters": len(text), "sha256": digest(text),
            }  # fmt: skip
    (out / SOURCES_FILE).write_text(json.dumps(made, indent=1) + "\n")
    return made


def _fetch(package: str, folder: Path) -> dict[str, str]:
    """Downloads and unpacks a package into `folder`; returns its version and hash."""
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True, text=True)
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    field = subprocess.run(
        ["dpkg-deb", "-f", str(archive), "Version"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return {"version": field, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}


def _pages(folder: Path, left_out: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every page that holds sentences, in the order of the paths."""
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        if re.search(left_out, name):
            continue
        text = sentences(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) >= _SHORTEST_PAGE:
            yield name, text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m echo_pg.bench.text", description="Prepare a folder of English text."
    )
    parser.add_argument("folder", type=Path)
    try:
        made = prepare(parser.parse_args(arguments).folder)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        print(f"bench.text: the packages need Debian 12's apt-get ({said})", file=sys.stderr)
        return 1
    for name, about in made["texts"].items():
        print(f"{name:18} {about['characters']:>10,} characters of {about['pages']} pages  {about['sha256'][:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
