"""Of threads that are not Python's only those are let through that a copy makes again."""

import ctypes

import pytest

from worker_hooks.shadows.native_threads import _threads, foreign

GLOO = {1: "python", 2: "gloo_tcp_loop", 3: "pt_gloo_runloop"}


@pytest.mark.parametrize(
    ("more", "python", "pooled", "found"),
    [
        ({}, (), 0, ()),
        ({4: "python"}, (), 1, ()),  # of OpenBLAS
        ({4: "python", 5: "python"}, (), 1, ("python",)),
        ({4: "python"}, (4,), 0, ()),  # Python's own are looked at elsewhere
        ({4: "jemalloc_bg_thd", 5: "tokio-worker"}, (), 9, ("jemalloc_bg_thd", "tokio-worker")),
        ({4: "renamed"}, (4,), 0, ()),
    ],
)
def test_unknown_threads_are_found(more, python, pooled, found):
    assert foreign(GLOO | more, python, 1, pooled) == found


def test_a_main_thread_of_another_name_has_pools_of_that_name():
    named = {1: "trainer", 4: "trainer", 5: "python3.11"}
    assert foreign(named, (), 1, 2) == ()
    assert foreign(named, (), 1, 1) == ("trainer",)


def test_a_thread_of_c_is_seen():
    before = _threads()
    libc, pthread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(pthread), None, libc.sleep, ctypes.c_void_p(60))
    assert len(_threads()) == len(before) + 1
    libc.pthread_cancel(pthread)
    libc.pthread_join(pthread, None)
