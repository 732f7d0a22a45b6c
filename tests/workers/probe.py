"""Writes all that a script can see of its process, as JSON, to the folder named by PROBE_OUT.

Runs as a script, as ``-m`` module, as a folder's or an archive's ``__main__.py``. With PROBE_TORCH
it imports torch, unseen by msrun's parser, and looks at what torch brings and changes, too. With
PROBE_CHILDREN it starts processes in all of multiprocessing's ways.
"""

import atexit
import builtins
import ctypes
import faulthandler
import fcntl
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path

AT_START = sorted(vars())
FILTERS_AT_START = len(warnings.filters)
OUT = Path(os.environ["PROBE_OUT"])
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
STATUS = ("Umask", "Uid", "Gid", "Groups", "NSpgid", "NSsid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed", "CoreDumping", "THP_enabled")  # fmt: skip


def main_module():
    module = sys.modules["__main__"]
    spec = module.__spec__
    return {
        "is_this": vars(module) is globals(),
        "vars at start": AT_START,
        "name": __name__,
        "file": globals().get("__file__"),
        "package": __package__,
        "doc": __doc__,
        "loader": type(module.__loader__).__name__,
        "cached": globals().get("__cached__"),
        "annotations": globals().get("__annotations__"),
        "builtins": __builtins__ is builtins,
        "spec": spec and [spec.name, spec.origin, spec.parent, str(type(spec.loader))],
        "repr": repr(module),
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "meta_path": [
            getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path
        ],
        "path_hooks": len(sys.path_hooks),
        "importers": sorted(sys.path_importer_cache),
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.base_prefix, sys.exec_prefix],
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "hooks": [
            repr(hook).split(" at ")[0]
            for hook in (
                sys.excepthook,
                sys.displayhook,
                sys.unraisablehook,
                threading.excepthook,
                sys.breakpointhook,
            )
        ],
        "trace": [sys.gettrace(), sys.getprofile()],
        "site": [site.ENABLE_USER_SITE, site.USER_SITE],
        "frames": len(traceback.extract_stack()),
        "first filters": FILTERS_AT_START,
        "no bytecode": sys.dont_write_bytecode,
        "locale": [
            locale.setlocale(locale.LC_ALL),
            locale.getpreferredencoding(),
            sys.getfilesystemencoding(),
        ],
        "asyncgen": [str(hook) for hook in sys.get_asyncgen_hooks()],
    }


