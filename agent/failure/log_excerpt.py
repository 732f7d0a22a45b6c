"""Finds in the end of a log what it says about a death: the last traceback. Pure.

The content is unpredictable: both streams in one file, written by several threads and child
processes, cut at its beginning, with escape sequences and progress bars. So a traceback counts only
if it is complete (header, frames, exception line). One that Python reports as ignored, or that a
thread or a child printed, never wins over the main thread's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent.text.log_lines import last_lines

HEADER = re.compile(r"(?:\s+\+ Exception Group )?Traceback \(most recent call last\):$")
LINK = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
EXCEPTION = re.compile(r"(?:\s+\| )?[A-Za-z_][\w.<>]*(?:: |:?$)")
GROUP_LINE = re.compile(r"\s+[|+]")
NOISE = re.compile(
    r"Exception ignored |Exception in thread |Error in atexit|Traceback |terminate called"
    r"|Fatal Python error|Process \S+:$|\[?[WEIF]\d{4} |\[[WEIF] |(?:WARNING|ERROR|INFO)\b"
)
IGNORED = re.compile(r"Exception ignored |--- Logging error ---")
ELSEWHERE = re.compile(r"Exception in thread |Error in atexit|Process \S+:$")
SYNTAX_FRAME = re.compile(r'  File ".*", line \d+$')
SYNTAX_ERROR = re.compile(r"(?:SyntaxError|IndentationError|TabError): ")
FATAL = re.compile(r"Fatal Python error: ")
FATAL_PART = re.compile(
    r"\s|$|Fatal Python error|Current thread|Thread 0x|Extension modules|Python "
)
CURRENT_THREAD = re.compile(r"Current thread(?:'s)? ")
MAX_MESSAGE_LINES = 100
LINES_BEFORE_FATAL = 10


@dataclass(frozen=True, slots=True)
class Traceback:
    """A complete traceback found in a log."""

    text: str
    message: str  # the exception as printed, "ValueError: boom"; may have several lines
    origin: str  # the first exception of the chain, or the output before a fatal signal
    lines_after: int  # how many lines that are not blank follow it in the log


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    exception: int
    end: int
    elsewhere: bool = False  # printed by a thread, a child process or an exit function
    chained_to: _Block | None = None  # the first of the chain


def find_traceback(lines: Sequence[str]) -> Traceback | None:
    """The last complete traceback of the main thread, with its chain; else of another thread."""
    blocks = _blocks(lines)
    own = [block for block in blocks if not block.elsewhere]
    best = (own or blocks)[-1:]
    return _traceback(lines, best[0]) if best else None


def find_fatal(lines: Sequence[str]) -> Traceback | None:
    """What faulthandler printed last: the threads' stacks when a signal ended the process."""
    for sign in (FATAL, CURRENT_THREAD):
        starts = [index for index, line in enumerate(lines) if sign.match(line)]
        if starts:
            start = starts[-1]
            found = _traceback(lines, _Block(start, start, _fatal_end(lines, start)))
            said = last_lines(lines[:start], LINES_BEFORE_FATAL)
            return replace(found, origin="\n".join((*said, found.message)))
    return None


def _fatal_end(lines: Sequence[str], start: int) -> int:
    end = start + 1
    while end < len(lines) and FATAL_PART.match(lines[end]):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return end


def _traceback(lines: Sequence[str], block: _Block) -> Traceback:
    return Traceback(
        text="\n".join(lines[block.start : block.end]),
        message=_message(lines, block),
        origin=_message(lines, block.chained_to or block),
        lines_after=sum(1 for line in lines[block.end :] if line.strip()),
    )


def _message(lines: Sequence[str], block: _Block) -> str:
    first = lines[block.exception]
    if GROUP_LINE.match(first) or FATAL_PART.match(first):
        return first.strip(" |")
    return "\n".join(lines[block.exception : block.end])


def _blocks(lines: Sequence[str]) -> list[_Block]:
    blocks: list[_Block] = []
    for block in _whole_blocks(lines):
        before = _line_before(lines, block.start)
        if before in LINK and blocks:
            blocks.append(_chained(blocks.pop(), block))
        elif not IGNORED.match(before):
            elsewhere = ELSEWHERE.match(before) is not None
            blocks.append(_Block(block.start, block.exception, block.end, elsewhere))
    return blocks


def _chained(cause: _Block, block: _Block) -> _Block:
    first = cause.chained_to or cause
    return _Block(cause.start, block.exception, block.end, cause.elsewhere, first)


def _whole_blocks(lines: Sequence[str]) -> Iterator[_Block]:
    index = 0
    while index < len(lines):
        block = _block_at(lines, index)
        if block is not None:
            yield block
        index = block.end if block is not None else index + 1


def _block_at(lines: Sequence[str], start: int) -> _Block | None:
    if HEADER.match(lines[start]):
        return _group(lines, start) if lines[start][0] == " " else _plain(lines, start, EXCEPTION)
    if SYNTAX_FRAME.match(lines[start]):
        return _plain(lines, start, SYNTAX_ERROR)
    return None


def _plain(lines: Sequence[str], start: int, ending: re.Pattern[str]) -> _Block | None:
    exception = start + 1
    while exception < len(lines) and lines[exception].startswith(" "):
        exception += 1
    if exception == len(lines) or not ending.match(lines[exception]):
        return None
    end = exception + 1
    while end < min(len(lines), exception + MAX_MESSAGE_LINES) and _continues(lines[end]):
        end += 1
    return _Block(start, exception, end)


def _group(lines: Sequence[str], start: int) -> _Block | None:
    end = start + 1
    while end < len(lines) and GROUP_LINE.match(lines[end]):
        end += 1
    named = (index for index in range(start + 1, end) if EXCEPTION.match(lines[index]))
    exception = next(named, None)
    return None if exception is None else _Block(start, exception, end)


def _continues(line: str) -> bool:
    return bool(line.strip()) and not NOISE.match(line)


def _line_before(lines: Sequence[str], start: int) -> str:
    for line in reversed(lines[max(0, start - 2) : start]):
        if line.strip():
            return line
    return ""
