"""A warm worker is what ``python -u`` would have made: all that can be seen is compared.

The same probe runs *warm* (msrun's default: forked from an interpreter that imported torch), *cold*
(``--start-method spawn``) and, with a cold worker's environment, as plain ``python -u`` without
msrun. What may differ is in INHERENT, each with its reason.
"""

import contextlib
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
from support.jobs import ROOT, WORKERS

pytestmark = pytest.mark.torch

MODES = {"warm": (), "cold": ("--start-method=spawn",)}

# What differs between a warm and a cold worker, or between any two runs, and why that is right.
INHERENT = {
    "draws.hash": "the hash seed is the interpreter's, so all ranks share the forkserver's",
    "draws.python": "random in every process",
    "draws.numpy": "random in every process",
    "draws.numpy generator": "random in every process",
    "draws.torch": "random in every process",
    "draws.torch seed": "random in every process",
    "interpreter.first filters": "torch's warning filters are there before the script's import of it",
    "runtime.atexit": "leave.py's own function, run last, makes one more (a private counter)",
    "environ.MASTER_PORT": "a free port for each job",
    "environ.MS_SCHED_PORT": "the same",
    "environ.MSRUN_RUNS": "names the job",
    "environ.MSRUN_HOOKS": "the agent's socket, a name for each job",
    "environ.MSRUN_FORKSERVER_PID": "a process of each job",
    "environ.TORCHELASTIC_RUN_ID": "names the job",
}
# Not compared, as nothing shows them but the kernel or a private interface: /proc/self/environ (the
# forkserver's; os.environ and children have the worker's), the command line in `ps` where
# ${local_rank} is used (rank 0's), gc.get_freeze_count, the memory map, ru_maxrss, that torch is in
# sys.modules before the script imports it, and torch._dynamo before the first optimizer is made.
# A warning that `import torch` gives is said once, in scheduler.log, not by every rank.
# __del__ of an object that only a module of torch or of Python holds is not called at exit.

PLAIN = {  # what a process of the test's own cannot have
    "process.parent": "the test started it",
    "process.death signal": "nobody asked for it",
    "environ.PROBE_OUT": "where it writes",
    "environ.TORCHELASTIC_ERROR_FILE": "the cold worker's, as given",
}


def flat(value, path=()):
    """Nested dictionaries as one: {"a.b": value}."""
    if isinstance(value, dict) and value:
        return {k: v for name, item in value.items() for k, v in flat(item, (*path, name)).items()}
    return {".".join(path): value}


def comparable(seen, *also):
    kept = {}
    for path, value in flat(seen).items():
        name = path.replace("environment.environ.", "environ.").replace(
            "environment.a child's.", "environ."
        )
        if name not in INHERENT and name not in also:
            kept[path] = value
    return kept


def different(left, right):
    """The paths at which two looks differ: {path: (left, right)}."""
    return {
        path: (left.get(path), right.get(path))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    }


