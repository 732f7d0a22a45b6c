"""Threads that gloo leaves asleep are found, and raise."""

import threading

import pytest
import torch
from support.jobs import poll

from worker_hooks.contract.peer_lost import says_peer_lost
from worker_hooks.distributed import gloo_waiters
from worker_hooks.distributed.gloo_waiters import Waiter


@pytest.fixture
def asleep(groups):
    """A thread of a script that waits for a lock, and one that receives and is never sent to."""
    lock, raised = threading.Lock(), []

    def receive():
        try:
            groups[0].recv([torch.ones(1)], 1 - groups[0].rank(), 0).wait()
        except RuntimeError as error:
            raised.append(str(error))

    lock.acquire()
    threads = [threading.Thread(target=each) for each in (lock.acquire, receive)]
    for thread in threads:
        thread.start()
    yield threads[1], raised
    lock.release()
    gloo_waiters.raise_in(gloo_waiters.sleeping())
    for thread in threads:
        thread.join()


@pytest.fixture
def missing(monkeypatch, request):
    """gloo or C++ without one of the names."""
    monkeypatch.setattr(gloo_waiters, request.param, "gone")
    gloo_waiters._library.cache_clear()
    yield
    gloo_waiters._library.cache_clear()


def test_a_thread_that_receives_is_found_and_raises(asleep):
    receiver, raised = asleep
    (waiter,) = poll(gloo_waiters.sleeping)
    assert waiter.task == str(receiver.native_id)
    assert gloo_waiters.sleeping() == {waiter}
    gloo_waiters.raise_in([waiter._replace(buffer=waiter.buffer + 16)])  # as if it had woken
    gloo_waiters.raise_in([waiter._replace(task="1")])
    assert gloo_waiters.sleeping() == {waiter}
    gloo_waiters.raise_in([waiter])
    receiver.join(timeout=60)
    assert says_peer_lost(raised[0])
    assert gloo_waiters.sleeping() == frozenset()


@pytest.mark.parametrize("missing", ["_TABLE", "_RAISE", "_ERROR", "_ERROR_HELD"], indirect=True)
@pytest.mark.usefixtures("missing")
def test_without_a_name_nothing_is_found_and_nothing_is_raised():
    assert gloo_waiters.sleeping() == frozenset()
    gloo_waiters.raise_in([Waiter(str(threading.get_native_id()), 0)])  # a call would crash
