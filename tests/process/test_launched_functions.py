"""``msrun.launch``: a function in ranks of this machine, with real processes and no torch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.jobs import ROOT, poll

from msrun import LaunchError, launch

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def variables(*names):
    return [os.environ[name] for name in names]


def whom(text, *, answer):
    print(text)
    print("to stderr", file=sys.stderr)
    return int(os.environ["RANK"]), answer


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_each_rank_has_a_workers_environment_and_returns(start):
    found = launch(variables, NAMES, nprocs=3, start=start)
    assert found == {rank: [str(rank), "3", str(rank), "3", "0", "127.0.0.1"] for rank in range(3)}
    ports = launch(variables, ["MASTER_PORT"], nprocs=2, start=start).values()
    assert len({*map(tuple, ports)}) == 1


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_a_rank_prints_has_its_name_in_front(start, capsys):
    given = {"answer": "x" * 500_000}  # more than a pipe holds
    assert launch(whom, ["hello\nagain"], given, nprocs=2, start=start)[1] == (1, given["answer"])
    said = capsys.readouterr()
    wanted = [f"[rank {rank}]: {word}" for rank in range(2) for word in ("again", "hello")]
    assert sorted(said.out.splitlines()) == wanted
    assert sorted(said.err.splitlines()) == [f"[rank {rank}]: to stderr" for rank in range(2)]


def test_an_unfinished_line_and_bytes_below_python_are_shown(capsys):
    launch(lambda: os.write(1, b"no end \xff"), nprocs=1)
    assert capsys.readouterr().out == "[rank 0]: no end \ufffd\n"


def test_a_closure_runs_from_a_thread_beside_a_running_loop():
    factor = 7

    async def notebook():
        here = launch(lambda: factor * int(os.environ["RANK"]), nprocs=2)
        return here, await asyncio.to_thread(launch, lambda: asyncio.run(later()), nprocs=2)

    async def later():
        await asyncio.sleep(0)
        return factor

    assert asyncio.run(notebook()) == ({0: 0, 1: 7}, {0: 7, 1: 7})


def raise_beside(peers_too):
    if os.environ["RANK"] == "1":
        raise ValueError("the first cause")
    if peers_too:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    signal.pause()


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("peers_too", [True, False])
def test_the_first_cause_is_raised_and_the_others_end(start, peers_too):
    with pytest.raises(LaunchError, match="rank 1 raised ValueError: the first cause") as raised:
        launch(raise_beside, [peers_too], nprocs=3, start=start)
    error = raised.value
    assert (error.rank, error.exit_code, error.signal) == (1, 1, None)
    assert "in raise_beside" in error.traceback
    assert all(each.is_consequence for each in error.failures[1:])
    assert peers_too or len(error.failures) == 1


def raises_itself():
    error, other = ValueError("around"), KeyError("and around")
    error.__cause__, other.__context__ = other, error
    raise error


def raises_from_itself():
    error = ValueError("around")
    raise error from error


@pytest.mark.parametrize("fn", [raises_itself, raises_from_itself])
def test_an_exception_that_is_its_own_cause_is_raised_here(fn):
    with pytest.raises(LaunchError, match="rank 0 raised ValueError: around"):
        launch(fn, nprocs=1, timeout_s=10, grace_s=0.2)


def test_a_lost_peer_wrapped_in_the_scripts_own_exception_is_a_consequence(tmp_path):
    def train():
        if os.environ["RANK"] == "1":
            pid = poll(lambda: [int(path.name) for path in tmp_path.iterdir()])[0]
            poll(lambda: not alive(pid))  # so the consequence is seen first
            raise ValueError("mine")
        (tmp_path / str(os.getpid())).touch()
        lost = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
        raise KeyError("no such batch") from lost

    with pytest.raises(LaunchError, match="rank 1 raised ValueError: mine"):
        launch(train, nprocs=2)


def test_a_rank_that_is_killed_ends_the_others_also_those_that_ignore_sigterm():
    def train():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL") as raised:
        launch(train, nprocs=2, grace_s=0.3)
    assert (raised.value.exit_code, raised.value.signal) == (-9, "SIGKILL")


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: os._exit(0), "rank 0 exited with code 0 before the function returned"),
        (threading.Lock, "cannot pickle '_thread.lock' object"),
        (lambda: SimpleNamespace(no=lambda: 0), "Can't.*pickle"),
    ],
)
def test_no_result_is_a_failure(leave, said):
    with pytest.raises(LaunchError, match=said):
        launch(leave, nprocs=1)


def test_sys_exit_with_nothing_is_a_return():
    assert launch(sys.exit, nprocs=2) == {0: None, 1: None}


def test_too_long_is_a_time_out_and_no_rank_is_left(tmp_path):
    def wait():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        signal.pause()

    with pytest.raises(TimeoutError, match=r"ranks 0-1 did not return within 0\.5 s"):
        launch(wait, nprocs=2, timeout_s=0.5)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_what_a_rank_started_ends_with_it():
    def start():
        return subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid

    pid = launch(start, nprocs=1)[0]
    poll(lambda: not alive(pid))


def alive(pid):
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_an_interrupted_caller_leaves_nothing_behind(tmp_path):
    def wait():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        signal.pause()

    def interrupt():
        poll(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            launch(wait, nprocs=2)
        done.result()
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_an_interruption_amid_a_fork_is_not_lost():
    """An exception that is raised in a hook of the fork is only printed by Python."""
    waiting = [signal.SIGINT]

    def interrupt():
        if waiting:
            os.kill(os.getpid(), waiting.pop())

    os.register_at_fork(after_in_parent=interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(signal.pause, nprocs=2, timeout_s=60)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_die_with_a_killed_parent(start, tmp_path):
    code = (
        "import os, signal, sys, msrun\n"
        "def wait(folder):\n"
        "    open(f'{folder}/{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\n"
        "    signal.pause()\n"
        "if __name__ == '__main__':\n"
        f"    msrun.launch(wait, [sys.argv[1]], nprocs=2, start={start!r})\n"
    )
    (tmp_path / "parent.py").write_text(code)
    pids = tmp_path / "pids"
    pids.mkdir()
    told = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py", pids], env=told)
    try:
        poll(lambda: len([path for path in pids.iterdir() if path.read_text()]) == 2)
    finally:
        parent.kill()
        parent.wait()
    poll(lambda: not any(alive(int(path.read_text())) for path in pids.iterdir()))


def test_many_launches_leave_no_descriptor_and_no_child():
    def held() -> tuple[list[str], list[int]]:
        children = psutil.Process().children()  # other tests of this process may have some
        return sorted(os.listdir("/proc/self/fd")), sorted(child.pid for child in children)

    before = held()
    for _ in range(20):
        launch(os.getpid, nprocs=2)
    assert held() == before


@pytest.fixture
def nothing_left():
    """Fails the test if it leaves a process or a descriptor behind."""

    def held():
        return sorted(os.listdir("/proc/self/fd")), psutil.Process().children()

    before = held()
    yield
    assert held() == before


class Deaf(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, _):
        raise BrokenPipeError


def fails_late():
    print("hello", flush=True)
    if os.environ["RANK"] == "1":
        raise ValueError("late")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


@pytest.mark.usefixtures("nothing_left")
def test_where_nobody_reads_what_ranks_print_they_end_as_ever(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Deaf())
    assert launch(whom, ["hello"], {"answer": 1}, nprocs=2) == {0: (0, 1), 1: (1, 1)}
    with pytest.raises(LaunchError, match="rank 1 raised ValueError: late"):
        launch(fails_late, nprocs=3, grace_s=0.2)


@pytest.mark.usefixtures("nothing_left")
def test_what_a_stream_cannot_hold_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", stream)
    launch(print, ["caf\xe9"], nprocs=1)
    assert stream.buffer.getvalue() == b"[rank 0]: caf\\xe9\n"


def reaps(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("action", [signal.SIG_IGN, reaps])
@pytest.mark.usefixtures("nothing_left")
def test_ranks_that_another_part_of_the_program_waits_for(action):
    before = signal.signal(signal.SIGCHLD, action)
    try:
        assert launch(whom, ["hello"], {"answer": 1}, nprocs=2) == {0: (0, 1), 1: (1, 1)}
        with pytest.raises(LaunchError, match="rank 1 raised ValueError: late"):
            launch(fails_late, nprocs=3, grace_s=0.2)
        with pytest.raises(LaunchError, match="rank 0 ended in a way that is not known") as failed:
            launch(os._exit, [3], nprocs=1)
        assert failed.value.exit_code is None
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_has_ended_before_it_could_be_watched(monkeypatch):
    real = os.pidfd_open

    def late(pid):
        poll(lambda: not Path(f"/proc/{pid}").exists())
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert launch(whom, ["hello"], {"answer": 1}, nprocs=2) == {0: (0, 1), 1: (1, 1)}
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(("start", "name"), [("fork", "fork"), ("spawn", "posix_spawn")])
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_cannot_be_started_leaves_nothing_of_the_others(start, name, monkeypatch):
    real, made = getattr(os, name), []

    def scarce(*args, **kwargs):
        made.append(1)
        if len(made) == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, scarce)
    with pytest.raises(BlockingIOError):
        launch(time.sleep, [600], nprocs=4, start=start, grace_s=0.2)


@pytest.mark.usefixtures("nothing_left")
def test_too_few_descriptors_leave_none_open(monkeypatch):
    real, made = os.pipe, []

    def scarce():
        made.append(1)
        if len(made) == 5:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real()

    monkeypatch.setattr(os, "pipe", scarce)
    with pytest.raises(OSError, match="Too many open files"):
        launch(time.sleep, [600], nprocs=2, grace_s=0.2)


def test_what_cannot_be_done_is_refused_in_one_sentence(monkeypatch):
    with pytest.raises(TypeError, match=r"a fresh interpreter cannot get <function .*start=.fork"):
        launch(lambda: 0, start="spawn")
    with pytest.raises(TypeError, match="runs a function, not 3"):
        launch(3)
    with pytest.raises(ValueError, match="nprocs above 0"):
        launch(print, nprocs=0)
    cuda = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", cuda)
    with pytest.raises(RuntimeError, match="has initialized CUDA, which a forked rank cannot use"):
        launch(print)
