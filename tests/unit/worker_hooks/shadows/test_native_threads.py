"""Of threads that are not Python's only those are let through that a copy makes again."""

import ctypes
import subprocess

import pytest

from worker_hooks.shadows.native_threads import ARROW, OPENBLAS, TORCH, _threads, foreign

OTHERS = """
import ctypes, time
import numpy, torch
from worker_hooks.shadows import native_threads, openmp
torch.set_num_threads(4)
numpy.ones((300, 300)) @ numpy.ones((300, 300))
openmp.why_not(), openmp.pause()
assert not native_threads.why_not(), native_threads.why_not()
libc, pthread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(pthread), None, libc.pause, None)
assert "python" in native_threads.why_not()
"""

GLOO = {1: "python", 2: "gloo_tcp_loop", 3: "pt_gloo_runloop"}
BLAS = {4: OPENBLAS}


@pytest.mark.parametrize(
    ("more", "python", "pools", "of_torch", "found"),
    [
        ({}, (), {}, 0, ()),
        ({4: "python"}, (), BLAS, 0, ()),
        ({4: "python", 5: "python"}, (), BLAS, 9, ("python",)),  # room in a pool says nothing
        ({4: "python", 5: "python"}, (), BLAS | {5: TORCH}, 1, ()),
        ({4: "python", 5: "python"}, (), {4: TORCH, 5: TORCH}, 1, ("python",)),
        ({4: "python"}, (4,), {}, 0, ()),  # Python's own are looked at elsewhere
        (
            {4: "grpc_global_tim", 5: "tokio-worker"},
            (),
            {5: TORCH},
            9,
            ("grpc_global_tim", "tokio-worker"),
        ),
        ({4: "jemalloc_bg_thd", 5: "python"}, (), {5: ARROW}, 0, ()),
        ({4: "renamed"}, (4,), {}, 0, ()),
    ],
)
def test_unknown_threads_are_found(more, python, pools, of_torch, found):
    assert foreign(GLOO | more, python, 1, pools, of_torch) == found


def test_a_main_thread_of_another_name_has_pools_of_that_name():
    named = {1: "trainer", 4: "trainer", 5: "python3.11"}
    assert foreign(named, (), 1, {4: OPENBLAS, 5: TORCH}, 1) == ()
    assert foreign(named, (), 1, {4: OPENBLAS}, 1) == ("trainer",)


def test_a_thread_is_known_by_the_library_that_it_waits_in(warm_python):
    """Pools that could have more threads than they have must hide none of others."""
    run = [*warm_python.words, "-c", OTHERS]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done


def test_a_thread_of_c_is_seen():
    before = _threads()
    libc, pthread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(pthread), None, libc.sleep, ctypes.c_void_p(60))
    assert len(_threads()) == len(before) + 1
    libc.pthread_cancel(pthread)
    libc.pthread_join(pthread, None)