def masked(text):
    """Output without what differs between any two processes: addresses, thread and process ids."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


@pytest.fixture
def both(msrun, tmp_path):
    """Run one command line warm and cold, side by side; what each rank saw, by mode and rank."""

    def start(mode, *args, **environ):
        out = tmp_path / mode / "out"
        out.mkdir(parents=True)
        logs = tmp_path / mode / "logs"
        return msrun.start(*MODES[mode], *args, log_dir=logs, PROBE_OUT=str(out), **environ)

    def end(mode, job):
        ended = job.wait()
        assert ended.code == 0, ended.err
        assert f"workers start {mode}" in (job.folder / "scheduler.log").read_text()
        reports = sorted((tmp_path / mode / "out").glob("*.json"))
        texts = [path.read_text().replace(str(tmp_path / mode), "FOLDER") for path in reports]
        told = [json.loads(text) for text in texts]
        for each in (
            told if mode == "cold" else ()
        ):  # it waits there for torch's DDP, until it comes
            with contextlib.suppress(ValueError):
                each["interpreter"]["meta_path"].remove("_Finder")
        return [*told, {name: masked(log) for name, log in job.logs().items()}]

    def run(*args, **environ):
        jobs = [(mode, start(mode, *args, **environ)) for mode in MODES]
        return [end(mode, job) for mode, job in jobs]

    return run


def test_everything_a_script_can_see_is_the_same(both, tmp_path):
    shutil.copy(WORKERS / "probe.py", tmp_path)
    args = ("--flag", "${local_rank}", "\u00e4 \udce4")
    warm, cold = both(
        "--preload=torch",
        "--nproc-per-node=2",
        "probe.py",
        *args,
        PROBE_TORCH="1",
        PROBE_CHILDREN="1",
    )
    for rank in (0, 1):
        assert warm[rank]["interpreter"]["argv"] == ["probe.py", "--flag", str(rank), args[2]]
        also = ("process.cmdline",) if rank else ()  # ps shows rank 0's ${local_rank}
        assert not different(comparable(warm[rank], *also), comparable(cold[rank], *also))
    assert warm[2] == cold[2]
    for name in ("python", "numpy", "numpy generator", "torch", "torch seed"):
        assert warm[0]["draws"][name] != warm[1]["draws"][name], name


def test_a_worker_is_what_plain_python_is(both, tmp_path):
    shutil.copy(WORKERS / "probe.py", tmp_path)
    warm, cold = both("--preload=torch", "probe.py", "word", PROBE_TORCH="1")
    assert not different(comparable(warm[0]), comparable(cold[0]))
    (tmp_path / "plain" / "logs").mkdir(parents=True)
    environ = cold[0]["environment"]["environ"] | {"PROBE_OUT": str(tmp_path / "plain")}
    with open(tmp_path / "plain" / "logs" / "worker_0.log", "a") as log:
        subprocess.run(
            [sys.executable, "-u", "probe.py", "word"],
            env=environ,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
    text = (tmp_path / "plain" / "0.json").read_text()
    plain = json.loads(text.replace(str(tmp_path / "plain"), "FOLDER"))
    assert not different(comparable(warm[0], *PLAIN), comparable(plain, *PLAIN))


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


PROBE = (WORKERS / "probe.py").read_text()
RELATIVE = PROBE.replace("import atexit\n", "from .sibling import NAME\nimport atexit\n", 1)


def package(tmp):
    write(tmp / "pack" / "__init__.py", "from . import sibling")
    write(tmp / "pack" / "sibling.py", "NAME = __name__")
    write(tmp / "pack" / "probe.py", RELATIVE)
    write(tmp / "pack" / "__main__.py", RELATIVE)


def archive(tmp):
    with zipfile.ZipFile(tmp / "app.zip", "w") as file:
        file.writestr("__main__.py", PROBE)


def links(tmp):
    write(tmp / "real" / "probe.py", PROBE)
    (tmp / "link.py").symlink_to("real/probe.py")


def customized(tmp):
    """Own modules under our names, own sitecustomize and usercustomize: each runs once."""
    write(tmp / "probe.py", "import agent, worker_hooks, server\n" + PROBE)
    for name in ("agent", "worker_hooks", "server"):
        write(tmp / f"{name}.py")
    for name in ("sitecustomize", "usercustomize"):
        said = f"import os; os.environ['CUSTOM'] = os.environ.get('CUSTOM', '') + ' {name}'"
        write(tmp / "lib" / f"{name}.py", said)


LAYOUTS = {  # name: (what is made in the folder, command line, environment)
    "module": (package, ("-m", "pack.probe", "word"), {}),
    "package": (package, ("-m", "pack", "-x"), {}),
    "folder": (lambda tmp: write(tmp / "app" / "__main__.py", PROBE), ("app",), {}),
    "archive": (archive, ("app.zip", "--", "-c"), {}),
    "link": (links, ("./link.py",), {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "4"}),
    "customized": (customized, ("probe.py",), {"PYTHONPATH": "lib::"}),
    "options": (
        lambda tmp: write(tmp / "probe.py", PROBE),
        ("probe.py",),
        {
            "PYTHONOPTIMIZE": "2",
            "PYTHONDEVMODE": "1",
            "PYTHONWARNINGS": "error::UserWarning,ignore::ImportWarning",
            "PYTHONIOENCODING": "latin-1:replace",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONHASHSEED": "7",
            "PYTHONINTMAXSTRDIGITS": "5000",
            "LC_ALL": "C",
            "PYTHONPATH": "",
        },
    ),
}


@pytest.mark.parametrize(("make", "args", "environ"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_way_to_name_a_program_is_the_same(both, tmp_path, make, args, environ):
    make(tmp_path)
    if "PYTHONPATH" in environ:
        environ = environ | {"PYTHONPATH": f"{environ['PYTHONPATH']}:{ROOT}".strip(":")}
    warm, cold = both("--preload=queue,decimal", *args, **environ)
    known = ("modules.names", "interpreter.importers")  # decimal is there at once
    assert not different(comparable(warm[0], *known), comparable(cold[0], *known))
    assert warm[1] == cold[1]
    assert warm[0]["draws"]["hash"] == cold[0]["draws"]["hash"] or "PYTHONHASHSEED" not in environ


@pytest.mark.parametrize(("table", "preload"), [("codes", "queue"), ("ways", "torch")])
def test_every_way_out_is_the_same(msrun, tmp_path, table, preload):
    """Exit codes 0 to 255, deaths by every signal, tracebacks byte by byte, atexit, C's stdio ..."""
    cases = list(runpy.run_path(str(WORKERS / "probe_exits.py"))["TABLES"][table])
    script = shutil.copy(WORKERS / "probe_exits.py", tmp_path)
    write(tmp_path / "probe_broken.py", "def broken(:\n")
    write(tmp_path / "probe_module.py", "kept = None\n")
    warm, cold = (
        all_leave(msrun, tmp_path / mode, cases, *flags, f"--preload={preload}", script, table)
        for mode, flags in MODES.items()
    )
    assert not different(warm, cold)
    for name, (code, _log) in warm.items():
        kind, _, number = name.partition(" ")
        if len(number) < 4 and number.isdigit():
            assert code == {"exit": int(number) % 256, "signal": -int(number)}[kind], name


