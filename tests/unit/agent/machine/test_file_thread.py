"""Threads that tell the loop what they have done, also when nobody listens any more."""

import asyncio
from pathlib import Path

from agent.machine.file_thread import FileThread
from agent.machine.loop_calls import until_closed

ROOT = Path(__file__).parents[4]


def closed_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


def test_a_loop_that_is_closed_is_told_nothing():
    told = []
    until_closed(closed_loop().call_soon_threadsafe)(told.append, 1)
    until_closed(lambda what, *args: what(*args))(told.append, 2)
    assert told == [2]


def test_work_that_ends_after_the_loop_is_no_error():
    done = []
    one = FileThread(closed_loop().call_soon_threadsafe)
    one.do(lambda: done.append("work"), done.append)
    one.close(60)
    assert done == ["work"]


def test_no_thread_meets_a_closed_loop_unprepared():
    """A job may end while a checkpoint travels, for example: that is no traceback."""
    named = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "agent").rglob("*.py"))
        for line in path.read_text().splitlines()
        if "call_soon_threadsafe" in line and '"""' not in line
    ]
    assert [one for one in named if "until_closed(" not in one and "FileThread(" not in one] == []
