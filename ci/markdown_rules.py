"""House rules for Markdown: relative links, their anchors and paths in backticks lead somewhere, and lines of prose are
short enough to be read and compared. Fences (``` blocks) are left alone."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import unquote

MAX_CHARACTERS = 130
_LINK = re.compile(r"\]\(\s*(?:<(.*?)>|([^)\s]+))")
_CODE = re.compile(r"`[^`]+`")
# A path of this repository: in a folder of it, and no pattern. What follows a colon (":12", "::name") is cut off.
_PATH = re.compile(r"^(?:\.ci|backend|ci|docs|echo_pg|examples|tests)/[\w./+-]*$")


class Line(NamedTuple):
    number: int
    text: str


def prose(text: str) -> list[Line]:
    """The lines outside of fences."""
    found, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            found.append(Line(number, line))
    return found


def anchors(text: str) -> set[str]:
    """What #fragments a page has, by GitHub's rule: headings in lower case without punctuation, blanks as hyphens, and
    -1, -2, ... at the end of one that is there already."""
    found: set[str] = set()
    for line in prose(text):
        heading = re.match(r" {0,3}#{1,6}\s+(.*?)\s*#*$", line.text)
        if heading is None:
            continue
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        own, count = name, 0
        while own in found:
            count += 1
            own = f"{name}-{count}"
        found.add(own)
    return found


def breaches(name: str, read: Callable[[str], str], tracked: Iterable[str]) -> list[str]:
    """Of the file `name`, as "path:line: rule". read(path) is the text of a tracked file; paths are relative to the
    repository's root, with slashes."""
    files = set(tracked)
    folders = {folder for path in files for folder in _parents(path)}
    found = []
    for line in prose(read(name)):
        if len(line.text) > MAX_CHARACTERS and " " in line.text.strip() and not line.text.lstrip().startswith("|"):
            found.append(f"{name}:{line.number}: a line of prose has at most {MAX_CHARACTERS} characters")
        for in_brackets, bare in _LINK.findall(_CODE.sub("", line.text)):
            if problem := _link(name, in_brackets or bare, read, files, folders):
                found.append(f"{name}:{line.number}: {problem}")
        for code in _CODE.findall(line.text):
            for word in code.strip("`").split():
                path = word.split(":")[0].rstrip("/.,")
                if _PATH.match(path) and path not in files and path not in folders:
                    found.append(f"{name}:{line.number}: there is no {path}")
    return found


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _link(name: str, target: str, read: Callable[[str], str], files: set[str], folders: set[str]) -> str:
    """What is wrong with a link; empty for nothing, and for links to elsewhere."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
        return ""
    place, _, fragment = unquote(target).partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), place)) if place else name
    if path not in files and path not in folders and path != ".":
        return f"the link to {target} leads nowhere"
    if fragment and (not path.endswith(".md") or fragment not in anchors(read(path))):
        return f"the link to {target} leads nowhere: {path} has no such heading"
    return ""
