"""Rank N leaves in the Nth of all the ways a process can leave.

All ranks first meet at a gate (a FIFO that the test opens) and are deaf to SIGTERM, so that the
first death ends nobody else. Torch is not imported here: a warm worker has it all the same.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import io
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from importlib import import_module
from pathlib import Path

libc = ctypes.CDLL(None)
CODES = (256, 257, -1, -300, 2**70, None, True, 3.5, "in words", ("a", 1), b"raw", [], "")
DEADLY = sorted(
    signal.valid_signals()
    - {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    - {signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH}
)


def die_by(number):
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(30)


def nested():
    def inner(depth):
        return 1 / 0 if depth == 0 else inner(depth - 1)

    inner(5)


def chained():
    try:
        nested()
    except ZeroDivisionError as error:
        raise KeyError("cause") from error


def in_context():
    try:
        nested()
    except ZeroDivisionError:
        raise KeyError("context")  # noqa: B904


def grouped():
    noted = ValueError("noted")
    noted.add_note("a note\nof two lines")
    raise ExceptionGroup("several", [noted, ExceptionGroup("inner", [TypeError("b")])])


def recursing():
    recursing()


def syntax():
    import probe_broken  # noqa: F401


def compiled():
    exec(compile("a = 1\nraise RuntimeError('from exec')", "<made>", "exec"))


def by_runpy():
    runpy.run_path(os.path.join(os.path.dirname(__file__), "probe_broken.py"))


class LeaveError(SystemExit):
    pass


def leave_class():
    raise LeaveError(9)


def interrupted():
    raise KeyboardInterrupt


def interrupted_from_outside():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)


def in_thread(run, *, daemon=False):
    def start():
        thread = threading.Thread(target=run, daemon=daemon, name="other")
        thread.start()
        if not daemon:
            thread.join()
            print("main goes on")

    return start


def outliving_thread():
    def late():
        threading.main_thread().join()
        print("after main")

    threading.Thread(target=late).start()


def atexit_order():
    for word in ("first", "second", "third"):
        atexit.register(print, word)


def atexit_raises():
    atexit.register(print, "still runs")
    atexit.register(nested)
    sys.exit(4)


def atexit_exits():
    atexit.register(sys.exit, 11)


def atexit_imports():
    def late():
        import queue

        print(queue.__name__)

    atexit.register(late)


def atexit_run_early():
    atexit.register(print, "early")
    atexit._run_exitfuncs()
    import queue

    print(queue.__name__, sys.modules["queue"] is queue)


def unflushed_file():
    global kept  # noqa: PLW0603
    kept = os.fdopen(os.dup(1), "w")
    kept.write("written to a file that nobody closed")


def unflushed_stdout():
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False))  # noqa: SIM115
    print("written to a buffered stdout")


class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("deleted", self.name, sys.is_finalizing())


def deleted_global():
    global kept  # noqa: PLW0603
    kept = Last("global")
    kept.cycle = kept


def deleted_elsewhere():
    import probe_module

    probe_module.kept = Last("of a module")


def finalized():
    global kept  # noqa: PLW0603
    kept = Last("finalizer's")
    weakref.finalize(kept, print, "finalizer")


def raising_del():
    class Raising:
        def __del__(self):
            raise ValueError("in __del__")

    Raising()


def c_stdio():
    print("python", end=" ")
    libc.printf(b"from C without a newline")


def c_stdio_lost():
    libc.printf(b"never flushed")
    os._exit(3)


def c_exit_function():
    libc.atexit(libc.abort)  # registered later than any of ours: runs first, with C's stdio open


def c_exit():
    libc.printf(b"by exit(3)")
    libc.exit(21)


def closed_stdout():
    sys.stdout.close()


def closed_descriptors():
    os.close(1)
    os.close(2)
    sys.exit("unsaid")


def full_stdout():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False))  # noqa: SIM115
    print("cannot be flushed: exit code 120")


def forked():
    pid = os.fork()
    if pid == 0:
        atexit.register(print, "child's")
        sys.exit(33)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.exit(34)


def executed():
    os.execv("/bin/sh", ["sh", "-c", "trap - PIPE; kill -PIPE $$"])


def started():
    print(subprocess.run(["sh", "-c", "exit 5"], check=False).returncode)


def faulting():
    import_module("torch")  # the report names extension modules
    faulthandler.enable()
    faulthandler._sigsegv()


def dumping():
    def deeper():
        faulthandler.dump_traceback(all_threads=True)

    deeper()


def dumping_on_signal():
    faulthandler.register(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)


def handled_in_python():
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(number + frame.f_lineno % 2))
    os.kill(os.getpid(), signal.SIGUSR1)


def warned():
    warnings.warn("a warning", stacklevel=1)
    warnings.warn("unseen", DeprecationWarning, stacklevel=2)


def told_on_stdin():
    print(sys.stdin.readline(), repr(sys.stdin.read()))


CODE_CASES = {f"exit {code}": lambda code=code: sys.exit(code) for code in range(256)}
CASES = {
    **{f"exit {code!r}": lambda code=code: sys.exit(code) for code in CODES},
    **{f"signal {int(number)}": lambda number=number: die_by(number) for number in DEADLY},
    **{
        run.__name__: run
        for run in (
            nested, chained, in_context, grouped, recursing, syntax, compiled, by_runpy, leave_class,
            interrupted, interrupted_from_outside, outliving_thread, atexit_order, atexit_raises,
            atexit_exits, atexit_imports, atexit_run_early, unflushed_file, unflushed_stdout, deleted_global,
            deleted_elsewhere, finalized, raising_del, c_stdio, c_stdio_lost, c_exit_function, c_exit,
            closed_stdout, closed_descriptors, full_stdout, forked, executed, started, faulting,
            dumping, dumping_on_signal, handled_in_python, warned, told_on_stdin, os.abort,
        )
    },
    "_exit": lambda: os._exit(77),
    "thread raises": in_thread(nested),
    "thread exits": in_thread(lambda: sys.exit(5)),
    "thread interrupts": in_thread(interrupted),
    "daemon sleeps": in_thread(lambda: time.sleep(60), daemon=True),
}  # fmt: skip
TABLES = {"codes": CODE_CASES, "ways": CASES}


def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path(os.environ["PROBE_READY"]).write_text("!")
    Path(os.environ["PROBE_GATE"]).open().close()
    list(TABLES[sys.argv[1]].values())[int(os.environ["RANK"])]()


if __name__ == "__main__":
    main()
