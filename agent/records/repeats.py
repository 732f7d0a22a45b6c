"""Tracebacks that several ranks print at once: the console shows one, and which ranks repeat it.

A traceback waits a moment for its last line and for those of the other ranks. The log files hold
every one of them. The line that MindSpore's callback prints in each rank is treated alike; what
survivors say when a peer died is in the files only, as msrun says it; so are stacks of C++ and of
ranks that hang, and torch's warnings about the sockets of a dead peer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agent.records.log_view import LogView
from agent.text.wording import ranged
from worker_hooks.contract.rank_lines import LOST_A_PEER, STACK, TRIGGERED

HOLD_S = 0.3
MAX_HELD_BYTES = 1 << 16  # of one rank; a longer text is shown at once
MAX_KNOWN = 64  # different texts
MAX_LINE_CHARS = 200

_SIGNS = (b"Traceback (most recent call last):\n", f"{TRIGGERED}\n".encode())
_HIDDEN_KINDS = (  # a part of the line, and all of it
    (LOST_A_PEER.encode(), re.escape(LOST_A_PEER.encode())),
    (STACK.encode(), rb"msrun: %b.*" % STACK.encode()),
    (b"(most recent call first):\n", rb"Exception raised from .* \(most recent call first\):"),
    (b"frame #", rb"frame #\d+: .* \+ 0x[0-9a-f]+ \(0x.*\)"),
    (b"<omitting python", rb"<omitting python frames>"),
    # an exception follows if it matters
    (
        b"SocketImpl(",
        rb"(?:\[rank\d+\]:)?\[W[^]]* TCPStore.cpp:\d+\] \[c10d\] \w+ failed on SocketImpl\(.*",
    ),
)
_HIDDEN = re.compile(rb"(?:%b)\n" % b"|".join(line for _, line in _HIDDEN_KINDS))
_TORCHS = rb"(?:\[rank\d+\]: ?)?"  # what torch's excepthook writes in front of each line


class Repeats:
    """Passes lines on to the console, but for tracebacks that another rank has printed."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        """``write`` gets a descriptor and what to show there."""
        self._write = write
        self._held: dict[LogView, tuple[float, bytes]] = {}  # since when, and what
        self._first: dict[bytes, int] = {}  # a text, and the rank whose text was shown
        self._same: dict[bytes, list[LogView]] = {}  # who repeats it and is not yet named

    def take(self, view: LogView, data: bytes, now: float) -> None:
        """Show lines of a file, each with its prefix; from a traceback's head on, in a moment."""
        data = _without_hidden(view, data)
        since, held = self._held.get(view, (now, b""))
        if not held:
            at = _head(view, data)
            self._write(view.fd, data[:at])
            data = data[at:]
        if data:
            self._held[view] = since, held + data
        if len(held + data) > MAX_HELD_BYTES:
            self._show(view)

    def release(self, now: float) -> float | None:
        """Show what has waited long enough.

        Returns:
            The seconds until there is more to show; ``None``: nothing waits.
        """
        for view, (since, _) in list(self._held.items()):
            if now >= since + HOLD_S:
                self._show(view)
        if self._held:
            return min(since for since, _ in self._held.values()) + HOLD_S - now
        self._name_ranks()
        return None

    def end(self) -> None:
        """Show all that waits: another attempt begins, or none."""
        for view in list(self._held):
            self._show(view)
        self._name_ranks()
        self._first = {}

    def _show(self, view: LogView) -> None:
        _, data = self._held.pop(view)
        text = re.sub(rb"(?m)^" + re.escape(view.prefix or b"") + _TORCHS, b"", data)
        if text not in self._first and len(self._first) >= MAX_KNOWN:
            self._name_ranks()
            self._first = {}
        if self._first.setdefault(text, view.rank) == view.rank:
            self._write(view.fd, data)
        else:
            self._same.setdefault(text, []).append(view)

    def _name_ranks(self) -> None:
        for text, views in self._same.items():
            last = text.rstrip().rpartition(b"\n")[2].decode(errors="backslashreplace")
            who, first = ranged(view.rank for view in views), self._first[text]
            said = f"[{who}]: the same as rank {first}: {last[:MAX_LINE_CHARS]}\n"
            self._write(views[0].fd, said.encode(errors="backslashreplace"))
        self._same = {}


def _without_hidden(view: LogView, data: bytes) -> bytes:
    """Without stacks, and without what survivors and torch say of a lost peer."""
    if not any(part in data for part, _ in _HIDDEN_KINDS):
        return data
    begin = len(view.prefix or b"")
    lines = re.findall(rb"[^\n]*\n", data)  # every line is complete
    return b"".join(line for line in lines if not _HIDDEN.fullmatch(line, begin))


def _head(view: LogView, data: bytes) -> int:
    """Where the first traceback begins, else the end."""
    found = [_start(view, sign, data) for sign in _SIGNS if sign in data]
    return min(found, default=len(data))


def _start(view: LogView, sign: bytes, data: bytes) -> int:
    begin = rb"(?m)^" + re.escape(view.prefix or b"") + _TORCHS + re.escape(sign)
    found = re.search(begin, data)
    return len(data) if found is None else found.start()
