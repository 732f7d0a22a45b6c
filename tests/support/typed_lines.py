"""The README of a sample: what its reader types in terminals, and what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from support.documents import Block

TYPED = (
    "exec 2>&1\n{ %s\n}; code=$?; "
    '{ export -p; printf \'cd %%q\\n\' "$PWD"; } > "$AFTER"; exit $code'
)


class Started(Protocol):
    """A program that runs."""

    def wait(self, timeout: float, /) -> int:
        """Its exit code."""


Start = Callable[[Sequence[str], Mapping[str, str], Path], Started]
"""Starts a program: its words, variables beside the usual ones, the file for what it prints."""


class Terminal:
    """A shell of the reader's; each line is a process that inherits what the one before it set."""

    def __init__(self, start: Start, known: Path) -> None:
        """``known``: a file of its own, with what lines before have set."""
        self.known = known
        self.known.touch()
        self._start = start
        self._count = 0

    def type(self, line: str) -> tuple[Started, Path]:
        """Start a line; return its process, and the file with what it prints."""
        self._count += 1
        said = self.known.with_name(f"{self.known.stem}-{self._count}.txt")
        typed = f'. "{self.known}"\n{TYPED % line}'
        return self._start(["bash", "-ac", typed], {"AFTER": str(self.known)}, said), said


def lines_of(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


def check_printed(block: Block, printed: str, code: int) -> None:
    """Every line of the block is printed; fractions differ, an ellipsis stands for anything."""
    wanted = re.findall(r"exit code (\d+)", block.marker)
    assert code == int(*wanted or (0,)), printed
    for line in block.text.splitlines():
        form = re.escape(line).replace(r"\.\.\.", ".*")
        # the moment of a death is another in each run
        number = r"\d+(\\\.\d+)?" if "other numbers" in block.marker else r"\d+\\\.\d+"
        form = re.sub(number, "[0-9.]+", form)
        assert re.search(f"^{form}$", printed, re.MULTILINE), (line, printed)
