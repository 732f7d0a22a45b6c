"""A traceback that several ranks print is shown once, and nothing else is ever held back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from agent.records.log_view import LogView
from agent.records.repeats import HOLD_S, MAX_HELD_BYTES, MAX_KNOWN, Repeats
from worker_hooks.distributed import stacks

BOOM = (
    "Traceback (most recent call last):",
    '  File "t.py", line 1, in <module>',
    "ValueError: boom",
)
LATER = HOLD_S + 0.01


class Console:
    """What is shown, with a clock of its own; ``says`` puts each rank's prefix in front."""

    def __init__(self) -> None:
        self.shown = b""
        self.repeats = Repeats(self._write)
        self.now = 100.0

    def _write(self, fd: int, data: bytes) -> None:
        assert fd == 1
        self.shown += data

    def says(self, rank: int, *lines: str) -> None:
        prefix = b"[rank %d]: " % rank
        view = LogView(Path(f"worker_{rank}.log"), 1, prefix, rank=rank, folds=True)
        data = b"".join(prefix + line.encode() + b"\n" for line in lines)
        self.repeats.take(view, data, self.now)

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        self.repeats.release(self.now)
        shown, self.shown = self.shown, b""
        return shown.decode().splitlines()


@pytest.fixture
def console():
    return Console()


def of(rank, *lines):
    return [f"[rank {rank}]: {line}" for line in lines]


def test_ordinary_lines_are_shown_at_once(console):
    console.says(0, "step 1", "File x")
    console.says(1, "step 1", "File x")
    assert console.after(0) == [*of(0, "step 1", "File x"), *of(1, "step 1", "File x")]


def test_equal_tracebacks_are_shown_once_and_the_ranks_are_named(console):
    for rank in range(8):
        console.says(rank, "begins", *BOOM)
    assert console.after(0) == [of(rank, "begins")[0] for rank in range(8)]
    same = "[ranks 1-7]: the same as rank 0: ValueError: boom"
    assert console.after(LATER) == [*of(0, *BOOM), same]


def test_pieces_of_a_traceback_and_torchs_own_prefix_make_no_difference(console):
    console.says(2, *BOOM[:1])
    console.says(3, *(f"[rank3]: {line}" for line in BOOM))
    console.says(2, *BOOM[1:])
    assert console.after(LATER) == [
        *of(2, *BOOM),
        "[rank 3]: the same as rank 2: ValueError: boom",
    ]


def test_what_mindspores_callback_prints_is_folded_too(console):
    line = "Graceful exit is triggered, stop training."
    for rank in range(4):
        console.says(rank, line)
    assert console.after(LATER) == [*of(0, line), f"[ranks 1-3]: the same as rank 0: {line}"]


def test_what_survivors_say_is_left_to_msrun(console):
    line = "lost its connection to a peer, and repeats its step"
    console.says(0, "step 5", line, "step 6")
    console.says(1, *BOOM, line)
    console.says(2, f"it {line}")
    assert console.after(LATER) == [*of(0, "step 5", "step 6"), *of(2, f"it {line}"), *of(1, *BOOM)]


def test_stacks_of_c_plus_plus_are_left_to_the_files(console):
    told = (
        "[W1123 04:16:38 socket.cpp:125] [c10d] no address",
        "frame #1 of the film",
        "50%\r100%",
        "",
    )
    stack = (
        "[rank2]:[W1123 04:16:38.12 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=14)",
        "[W1123 04:16:38 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=14): Broken pipe",
        "Exception raised from recvBytes at /c10d/Utils.hpp:787 (most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f36b2d84b8d in /lib/libc10.so)",
        "<omitting python frames>",
        "frame #37: _start + 0x21 (0x558dcac87081 in /bin/python)",
    )
    console.says(2, told[0], *stack, *told[1:])
    assert console.shown.decode() == "".join(f"[rank 2]: {line}\n" for line in told)


def test_stacks_of_ranks_that_hang_are_left_to_the_files(console, capfd):
    listener = threading.Thread(target=stacks.write, args=("rank 2 is inspected",))
    listener.start()
    listener.join()
    written = capfd.readouterr().err.splitlines()
    assert len(written) > 3
    console.says(2, *written, "msrun: said")
    assert console.shown.decode() == "[rank 2]: msrun: said\n"


@pytest.mark.parametrize("last", ["ValueError: other", "ValueError: boom\n[rank 1]: and more"])
def test_a_traceback_that_differs_is_shown(console, last):
    console.says(0, *BOOM)
    console.says(1, *BOOM[:2], *last.split("\n[rank 1]: "))
    assert console.after(LATER)[3:] == of(1, *BOOM[:2], *last.split("\n[rank 1]: "))


def test_one_rank_s_own_repetitions_are_all_shown(console):
    for _ in range(2):
        console.says(0, *BOOM)
        assert console.after(LATER) == of(0, *BOOM)


def test_the_time_until_the_next_look_is_known(console):
    assert console.repeats.release(console.now) is None
    console.says(0, *BOOM)
    assert console.repeats.release(console.now + 0.1) == pytest.approx(HOLD_S - 0.1)
    assert console.repeats.release(console.now + LATER) is None


def test_ranks_are_named_together_although_they_were_not_equally_fast(console):
    console.says(0, *BOOM)
    console.says(1, *BOOM)
    assert console.after(HOLD_S / 2) == []
    console.says(2, *BOOM)
    assert console.after(HOLD_S / 2 + 0.01) == of(0, *BOOM)
    assert console.after(HOLD_S) == ["[ranks 1-2]: the same as rank 0: ValueError: boom"]


def test_the_end_shows_all_and_begins_anew(console):
    console.says(0, *BOOM)
    console.says(1, *BOOM)
    console.repeats.end()
    assert console.after(0) == [*of(0, *BOOM), "[rank 1]: the same as rank 0: ValueError: boom"]
    console.says(1, *BOOM)
    assert console.after(LATER) == of(1, *BOOM)


def test_much_text_behind_a_traceback_is_not_kept(console):
    console.says(0, BOOM[0], "x" * MAX_HELD_BYTES)
    assert console.after(0) == of(0, BOOM[0], "x" * MAX_HELD_BYTES)


def test_a_limited_number_of_texts_is_remembered_and_none_is_lost(console):
    told = []
    for number in range(2 * MAX_KNOWN):
        for rank in (0, 1):
            console.says(rank, *BOOM[:2], f"ValueError: {number}")
        told += console.after(LATER)
    assert len(told) == 2 * MAX_KNOWN * 4
