"""Which signals mean what to msrun."""

from __future__ import annotations

import signal

from agent.spec.job_spec import JobSpec

FOR_WORKERS = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # unless the user lists them as stops


def stops(spec: JobSpec) -> frozenset[signal.Signals]:
    """Signals that ask for a stop; SIGHUP only where it is not ignored: nohup's wish."""
    listed = {signal.Signals[name] for name in spec.signals}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        listed.discard(signal.SIGHUP)
    return frozenset(listed - graceful(spec))


def graceful(spec: JobSpec) -> frozenset[int]:
    """Signals that ask for a graceful exit and never reach a worker."""
    return frozenset(spec.graceful_signals)


def passed_on(spec: JobSpec) -> frozenset[signal.Signals]:
    """Signals that go to the workers and mean nothing else."""
    return FOR_WORKERS - stops(spec) - graceful(spec)


def all_of(spec: JobSpec) -> frozenset[int]:
    """Every signal that msrun takes."""
    return stops(spec) | graceful(spec) | passed_on(spec)


def take_from_shell(spec: JobSpec) -> None:
    """Give what msrun will handle its default meaning: workers inherit what is ignored.

    A shell starts a job in the background with SIGINT ignored.
    """
    for signum in stops(spec) | graceful(spec):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)


def hold(spec: JobSpec) -> None:
    """Let signals wait until the supervisor listens, instead of ending msrun without grace."""
    signal.pthread_sigmask(signal.SIG_BLOCK, all_of(spec))


def release(spec: JobSpec) -> None:
    """The supervisor listens."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, all_of(spec))
