"""The entry point: a subcommand, or a job to launch. Wrong usage ends here with exit code 2."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agent.spec.job_spec import JobSpec, LeftEarlyError, StoppedEarlyError, UsageError
from msrun.options.program import SUBCOMMANDS

if TYPE_CHECKING:
    from pathlib import Path

    from agent.launch.meeting import Continuation, Met
    from agent.launch.prepare import Prepared, StartedForkserver
    from msrun.job.request import Request

STDERR = 2
INTERRUPTED = 130  # the exit code after Ctrl-C
LAST_MESSAGES_S = 10.0  # for a stderr that takes nothing: scheduler.log has the messages, too


def main(argv: Sequence[str]) -> int:
    """Run msrun with these arguments; the exit code."""
    _open_standard_streams()
    _hear_of_children()
    try:
        if argv and argv[0] in SUBCOMMANDS:
            from msrun.commands import run

            return run(argv)
        return _launch(argv)
    except UsageError as error:
        is_wrong = error.exit_code and not isinstance(error, StoppedEarlyError)
        _say(f"error: {error}" if is_wrong else str(error))
        return error.exit_code
    except BrokenPipeError:  # `msrun --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Open closed standard streams: else the first log file becomes descriptor 1."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def _hear_of_children() -> None:
    """Undo what a shell's ``trap '' CHLD`` passes on: the kernel would hide how children end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _say(text: str) -> None:
    """Print one sentence on stderr, before anything runs."""
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(STDERR, f"msrun: {text}\n".encode(errors="backslashreplace"))


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working folder does not exist ({error.strerror}): change to one that does"
        ) from error


def _prepared(job: JobSpec) -> tuple[Prepared, Met | None]:
    """The run, and the other nodes if there are any."""
    from agent.launch.prepare import prepare

    if job.cluster is None:
        return prepare(job, os.environ), None
    from agent.launch.meeting import LostControllerError, meet
    from msrun import __version__

    if job.cluster.tls_config is not None and _may_ask():
        _ask_for_passwords(job, job.cluster.tls_config)
    if job.cluster.is_spare:
        import msrun.terminal.console  # noqa: F401
        from agent.supervisor.run import import_as_spare

        import_as_spare()
    try:
        met = meet(job, os.environ, __version__, _say)
    except LostControllerError as error:
        from agent.launch.succession import meet_again

        met = meet_again(error.lost, os.environ, __version__, _say)
    return met.prepared, met


