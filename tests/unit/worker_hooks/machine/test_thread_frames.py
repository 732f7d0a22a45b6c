"""A look at the threads collects no garbage: up to Python 3.11 that could hang the process."""

import gc
import sys
import threading

import pytest

from worker_hooks.machine import thread_frames as module
from worker_hooks.machine.thread_frames import main_frame, thread_frames


def collected_amid(look):
    """How often garbage is collected while the list of frames is made; all may begin that."""
    began = 0

    def note(phase, _info):
        nonlocal began
        began += phase == "start" and sys._getframe(1).f_code is module._frames.__code__

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(100):
            look()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    return began


def test_nothing_is_collected_amid_a_look():
    if module.COLLECTS_AMID:
        assert collected_amid(module._frames) > 0  # what it is about
    assert collected_amid(thread_frames) == 0
    assert gc.isenabled()


def test_all_threads_are_seen_and_the_main_one():
    frames = {}
    here = threading.Thread(target=lambda: frames.update(thread_frames(), main=main_frame()))
    here.start()
    here.join()
    main = threading.main_thread().ident
    assert {here.ident, main} <= frames.keys()
    assert frames["main"] is frames[main]


@pytest.mark.parametrize("is_on", [True, False])
def test_whether_garbage_is_collected_stays_as_it_was(is_on):
    if not is_on:
        gc.disable()
    try:
        thread_frames()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_a_copy_of_the_process_collects_again():
    """It was made while another thread looked."""
    garbage = module._Garbage()
    garbage.__enter__()
    assert not gc.isenabled()
    try:
        garbage.begin_in_child()
        assert gc.isenabled()
        with garbage:
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.enable()
