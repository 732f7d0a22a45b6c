"""Every test leaves nothing behind: no process, no thread, no descriptor."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support.jobs import ROOT, Launcher, last_events, poll
from support.warm_python import WarmPython
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

# Under nohup or in a shell's background these are ignored, and every job would inherit that.
for signum in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a new checkout each process prepares a share of the asserts, for all; else each does all.

    That is half of what it takes to find the tests. Without these names of pytest nothing changes.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or sys.dont_write_bytecode:
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    with contextlib.suppress(ImportError, AttributeError, TypeError, OSError):
        rewrite = importlib.import_module("_pytest.assertion.rewrite")
        state = session.config.stash[rewrite.assertstate_key]
        for file in files[number::count]:
            prepared = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if not prepared.exists() and rewrite.try_makedirs(prepared.parent):
                digest, code = rewrite._rewrite_test(file, session.config)
                rewrite._write_pyc(state, code, digest, prepared)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave more of the same to who asks for it: see ``rare.txt``."""
    seen: Counter[str] = Counter()
    kept = usual_cases()
    for item in items:
        function = item.nodeid.partition("[")[0].removeprefix("tests/")
        if function in kept:
            every = kept[function]
            if not every or seen[function] % every:
                item.add_marker("rare")
            seen[function] += 1


def usual_cases() -> dict[str, int]:
    """Of which functions not all cases are usual, but every Nth."""
    lines = (Path(__file__).parent / "rare.txt").read_text().splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {function: int(every) for every, function in rows}


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: tests that collect theirs need not look through it."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # by the first optimizer, else
        # as in the ranks of a job; two threads on a busy processor wait for each other, spinning
        importlib.import_module("torch").set_num_threads(1)
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Each test runs wherever a process is free; but files with a fixture for the file stay in one.

    Such a fixture ran jobs that the file's tests look at. Unit tests of a file share what the first
    of them imports, parses and warms up.
    """
    return Scheduler(config, log)


class Scheduler(LoadScopeScheduling):
    """Deals out files that share a fixture first, then test by test."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares(file) else nodeid


@functools.cache
def _shares(file: str) -> bool:
    text = (ROOT / file).read_text()
    is_unit = file.startswith("tests/unit/")
    return is_unit or 'scope="module"' in text or "(launcher: Launcher" in text


@pytest.fixture(autouse=True, scope="module")
def _kept_is_no_garbage() -> Iterator[None]:
    """What a file's tests leave for good (caches, sources) is looked through by no later collection.

    Hundreds of tests collect their garbage, which took a third of the time of all unit tests.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test sees no other run of this user, and stops none; the folder is made when it is used."""
    folder = tmp_path_factory.getbasetemp() / "state" / uuid.uuid4().hex
    # not the test's monkeypatch, which would then hold what it has patched until leaks are counted
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(folder))
        yield


@pytest.fixture
def own_randomness() -> Iterator[None]:
    """The test draws as it likes: all generators of this process are put back."""
    import random

    import numpy as np
    import torch

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  scripts use them
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    random.setstate(before[2])


@pytest.fixture
def msrun(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts msrun; fails the test if a process of a job outlives it."""
    yield from launched(tmp_path, request)


@pytest.fixture(scope="module")
def launcher(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Launcher]:
    """The same for jobs that all tests of a file look at."""
    yield from launched(tmp_path_factory.mktemp("jobs"), request)


def launched(folder: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    launcher = Launcher(folder)
    own = None
    if modules := getattr(request.module, "WARM_IMPORTS", ()):  # what its scripts import
        own = WarmPython(*modules)
        launcher.python = own.words
    elif request.node.get_closest_marker("warm"):
        launcher.python = request.getfixturevalue("warm_python").words
    yield launcher
    left = launcher.end()
    if own:
        own.end()
    assert not left, f"processes outlived their job: {left}"


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Starts plain programs that import torch, which takes three seconds, without importing it."""
    python = WarmPython()
    yield python
    python.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what happened in the jobs that the test started."""
    report = yield
    if report.failed:
        found = item.funcargs.values()
        folders = [one.tmp if isinstance(one, Launcher) else one for one in found]
        report.sections += last_events(each for each in folders if isinstance(each, Path))
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads and descriptors of the test process itself are back to what they were."""
    if request.node.get_closest_marker("warm"):
        request.getfixturevalue("warm_python")  # first: it stays
    threads, fds = threading.active_count(), open_fds()
    yield
    with contextlib.suppress(AssertionError):  # a queue's thread ends soon after its queue
        poll(lambda: threading.active_count() <= threads and open_fds() <= fds, within_s=10)
    assert threading.active_count() <= threads, threading.enumerate()
    assert open_fds() <= fds


def open_fds() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
