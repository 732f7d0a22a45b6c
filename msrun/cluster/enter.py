"""Runs a program inside the namespaces of a process, in a session of its own, and ends as it ends.

Words: the process, the program's folder, a descriptor, the program. To the descriptor goes the
program's pid as seen from here. Unlike nsenter it does not stop when the program is stopped.
"""

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

NEW_USER = 0x10000000
# user, mount, host name, network, pid: all at once or none
NAMESPACES = NEW_USER | 0x20000 | 0x4000000 | 0x40000000 | 0x20000000


def main(target: str, folder: str, told: str, *program: str) -> int:
    """Run the program; its exit code, negative for a signal.

    Raises:
        OSError: the process has ended, or the kernel refuses.
    """
    enter(int(target))
    os.set_inheritable(int(told), False)
    pid = os.fork()
    if pid == 0:
        become(folder, program)
    os.write(int(told), str(pid).encode())
    os.close(int(told))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def enter(target: int) -> None:
    """Enter the namespaces of a process; that of pids counts for children from now on.

    Raises:
        OSError: the process has ended, or the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    places = NAMESPACES
    if os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{target}/ns/user"):
        places &= ~NEW_USER  # a process may not enter its own once more
    pidfd = os.pidfd_open(target)
    try:
        if libc.setns(pidfd, places):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"process {target}")
    finally:
        os.close(pidfd)


def become(folder: str, program: tuple[str, ...]) -> None:
    """Turn this forked process into the program."""
    try:
        os.setsid()
        os.chdir(folder)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def end_alike(code: int) -> NoReturn:
    """End as the program did: by its exit code, or by the signal that it died of."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left one, if any
        if -code not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    end_alike(main(*sys.argv[1:]))
