"""What msrun writes about a run: events, its own log, the present state. It never fails the job.

``events.jsonl`` and ``scheduler.log`` grow, ``status.json`` is replaced. A full disk is reported
once and costs lines here, never a worker.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from agent.text.ranges import format_ranges
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import RunLayout


class Journal:
    """The open files of one run."""

    def __init__(
        self,
        layout: RunLayout | None,
        say: Callable[[str], None],
        echo: Callable[[str], None] | None = None,
    ) -> None:
        """``layout`` None: nothing is written. ``echo``: also gets the events, as lines of JSON."""
        self._layout = layout
        self._say = say
        self._echo = echo
        self._has_reported = False  # only the first problem is reported
        self._files: dict[Path, int] = {}

    def event(self, what: str, **fields: object) -> None:
        """One event or decision."""
        self.figures(what, **fields)
        if self._layout is not None:
            self._append(self._layout.scheduler_log, f"{_stamp()} {what} {_words(fields)}")

    def of_ranks(self, what: str, ranks: Sequence[int], **fields: object) -> None:
        """An event of each of these ranks: for people it is one, for programs as if it came alone.

        Thousands of ranks say the same at once.
        """
        begin = f'{{"time": {time.time():.6f}, "event": {json.dumps(what)}, "rank": '
        end = json.dumps(fields, default=_plain)[1:]
        lines = [f"{begin}{rank}, {end}" for rank in ranks]
        if self._echo is not None:
            for line in lines:
                self._echo(line)
        if self._layout is not None:
            self._append(self._layout.events, "\n".join(lines))
            told = {"ranks": format_ranges(sorted(ranks)), **fields}
            self._append(self._layout.scheduler_log, f"{_stamp()} {what} {_words(told)}")

    def figures(self, what: str, **fields: object) -> None:
        """The same for programs only: people would find nothing else in the log."""
        entry = {"time": round(time.time(), 6), "event": what, **fields}
        line = json.dumps(entry, default=_plain)
        if self._echo is not None:
            self._echo(line)
        if self._layout is not None:
            self._append(self._layout.events, line)

    def log(self, text: str) -> None:
        """Lines for people in ``scheduler.log`` only."""
        if self._layout is not None:
            for line in text.splitlines():
                self._append(self._layout.scheduler_log, f"{_stamp()} {line}")

    def replace(self, path: Path, content: Mapping[str, object], *, durable: bool = False) -> None:
        """Replace a JSON file; one that is ``durable`` stays, and is laid out for people."""
        # json's quick encoder does not indent: of 16,384 ranks it takes a tenth of the time
        self.replace_text(path, json.dumps(content, indent=1 if durable else None), durable=durable)

    def replace_text(self, path: Path, text: str, *, durable: bool = False) -> None:
        """The same of a text, which is JSON already."""
        try:
            write_atomic(path, text.encode() + b"\n", durable=durable)
        except OSError as error:
            self.trouble(path, error)

    def trouble(self, path: Path, error: OSError, doing: str = "write") -> None:
        """Report once that files cannot be written, or shown."""
        if not self._has_reported:
            self._has_reported = True
            self._say(
                f"cannot {doing} {path} ({error.strerror}): the job continues, "
                "logs and console may lack lines"
            )

    def _append(self, path: Path, line: str) -> None:
        try:
            fd = self._files.get(path)
            if fd is None:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._files[path] = fd
            data = line.encode(errors="backslashreplace") + b"\n"
            written = os.write(fd, data)
            if written < len(data):  # the disk became full within the line: remove the fragment
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        except OSError as error:
            self.trouble(path, error)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _stamp() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)


def _words(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    text = str(_plain(value))
    return json.dumps(text) if " " in text or not text else text