def all_leave(msrun, folder, cases, *args):
    """Start a rank for each case, let them all go at once: {case: (exit code, output)}."""
    gate, ready = (folder.with_suffix(suffix) for suffix in (".gate", ".ready"))
    os.mkfifo(gate)
    os.mkfifo(ready)
    job = msrun.start(
        f"--nproc-per-node={len(cases)}",
        "--shutdown-timeout=100",
        *args,
        log_dir=folder,
        stdin=subprocess.PIPE,
        PROBE_GATE=str(gate),
        PROBE_READY=str(ready),
    )
    with open(ready, "r+b", buffering=0) as told:
        for _ in cases:
            told.read(1)
    with open(gate, "w"):
        job.process.stdin.write(b"a line\nand more")
        assert job.wait().code == 1
    logs = {int(name[7:-4]): masked(log) for name, log in job.logs().items()}
    ranks = {worker["rank"]: worker["exit_code"] for worker in job.status()["workers"]}
    return {case: (ranks[rank], logs[rank]) for rank, case in enumerate(cases)}


STARTS = {  # scripts that end as they start, or find a file of their own first
    "syntax": "import torch\ndef broken(:\n",
    "indentation": "import torch\nif 1:\npass\n",
    "encoding": b"import torch\n\xff\xfe\n",
    "null byte": b"import torch\n\0\n",
    "missing module": "import no_such_module\n",
    "no such name": "from os import no_such_name\n",
    "empty": "",
    "own socket": "import socket; print(socket.__file__)",
    "own failing": "import failing",
}


@pytest.mark.parametrize(
    ("source", "preload"),
    [(source, "failing" if "failing" in name else "queue") for name, source in STARTS.items()],
    ids=STARTS,
)
def test_every_start_of_a_script_is_the_same(msrun, tmp_path, source, preload):
    script = write(tmp_path / "app" / "script.py")
    script.write_bytes(source if isinstance(source, bytes) else source.encode())
    if source and "socket" in str(source):
        write(tmp_path / "app" / "socket.py")
    write(
        tmp_path / "app" / "failing.py", "import half\nhalf.times += 1\nraise OSError(half.times)"
    )
    write(tmp_path / "app" / "half.py", "times = 0")
    jobs = {
        mode: msrun.start(*flags, f"--preload={preload}", script, log_dir=tmp_path / mode)
        for mode, flags in MODES.items()
    }
    codes = {mode: job.wait().code for mode, job in jobs.items()}
    assert codes["warm"] == codes["cold"]
    assert jobs["warm"].logs() == jobs["cold"].logs()


@contextlib.contextmanager
def odd_process():
    """What a parent hands down, all of it unusual."""
    limits = {
        name: resource.getrlimit(name) for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
    }
    umask = os.umask(0o027)
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGXCPU)
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 3, signal.SIGIO})
    for name, (_soft, hard) in limits.items():
        resource.setrlimit(name, (1 << 20 if name == resource.RLIMIT_STACK else 700, hard))
    try:
        yield
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, before in ignored.items():
            signal.signal(number, before)
        for name, limit in limits.items():
            resource.setrlimit(name, limit)


def test_what_a_parent_hands_down_is_the_same(both, tmp_path):
    write(tmp_path / "probe.py", PROBE)
    with odd_process():
        warm, cold = both("--preload=queue,decimal", "probe.py")
    status = warm[0]["process"]["status"]
    assert status["Umask"] == "0027"
    assert int(status["SigIgn"], 16) >> (signal.SIGHUP - 1) & 1
    assert int(status["SigBlk"], 16) >> (signal.SIGRTMIN + 2) & 1
    known = ("modules.names", "interpreter.importers")
    assert not different(comparable(warm[0], *known), comparable(cold[0], *known))
