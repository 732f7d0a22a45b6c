"""How workers come to life: forked warm, started cold, and what the forkserver's death changes."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from support.jobs import DEADLINE_S, poll

from agent.workers.starter import STOPPED

WARM = "--preload=queue"
SLOW = "import time; time.sleep(2)"  # a module that takes its time to import
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
)
WAITS = "import os, pathlib, sys, time\nprint('runs', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"


def write(folder, source, name="script.py"):
    path = folder / name
    path.write_text(source)
    return path


def started(job):
    """How the workers started, as the scheduler's log says."""
    log = (job.folder / "scheduler.log").read_text()
    return next(
        line.partition(" workers start ")[2]
        for line in log.splitlines()
        if " workers start " in line
    )


@pytest.mark.parametrize("method", ["auto", "fork", "forkserver", "spawn"])
def test_a_workers_parent_is_msrun(msrun, tmp_path, method):
    script = write(
        tmp_path, "import os; print('parent', os.getppid(), os.getsid(0) == os.getpid())"
    )
    job = msrun.start(WARM, f"--start-method={method}", "--nproc-per-node=2", script)
    assert job.wait().code == 0
    assert set(job.logs().values()) == {f"parent {job.pid} True\n"}
    assert started(job).startswith("cold" if method == "spawn" else "warm")


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_no_worker_has_what_opens_the_lines_between_nodes(msrun, tmp_path, method):
    names = "MSRUN_TOKEN", "MSRUN_SERVER_PASSWORD", "MSRUN_CLIENT_PASSWORD_FILE"
    script = write(tmp_path, f"import os; print([*filter(os.environ.get, {names})])")
    environ = dict.fromkeys(names, "secret")
    job = msrun.start(WARM, f"--start-method={method}", script, **environ)
    assert job.wait().code == 0
    assert set(job.logs().values()) == {"[]\n"}


PROGRAMS = {  # flags, name of the program, source, the reason in the log
    "a script without torch": ((), "script.py", "print('ran')", "does not import torch"),
    "no python": (
        ("--no-python", WARM),
        "script.sh",
        "#!/bin/sh\necho ran\n",
        "not a Python script",
    ),
    "run path": (("--run-path", WARM), "script.py", "print('ran')", "not a Python script"),
}