def _may_ask() -> bool:
    """Whether a person may answer: the kernel stops who asks from the background."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, or another session's
        return False


def _ask_for_passwords(job: JobSpec, config: Path) -> None:
    """Ask for what this node's certificates lack; ranks do not get it.

    A guest needs the server's as well: it may take the part of node 0.
    """
    from agent.launch.certificates import lacking_password

    for is_server in (False, True) if _is_guest(job) else (True,):
        lacking = lacking_password(config, os.environ, is_server=is_server)
        if lacking is not None:
            from msrun.terminal.password import asked

            os.environ[lacking[0]] = asked(*lacking)


def _is_guest(job: JobSpec) -> bool:
    """Whether another node decides what the job resumes from."""
    if job.cluster is None:
        return False
    from agent.launch.meeting import is_guest

    return is_guest(job, job.cluster)


def _launch(argv: Sequence[str]) -> int:
    from msrun.job.request import parse

    _check_folder()
    request = parse(argv, os.environ)
    engine = request.engine
    if engine is None or not engine.team or request.dry_run:
        return _run(request)
    from agent.launch.team import Leader, follow

    if engine.is_follower:
        return follow(engine.team, request.job.timeouts.start_s)
    leader, code = Leader(engine.team, engine.followers), 1
    try:
        code = _run(request)
    except UsageError as error:
        code = error.exit_code
        raise
    finally:
        leader.dismiss(code)
    return code


def _with_origin(request: Request) -> Request:
    """With the checkpoint that the job resumes from, if it resumes, and no other node finds it."""
    cluster = request.job.cluster
    if request.origin is None:
        return request
    if cluster is not None and _is_guest(request.job):
        cluster = cluster._replace(resumes=True)
        return request._replace(job=request.job._replace(cluster=cluster))
    from msrun.job.resume_point import resume_origin

    is_guess = cluster is not None and cluster.world is None
    world_size = None if is_guess else request.job.world_size
    dump = resume_origin(request.job.dump, request.origin, world_size, _say)
    if cluster is not None:  # unless it is this very checkpoint that is wanted
        is_named = dump.resume is not None and dump.resume.resolve() in request.origin.folders
        request = request._replace(
            job=request.job._replace(cluster=cluster._replace(seeks_newer=not is_named))
        )
    return request._replace(job=request.job._replace(dump=dump))


def _requeue(request: Request) -> None:
    """Have Slurm start a job again that it has stopped, if Slurm started it."""
    engine = request.engine
    if engine is not None and engine.slurm_job:
        from agent.machine.slurm_queue import requeue_preempted
        from msrun.terminal.console import CONSOLE

        requeue_preempted(engine.slurm_job, CONSOLE.say)


def _forget_token(job: JobSpec) -> None:
    """The job is over: delete the token that its nodes have made, if this one has controlled it."""
    if job.cluster is not None and job.cluster.own_token and not job.is_controlled:
        from agent.launch.job_token import JobToken

        with contextlib.suppress(UsageError):  # a file with a given one is gone
            JobToken(job.cluster, os.environ).forget()


def _next(
    lost: Continuation, say: Callable[[str], None]
) -> tuple[Prepared, StartedForkserver, Met]:
    """The job that follows one whose node 0 is lost."""
    from agent.launch.prepare import abandon, start_forkserver
    from agent.launch.succession import meet_again
    from msrun import __version__

    try:
        met = meet_again(lost, os.environ, __version__, say)
    except BaseException:
        if lost.early is not None:
            lost.early.call_off()
        raise
    if lost.past is not None:
        with contextlib.suppress(OSError):  # then it seems to be alive
            lost.past.end()
    try:
        started = start_forkserver(met.prepared, os.environ, met.interface, met.early)
    except UsageError:
        abandon(met.prepared)
        raise
    return met.prepared, started, met


def _run(request: Request) -> int:
    from agent.launch import recover_arg
    from agent.spec.timeouts import describe

    for warning in request.warnings:
        _say(f"warning: {warning}")
    os.environ.update(request.environ)
    if request.resumed is not None and not request.dry_run:
        from msrun.job.saving_ranks import await_ranks

        await_ranks(request.resumed, _say)
    if request.job.cluster is not None and not request.dry_run:
        from agent.launch.meeting import await_name

        await_name(request.job, _say)
    request = _with_origin(request)
    request = request._replace(job=recover_arg.decided(request.job))
    if request.verbose:
        _say(describe(request.job))
    if request.dry_run:
        from msrun.job.dry_run import show

        return show(request, os.environ)
    from agent.launch.prepare import abandon, start_forkserver

    prepared, met = _prepared(request.job)
    if not request.join:
        from msrun.job.detach import detach

        if not detach(prepared):
            return 0
    try:
        interface, early = ("", None) if met is None else (met.interface, met.early)
        started = start_forkserver(prepared, os.environ, interface, early)
    except UsageError:
        if request.join:  # else the message is only in the log
            abandon(prepared)
        _forget_token(prepared.spec)
        raise
    return _run_to_its_end(request, prepared, started, met)


def _run_to_its_end(
    request: Request, prepared: Prepared, started: StartedForkserver, met: Met | None
) -> int:
    """Run the job, and the one that follows if its node 0 is lost; the exit code."""
    from agent.supervisor.run import run  # while the forkserver starts
    from msrun.terminal.console import CONSOLE, MESSAGES

    record_id, has_left = request.job.record_id, False
    try:
        result = run(prepared, started, os.environ, CONSOLE, met)
        while result.next is not None:
            prepared, started, met = _next(result.next, CONSOLE.say)
            record_id = prepared.spec.record_id
            result = run(prepared, started, os.environ, CONSOLE, met)
        has_left = result.has_left
        if result.is_stopped and result.exit_code != INTERRUPTED:  # not by a person
            _requeue(request)
        if request.report is not None:
            from msrun.report.report import report_at_end

            report_at_end(os.environ, record_id, request.report, CONSOLE)
    except LeftEarlyError:
        has_left = True
        raise
    else:
        return result.exit_code
    finally:
        if not has_left:  # else others go on with it
            _forget_token(prepared.spec)
        MESSAGES.close(LAST_MESSAGES_S)
