"""A job that nodes come to."""

import asyncio
import queue
import threading

import pytest
from support.meeting_nodes import OVER, TOKEN, meeting

from agent.arrivals.late import LateGuests
from agent.nodes.messages import Refused


@pytest.fixture
def job():
    with meeting() as job:
        yield job


@pytest.fixture
def late(job):
    """A job that has begun, and its loop."""
    job.listener.listen(100)
    loop = asyncio.new_event_loop()
    answers = [Refused("the job has begun with all its nodes (mn0, mn1)", 2)]
    admitted = queue.Queue()
    guests = LateGuests(job.listener, "1.0", TOKEN)
    guests.attach(loop, lambda *_: answers[0], lambda *about: admitted.put(about))
    guests.loop, guests.answers, guests.admitted = loop, answers, admitted
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield guests
    loop.call_soon_threadsafe(guests.close, OVER)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
