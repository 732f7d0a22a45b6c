"""The README of each sample: every command is typed as it stands, and prints what it shows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.documents import Block, blocks
from support.jobs import DEADLINE_S, ROOT, Launcher, poll
from support.typed_lines import Started, Terminal, check_printed, lines_of

SAMPLES = ROOT / "scripts/samples"
READMES = sorted(SAMPLES.rglob("README.md"))
ON_ONE_MACHINE = [page for page in READMES if "<!-- test: on " not in page.read_text()]
pytestmark = pytest.mark.torch


class Reader:
    """Types what a page says, and keeps what is printed until an output of the page is compared."""

    def __init__(self, msrun: Launcher) -> None:
        self._msrun = msrun
        self._first = self._terminal("first")
        self._said: list[Path] = []
        self._code = 0

    def _terminal(self, name: str) -> Terminal:
        return Terminal(self._start, self._msrun.tmp / f"{name}.sh")

    def _start(self, words: Sequence[str], environ: Mapping[str, str], said: Path) -> Started:
        with said.open("wb") as file:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=self._msrun.env(TMPDIR=str(self._msrun.tmp), **environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._msrun.helpers.append(process)
        return process

    def read(self, page: list[Block]) -> None:
        for block, following in zip(page, [*page[1:], None], strict=True):
            if block.language == "text":
                self._compare(block)
            elif not block.marker:
                *lines, last = lines_of(block)
                for line in lines:
                    self._end(*self._first.type(line))
                running = self._first.type(last)
                if following is not None and following.marker.startswith("meanwhile"):
                    self._meanwhile(following, running[1])
                self._end(*running)
        assert not self._said, "the page ends with commands whose output it does not show"

    def _meanwhile(self, block: Block, said: Path) -> None:
        (awaited,) = re.findall('"(.*)"', block.marker)
        poll(lambda: awaited in said.read_text())
        second = self._terminal("second")
        second.known.write_text(self._first.known.read_text())
        for line in lines_of(block):
            pid = ""
            if "PID" in line:  # which a reader takes from the table above
                (pid,) = re.findall(r"^0 +(\d+) ", self._said[-1].read_text(), re.MULTILINE)
            process, printed = second.type(line.replace("PID", pid))
            self._end(process, printed)
            assert self._code == 0, printed.read_text()

    def _end(self, process: Started, said: Path) -> None:
        self._said.append(said)
        self._code = process.wait(DEADLINE_S)

    def _compare(self, block: Block) -> None:
        printed = "\n".join(path.read_text() for path in self._said)
        check_printed(block, printed, self._code)
        self._said.clear()


@pytest.mark.parametrize("page", ON_ONE_MACHINE, ids=lambda page: page.parent.name)
def test_each_line_of_a_samples_readme_does_what_the_page_says(page, msrun):
    before = {path: path.stat().st_mtime_ns for path in page.parent.rglob("*")}
    Reader(msrun).read(blocks("sh", "text", pages=[page]))
    assert {path: path.stat().st_mtime_ns for path in page.parent.rglob("*")} == before


def test_each_sample_with_a_shell_script_has_a_readme():
    assert {path.parent for path in SAMPLES.rglob("*.sh")} <= {path.parent for path in READMES}


def test_no_page_of_ours_tells_to_install_from_where_msrun_is_not():
    pages = [*READMES, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert [page for page in pages if re.search("pip install msrun", page.read_text())] == []
