"""What each signal means to msrun."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from agent.spec.job_spec import JobSpec

FOR_WORKERS = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # unless the user lists them as stops

OF_KEYS = frozenset({signal.SIGINT, signal.SIGQUIT})  # of a keyboard: a person means the job

_IGNORES_SIGHUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup


def stops(spec: JobSpec) -> frozenset[signal.Signals]:
    """Signals that request a stop; not SIGHUP where it is ignored, as under nohup."""
    listed = {signal.Signals[name] for name in spec.signals}
    if _IGNORES_SIGHUP:
        listed.discard(signal.SIGHUP)
    return frozenset(listed - graceful(spec))


def graceful(spec: JobSpec) -> frozenset[int]:
    """Signals that request a graceful exit; they never reach a worker."""
    return frozenset(spec.graceful_signals)


def passed_on(spec: JobSpec) -> frozenset[signal.Signals]:
    """Signals that are forwarded to the workers and have no other meaning."""
    return FOR_WORKERS - stops(spec) - graceful(spec)


def all_of(spec: JobSpec) -> frozenset[int]:
    """Every signal that msrun handles."""
    return stops(spec) | graceful(spec) | passed_on(spec)


def take_from_shell(spec: JobSpec) -> None:
    """Reset the signals that msrun will handle: workers would inherit that they are ignored.

    A shell starts a background job with SIGINT ignored.
    """
    for signum in stops(spec) | graceful(spec):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)


_LATE: list[int] = []  # signals that came after a job's end, or before the next one has begun


def note_late(spec: JobSpec) -> None:
    """A job is over: a signal must not cut off its report, but counts if another job follows."""
    for signum in all_of(spec):
        if not _is_ignored(signum):
            signal.signal(signum, lambda number, _: _LATE.append(number))


def is_asked_late() -> bool:
    """Whether a signal has come since a job was over."""
    return bool(_LATE)


def for_node(spec: JobSpec) -> frozenset[int]:
    """Signals that may be meant for one node: those of a batch system, none of a keyboard."""
    return ((stops(spec) & {signal.SIGTERM}) | graceful(spec)) - OF_KEYS


def take_back(spec: JobSpec, leaves: Callable[[int], Exception] | None = None) -> None:
    """Between two jobs of one msrun each signal means what it does to any program.

    Args:
        spec: the job.
        leaves: makes what the first one that may be meant for this node raises. ``None``: none
            means that it leaves the job.

    Raises:
        KeyboardInterrupt: Ctrl-C came before this.
    """
    for signum in all_of(spec) | {signal.SIGHUP}:
        signal.signal(signum, signal.SIG_IGN if _is_ignored(signum) else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_signal(signum: int, _: object) -> None:
        assert leaves is not None
        for each in for_node(spec):
            signal.signal(each, signal.SIG_DFL)
        raise leaves(signum)

    for signum in for_node(spec) if leaves is not None else ():
        signal.signal(signum, on_signal)
    late = [signum for signum in _LATE if signum not in passed_on(spec)]
    _LATE.clear()
    for signum in late[:1]:
        signal.raise_signal(signum)


def defer(spec: JobSpec) -> None:
    """Others begin with this node: it cannot leave before its run listens; a second signal kills.

    That is if a signal may be meant for this node; else none means anything else than before.
    """

    def on_signal(signum: int, _: object) -> None:
        _LATE.append(signum)
        for each in for_node(spec):
            signal.signal(each, signal.SIG_DFL)

    may_leave = spec.cluster is not None and spec.cluster.leaves
    for signum in for_node(spec) if may_leave else ():
        signal.signal(signum, on_signal)


def taken_late() -> list[int]:
    """The signals that have come since; they count once."""
    late = [*_LATE]
    _LATE.clear()
    return late


def _is_ignored(signum: int) -> bool:
    return signum == signal.SIGHUP and _IGNORES_SIGHUP


@contextlib.contextmanager
def raised(spec: JobSpec, asked: Callable[[int], Exception]) -> Iterator[None]:
    """Raise what ``asked`` makes of the first signal that requests a stop; the next one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in stops(spec) | graceful(spec)}

    def calm() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def on_signal(signum: int, _: object) -> None:
        calm()
        raise asked(signum)

    for signum in before:
        signal.signal(signum, on_signal)
    try:
        yield
    finally:
        calm()


def hold(spec: JobSpec) -> None:
    """Block signals until the supervisor listens; until then they would end msrun at once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, all_of(spec))


def release(spec: JobSpec) -> None:
    """Unblock them: the supervisor listens."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, all_of(spec))
