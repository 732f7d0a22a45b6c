"""Fenced blocks of README and of the manual, and what their comments ask tests to do with them.

A comment in front of a block says what it is: ``<!-- test: script NAME -->`` a complete script,
``<!-- test: file NAME -->`` a file that commands of the page name, ``<!-- test: diff NAME -->`` a
change of a script of the page. The README of a sample is run from its first line to its last: there
``meanwhile, once "TEXT" is printed`` is a second terminal, and ``output`` what the commands between
it and the output before it print, on the reader's machine perhaps with ``other numbers``.
Where there are several machines, ``on 10.0.0.1`` or ``on both machines`` says where it is typed, and
``output of 10.0.0.1`` what that one prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/performance.md",
    *sorted((ROOT / "docs/user-guide").glob("*.md")),
)
_BLOCK = re.compile(
    r"(?:<!-- test: (?P<marker>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Block(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    marker: str  # what follows "test:" in the comment in front of it; empty without one

    @property
    def id(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"

    @property
    def name(self) -> str:
        """The file's name in the marker."""
        return self.marker.partition(" ")[2].partition(",")[0]


def blocks(*languages: str, pages: Iterable[Path] = PAGES) -> list[Block]:
    """All blocks in these languages."""
    found = []
    for page in pages:
        text = page.read_text()
        for one in _BLOCK.finditer(text):
            line = text.count("\n", 0, one.start("text")) + 1
            where = str(page.relative_to(ROOT))
            found.append(Block(where, line, one["language"], one["text"], one["marker"] or ""))
    return [block for block in found if block.language in languages]


def marked(kind: str, name: str) -> Block:
    """The block with this marker."""
    found = [
        block
        for block in blocks("python", "diff", "sh", "text", "yaml")
        if block.marker.partition(",")[0] == f"{kind} {name}"
    ]
    assert len(found) == 1, f"{len(found)} blocks are marked {kind} {name}"
    return found[0]


def patched(text: str, diff: str) -> str:
    """``text`` changed by a unified diff, whose every line must fit.

    Args:
        text: the file.
        diff: one file's, with or without context.
    """
    old, new, at = text.splitlines(), list[str](), 0
    lines = iter(diff.splitlines())
    for line in lines:
        if line.startswith(("---", "+++")) and not new:
            continue
        if hunk := _HUNK.match(line):
            # without a line of the old file, the hunk stands behind the line that it names
            begin = int(hunk[1]) - (hunk[2] != "0")
            new += old[at:begin]
            at = begin
            assert len(new) == int(hunk[3]) - (hunk[4] != "0"), f"{line}: not where it says"
            continue
        kind, content = line[:1], line[1:]
        if kind in {" ", "-"}:
            assert old[at] == content, f"the diff has {content!r}, the script {old[at]!r}"
            at += 1
        if kind in {" ", "+"}:
            new.append(content)
    return "\n".join((*new, *old[at:])) + "\n"