@pytest.mark.parametrize(("flags", "name", "source", "reason"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_no_warm_program_starts_cold(msrun, tmp_path, flags, name, source, reason):
    script = write(tmp_path, source, name)
    script.chmod(0o755)
    job = msrun.start(*flags, "--nproc-per-node=2", script)
    assert job.wait().code == 0
    assert set(job.logs().values()) == {"ran\n"}
    assert started(job).startswith("cold: ")
    assert reason in started(job)


def test_another_interpreter_starts_cold(msrun, tmp_path):
    python = tmp_path / "otherpython"
    python.write_text(f'#!/bin/sh\necho other\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    script = write(tmp_path, "print('ran')")
    job = msrun.start(WARM, script, PYTHON_EXEC=str(python))
    assert job.wait().code == 0
    assert job.logs() == {"worker_0.log": "other\nran\n"}
    assert str(python) in started(job)


def test_a_program_inherits_no_ignored_signal(msrun, tmp_path):
    script = write(tmp_path, "#!/bin/sh\ngrep SigIgn /proc/self/status\n", "script.sh")
    script.chmod(0o755)
    job = msrun.start("--no-python", script)
    assert job.wait().code == 0
    assert int(job.logs()["worker_0.log"].split()[1], 16) == 0


UNFIT = {  # a module to preload that must not be forked, and what is said about it
    "starts a thread": (THREAD, "a preloaded module started 1 thread"),
    "raises": ("raise RuntimeError('no')", "importing heavy failed: RuntimeError('no')"),
    "exits": ("raise SystemExit(3)", ""),
}


@pytest.mark.parametrize(("source", "said"), UNFIT.values(), ids=UNFIT)
def test_an_unfit_forkserver_is_replaced_by_a_cold_one(msrun, tmp_path, source, said):
    write(tmp_path, source, "heavy.py")
    script = write(tmp_path, "import sys; print('heavy' in sys.modules)")
    job = msrun.start("--preload=heavy", "--nproc-per-node=2", script)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert said in ended.err
    assert set(job.logs().values()) == {"False\n"}


def test_the_forkserver_is_killed_while_it_imports(msrun, tmp_path):
    write(tmp_path, SLOW, "heavy.py")
    job = msrun.start("--preload=heavy", "--nproc-per-node=2", write(tmp_path, "print('ran')"))
    os.kill(
        poll(lambda: job.status()["state"] == "starting" and job.forkservers())[0], signal.SIGKILL
    )
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert set(job.logs().values()) == {"ran\n"}


def test_the_forkserver_is_killed_after_the_ranks_run(msrun, tmp_path):
    job = msrun.start(WARM, "--nproc-per-node=2", write(tmp_path, WAITS))
    job.await_lines("runs", 2)
    (first,) = job.forkservers()
    os.kill(first, signal.SIGKILL)
    poll(lambda: job.forkservers() not in ([], [first]))
    write(tmp_path, "", "go")
    ended = job.wait()
    assert ended.code == 0, ended.err


def test_a_restart_works_after_the_forkserver_was_killed(msrun, tmp_path):
    script = write(tmp_path, WAITS + "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    job = msrun.start(WARM, "--max-restarts=1", "--nproc-per-node=2", script)
    job.await_lines("runs", 2)
    os.kill(job.forkservers()[0], signal.SIGKILL)
    write(tmp_path, "", "go")
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert job.status()["attempt"] == 1


def test_a_stopped_forkserver_is_replaced_as_soon_as_it_is_needed(msrun, tmp_path):
    script = write(tmp_path, WAITS + "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    job = msrun.start(WARM, "--max-restarts=1", "--nproc-per-node=2", script)
    job.await_lines("runs", 2)
    (first,) = job.forkservers()
    os.kill(first, signal.SIGSTOP)
    write(tmp_path, "", "go")
    ended = job.wait()
    assert ended.code == 0, ended.err
    (given_up,) = [one for one in job.events() if one["event"] == "ForkserverEnded"]
    assert (given_up["reason"], sorted(given_up["owed"])) == (STOPPED, [0, 1])
    begun = [one for one in job.events() if one["event"] == "StartAttempt"]
    assert given_up["time"] - begun[1]["time"] < 30
    assert f"msrun: {STOPPED}: msrun kills it and starts another\n" in ended.err


HELLO = "import os; print('hello', os.environ['RANK'], flush=True)"
DIES = """
import os, signal
from agent.forkserver import adoption
if "died" not in os.listdir():
    def die(*_):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    {moment} = die
"""


@pytest.mark.parametrize("moment", ["os.waitpid", "adoption.fork_adopted"])
def test_no_rank_runs_twice_if_the_forkserver_is_killed_while_it_forks(msrun, tmp_path, moment):
    """It dies when its children may run, and before it forks at all."""
    write(tmp_path, DIES.format(moment=moment), "deadly.py")
    script = write(tmp_path, HELLO)
    job = msrun.start("--preload=deadly", "--nproc-per-node=3", script)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert (tmp_path / "died").exists()
    assert job.logs() == {f"worker_{rank}.log": f"hello {rank}\n" for rank in range(3)}


@pytest.mark.parametrize("warm", [(WARM,), ()], ids=["warm", "cold"])
def test_no_rank_runs_twice_if_the_shell_ignores_sigchld(msrun, tmp_path, warm):
    script = write(tmp_path, f"{HELLO}; os.system('exit 3') >> 8 == 3 or print('no status')")
    words = (*warm, f"--log_dir={tmp_path / 'logs'}", "--nproc-per-node=2", script)
    ended = subprocess.run(
        ["env", "--ignore-signal=CHLD", sys.executable, "-m", "msrun", *map(str, words)],
        env=msrun.env(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    logs = [(tmp_path / f"logs/worker_{rank}.log").read_text() for rank in range(2)]
    assert logs == ["hello 0\n", "hello 1\n"]


NO_STORE = """
from agent.forkserver import adoption
fork_truly = adoption.fork_adopted
def fork(count, introduce):
    if "_fork_store" in introduce.__qualname__:
        return (adoption.AdoptionResult(0, "fork: Resource temporarily unavailable; raise it"),)
    return fork_truly(count, introduce)
adoption.fork_adopted = fork
"""
KNOCKS = """
import os, socket
peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
peer.recv(1)
"""


def test_ranks_that_can_never_meet_are_ended_with_one_sentence(msrun, tmp_path):
    write(tmp_path, NO_STORE, "crowded.py")
    words = ("--preload=crowded", "--nproc-per-node=2", "--max-restarts=3")
    ended = msrun.run(*words, write(tmp_path, KNOCKS))
    assert ended.code == 2
    said = "no store for the workers on MASTER_PORT can be started: fork: Resource temporarily"
    assert [line for line in ended.err.splitlines() if said in line] == ended.err.splitlines()[:1]


GONE = """
import os, signal, subprocess
from agent.forkserver import preload_imports
subprocess.Popen(["sleep", "600"], start_new_session=True)
def why_not_fork():
    msrun = os.getppid()
    os.kill(msrun, signal.SIGKILL)
    while os.getppid() == msrun:
        pass
    return ""
preload_imports.why_not_fork = why_not_fork
"""


def test_if_msrun_dies_before_the_forkserver_answers_what_is_left_is_ended(msrun, tmp_path):
    write(tmp_path, GONE, "gone.py")
    job = msrun.start("--preload=gone", write(tmp_path, "print('ran')"))
    job.process.wait(DEADLINE_S)
    poll(lambda: not msrun.marked())
    assert job.process.returncode == -signal.SIGKILL
    assert "Traceback" not in (job.folder / "scheduler.log").read_text()


def test_a_preloaded_module_may_ignore_sigchld(msrun, tmp_path):
    write(tmp_path, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "deaf.py")
    job = msrun.start("--preload=deaf", "--nproc-per-node=2", write(tmp_path, HELLO))
    assert job.wait().code == 0
    assert job.logs() == {f"worker_{rank}.log": f"hello {rank}\n" for rank in range(2)}


@pytest.fixture
def anybodys_folder() -> Iterator[str]:
    """Not in pytest's folder, which another user cannot look into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield folder


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"),
    reason="needs root, to become a user of its own",
)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_no_process_left_for_a_worker_is_said(msrun, tmp_path, anybodys_folder, limit, method):
    """With RLIMIT_NPROC a fork of the forkserver, of its helper or of a worker fails."""
    uid = 54321 + os.getpid() % 1000  # another one than of the tests that run beside this one
    user = ("setpriv", f"--reuid={uid}", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    words = (f"--log_dir={tmp_path}/logs", WARM, f"--start-method={method}", "--nproc-per-node=4")
    program = ("-m", "timeit", "-n1", "-r1", "import time; time.sleep(30)")
    ended = subprocess.run(
        ["prlimit", f"--nproc={limit}", *user, sys.executable, "-m", "msrun", *words, *program],
        env=msrun.env(XDG_STATE_HOME=anybodys_folder),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode in {1, 2}
    assert "Resource temporarily unavailable" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "limit" in ended.stderr