def streams():
    def look(stream):
        return {
            "name": stream.name,
            "mode": stream.mode,
            "encoding": stream.encoding,
            "errors": stream.errors,
            "newlines": stream.newlines,
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
            "isatty": stream.isatty(),
            "seekable": stream.seekable(),
            "buffer": repr(stream.buffer),
            "raw": repr(getattr(stream.buffer, "raw", None)),
            "same": stream is getattr(sys, f"__{stream.name.strip('<>')}__"),
            "inheritable": os.get_inheritable(stream.fileno()),
            "flags": fcntl.fcntl(stream.fileno(), fcntl.F_GETFL),
        }

    return {
        "streams": [look(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "one open file": os.path.sameopenfile(1, 2),
    }


def process():
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    pid = os.getpid()
    return {
        "status": {name: status.get(name, "").replace(str(pid), "PID") for name in STATUS},
        "comm": Path("/proc/self/comm").read_text(),
        "cmdline": os.fsdecode(Path("/proc/self/cmdline").read_bytes()),
        "exe": os.readlink("/proc/self/exe"),
        "terminal": stat[4:6],
        "policy": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "parent": b"msrun" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes(),
        "leads": [os.getsid(0) == pid, os.getpgid(0) == pid],
        "cwd": os.getcwd(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "fds": sorted([int(fd), target(fd)] for fd in os.listdir("/proc/self/fd") if target(fd)),
        "dispositions": {
            number: str(signal.getsignal(number)).split(" at ")[0]
            for number in signal.valid_signals()
        },
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup fd": signal.set_wakeup_fd(-1),
        "timers": [
            signal.getitimer(timer)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "children": Path(f"/proc/self/task/{pid}/children").read_text(),
        "threads": sorted(
            Path(path, "comm").read_text() for path in Path("/proc/self/task").iterdir()
        ),
        "death signal": death_signal(),
        "subreaper": prctl_get(37),
        "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
        "time slack": Path("/proc/self/timerslack_ns").read_text()
        if os.path.exists("/proc/self/timerslack_ns")
        else "",
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "cpu below 1 s before torch": sum(os.times()[:2]) < 1 or "torch" in sys.modules,
    }


def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # the listing's own


def prctl_get(option):
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def death_signal():
    return prctl_get(2)


def threads():
    main = threading.main_thread()
    return {
        "names": [thread.name for thread in threading.enumerate()],
        "is main": main is threading.current_thread(),
        "ident": main.ident == threading.get_ident(),
        "native": main.native_id == threading.get_native_id(),
        "pid": threading.get_native_id() == os.getpid(),
        "process": [
            multiprocessing.current_process().name,
            multiprocessing.parent_process(),
            len(multiprocessing.current_process().authkey),
            multiprocessing.active_children(),
        ],
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


def environment():
    listed = subprocess.run(["env", "-0"], capture_output=True, check=True).stdout
    listed = os.fsdecode(listed).split("\0")
    return {
        "environ": dict(os.environ),
        "a child's": dict(pair.split("=", 1) for pair in listed if pair),
    }


def runtime():
    return {
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks, gc.garbage],
        "faulthandler": faulthandler.is_enabled(),
        "warnings": [str(item) for item in warnings.filters],
        "loggers": [
            logging.root.level,
            logging.root.handlers,
            logging.lastResort.level,
            sorted(logging.root.manager.loggerDict),
        ],
        "atexit": atexit._ncallbacks(),
        "socket timeout": socket.getdefaulttimeout(),
        "int digits": sys.get_int_max_str_digits(),
        "tempdir": tempfile.gettempdir(),
        "default buffer": io.DEFAULT_BUFFER_SIZE,
    }


def modules():
    return {
        "names": sorted(sys.modules),
        "odd": sorted(name for name, module in sys.modules.items() if module is None),
        "ours": sorted(
            name
            for name in sys.modules
            if name.split(".")[0]
            in {"agent", "worker_hooks", "msrun", "sitecustomize", "usercustomize"}
        ),
        "custom": os.environ.get("CUSTOM"),  # left by a sitecustomize of the test's
        "files": [
            getattr(sys.modules.get(name), "__file__", None)
            for name in ("json", "agent", "worker_hooks", "server")
        ],
    }


def draws():
    """Random numbers: what is new in every process, and what is not."""
    found = {"python": random.random(), "hash": hash("a string")}
    if "torch" in sys.modules:
        numpy, torch = import_module("numpy"), import_module("torch")
        kind, keys, position, *gauss = numpy.random.get_state()
        found |= {
            "numpy state": [kind, len(keys), int(position), gauss],
            "numpy": numpy.random.random(),
            "numpy generator": numpy.random.default_rng().random(),
            "torch": torch.rand(2).tolist(),
            "torch seed": torch.initial_seed(),
        }
    return found


def torch_state():
    numpy, torch = import_module("numpy"), import_module("torch")
    (torch.ones(400, 400) @ torch.ones(400, 400)).sum()
    numpy.ones((400, 400)) @ numpy.ones((400, 400))
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "process threads": len(os.listdir("/proc/self/task")),
        "info": torch.__config__.parallel_info(),
        "default": [
            str(torch.get_default_dtype()),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "cuda": [torch.cuda.is_available(), torch.cuda.is_initialized()],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
    }


def pid_or_name(value):
    return value * 2, __name__, sys.argv, Path(sys.modules["__main__"].__file__).name


def parallel():
    """Functions of ``__main__`` in children of each start method."""
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            found[method] = pool.map(pid_or_name, [1, "a"])
    return found


class Rows:
    """A data set of ``__main__``."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        torch = import_module("torch")
        return torch.tensor([index, torch.utils.data.get_worker_info().id, torch.get_num_threads()])


def loaders():
    DataLoader = import_module("torch.utils.data").DataLoader  # noqa: N806
    found = {}
    for method in ("fork", "spawn"):
        loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context=method)
        found[method] = [batch.tolist() for batch in loader]
    return found


def group():
    """A process group that nobody destroys."""
    torch = import_module("torch")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="env://")
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    return total.tolist()


def main():
    looks = [main_module, interpreter, streams, process, threads, environment, modules, draws]
    if os.environ.get("PROBE_TORCH"):
        import_module("torch")
        looks += [torch_state, runtime]
    if os.environ.get("PROBE_CHILDREN") == os.environ["RANK"]:
        looks += [parallel, loaders, group]
    seen = {look.__name__: look() for look in looks}
    (OUT / f"{os.environ['RANK']}.json").write_text(json.dumps(seen, default=str))


if __name__ == "__main__":
    main()
