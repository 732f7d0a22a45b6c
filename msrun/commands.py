"""The subcommands: ``status``, ``top``, ``stop``, ``logs``, ``report`` and the others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from agent.records import run_record
from agent.spec.job_spec import UsageError
from msrun.checkpoints.commands import checkpoints, completed
from msrun.drill.command import drill
from msrun.terminal.stdout import ReaderLeftError, put

INTERRUPTED_EXIT = 130
USAGE_EXIT = 2  # as :mod:`msrun.cli` ends wrong usage

PROTECT = """\
Protect a training: register what it trains, and let TrainState count epochs and batches.

    from msrun import TrainState, run

    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler,
                       ckpt_save_path="checkpoints")     # where a failure saves the step

    def train(state):
        ddp = DistributedDataParallel(model)       # in here: a survivor wraps it again
        for epoch in state.epochs(10):             # was: for epoch in range(10)
            for x, y in state.batches(loader):     # was: for x, y in loader
                loss = loss_function(ddp(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    run(train, state)                              # was: train()

A loop without a loader begins at state.step, and asks once a step whether to exit:

        while state.step < 5000 and not state.should_exit:

Hugging Face's Trainer, Lightning and Accelerate have adapters (worker_hooks.adapters).
On CPUs a script can stay as it is: msrun --protect=auto train.py copies its processes.

Then a rank that dies is replaced while the others keep running, and no step is lost; msrun says so
as training begins ("protected: ..."). Against the death of all ranks, or of the machine, add
callbacks=[ModelCheckpoint(...)]. This proves it by kills:

    msrun drill --random 5 -- --worker-num=2 train.py
"""

RUN = click.argument("run", required=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Look at runs, stop them, test jobs and look after checkpoints."""


commands.add_command(checkpoints)
commands.add_command(drill)


@commands.command()
@RUN
@click.option("--all", "every", is_flag=True, help="List all recorded runs, newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str | None, *, every: bool, as_json: bool) -> None:
    """Show a run's state and its ranks.

    RUN is a run's id or its beginning; without it the newest run of this folder, a living one
    first.
    """
    from msrun.runs import status as show_status
    from msrun.runs.choice import chosen
    from msrun.runs.run_state import look
    from msrun.terminal import table

    if every:
        if run is not None:
            raise UsageError("msrun status: --all lists every run: remove RUN")
        newest_first = sorted(run_record.records(os.environ), key=lambda one: -one.started)
        found = [look(record) for record in newest_first]
        if as_json:
            table.show_json([show_status.as_json(one) for one in found])
        else:
            show_status.show_runs(found)
        return
    one = look(chosen(os.environ, run, "msrun status"))
    if as_json:
        table.show_json(show_status.as_json(one))
    else:
        show_status.show_run(one, time.time())


@commands.command()
@RUN
@click.option("--once", is_flag=True, help="Print one frame and exit, as into a pipe.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one frame to the next.",
)
def top(run: str | None, *, once: bool, interval: float) -> None:
    """Watch a running job: each rank's phase, step, speed, memory and load.

    It costs the job nothing: all of it is read from shared memory and files. Keys: q quits, j and k
    or the arrows select a rank, l or Enter shows the end of its log, Esc returns.

    RUN is a run's id or its beginning; without it the newest run of this folder, a living one
    first.
    """
    from msrun.top.watch import top as watch

    watch(os.environ, run, interval, once=once)


@commands.command()
@RUN
@click.option("--now", is_flag=True, help="Kill the workers at once, without their grace.")
@click.option(
    "--graceful",
    is_flag=True,
    help="Give all ranks longer to reach the end of one step (--grace 600).",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time until that step is saved; then msrun saves what is complete (default: the run's "
    "--grace, or 30).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long to wait for the end (default: as long as the run's timeouts allow).",
)
def stop(
    run: str | None, *, now: bool, graceful: bool, grace: float | None, timeout: float | None
) -> int:
    """Stop a run and wait for its end.

    If every rank has hooks, all of them finish one step, save it, and exit.

    RUN is a run's id or its beginning; without it the only run of this folder that is alive.
    """
    from agent.records.stop_note import StopNote
    from msrun.runs.stop import stop as stop_run

    if now and (graceful or grace is not None):
        raise UsageError("msrun stop: --now contradicts --graceful and --grace")
    return stop_run(
        os.environ, run, timeout, StopNote(is_graceful=graceful, grace_s=grace, is_now=now)
    )


@commands.command()
@RUN
@click.option("-f", "--follow", is_flag=True, help="Continue until the run has ended.")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Only this rank, without prefixes, on whichever node it runs.",
)
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt, not the current one.")
@click.option("--scheduler", is_flag=True, help="msrun's own log: its decisions and their reasons.")
@click.option(
    "--node",
    type=click.IntRange(min=0),
    help="With --scheduler: that of the msrun with this node rank.",
)
def logs(
    run: str | None,
    *,
    follow: bool,
    rank: int | None,
    attempt: int | None,
    scheduler: bool,
    node: int | None,
) -> None:
    """Show the output of a run's workers.

    RUN is a run's id or its beginning; without it the newest run of this folder, a living one
    first.
    """
    from msrun.runs import logs as show_logs
    from msrun.runs.choice import chosen
    from msrun.runs.log_files import Wanted
    from msrun.runs.run_state import look

    if scheduler and (rank is not None or attempt is not None):
        raise UsageError(
            "msrun logs: --scheduler shows one log for all ranks and attempts: remove --rank and "
            "--attempt"
        )
    if node is not None and not scheduler:
        raise UsageError("msrun logs: --node says whose --scheduler log is meant: add that, too")
    show = show_logs.follow if follow else show_logs.show
    found = look(chosen(os.environ, run, "msrun logs"))
    if found.status is not None and found.status.is_gathering:
        why = found.status.reason or "its nodes gather"
        raise UsageError(f"run {found.record.record_id} has no logs, as it has not begun: {why}")
    show(
        os.environ,
        found,
        Wanted(rank=rank, attempt=attempt, scheduler=scheduler, node=node),
    )


@commands.command()
@RUN
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to write (default: msrun-report-ID.html in this folder).",
)
def report(run: str | None, output: Path | None) -> None:
    """Write a report of a run: one HTML file that needs no other, also of a run that has ended.

    It shows what each rank did when, the time of steps, each incident with its logs, and what the
    run's incidents would have cost under torchrun. The command line in it lacks values of options
    that look secret; the ends of logs are as the script printed them.

    RUN is a run's id or its beginning; without it the newest run of this folder, a living one
    first.
    """
    from msrun.report.report import default_path, write_report
    from msrun.runs.choice import chosen

    record = chosen(os.environ, run, "msrun report")
    path = output or default_path(record.record_id)
    try:
        write_report(os.environ, record, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror})") from error
    put(f"{path}\n")


@commands.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(folder: Path, *, as_json: bool) -> int:
    """Look whether this machine is fit for a job: what was found, and what to do.

    Python, torch, devices, memory, limits, ports, clock, and FOLDER (default: this one) as a place
    for checkpoints, in which up to 256 MB are written and removed again. Nothing that hangs takes
    longer than its deadline.

    Exit code 1: something will make a job fail.
    """
    from msrun.doctor import command
    from msrun.terminal import table

    found = command.examine(folder, os.environ)
    if not as_json:
        return command.show(found, os.environ)
    content = command.as_json(found)
    table.show_json(content)
    return command.exit_code(content["worst"] == "fail")


@commands.command()
@RUN
@click.option("--no-logs", is_flag=True, help="Leave out what ranks printed, and what quotes it.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The archive to write (default: msrun-bugreport-RUN-TIME.tar.gz in this folder).",
)
def bugreport(run: str | None, *, no_logs: bool, output: Path | None) -> int:
    """Put what others need to understand a fault into one archive.

    It holds the run's record and events, the end of each log, versions, and what `msrun doctor`
    says of the run's checkpoint folder. Values that look like secrets are masked; what the script
    printed is included as it is.

    RUN is a run's id or its beginning; without it the newest run of this folder, a living one
    first.
    """
    from msrun.bugreport.command import ReportOrder, report
    from msrun.doctor import command
    from msrun.runs.choice import chosen
    from msrun.runs.run_state import look

    found = look(chosen(os.environ, run, "msrun bugreport"))
    folder = Path(next(iter(found.record.checkpoints), found.record.cwd))
    machine = command.as_json(command.examine(folder, os.environ))
    return report(found, ReportOrder(output, has_logs=not no_logs), machine)


@commands.command(context_settings={"ignore_unknown_options": True})
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish", "words"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def completion(shell: str, words: tuple[str, ...]) -> None:
    """Print what a SHELL reads to complete options, commands, runs and scripts.

    In a start-up file: `eval "$(msrun completion bash)"` (zsh: after compinit), or for fish
    `msrun completion fish | source`. With `words -- WORDS` it prints what may stand in the place of
    the last one of WORDS, for other shells.
    """
    from msrun.completion.scripts import SCRIPTS
    from msrun.completion.words import Sources, candidates

    if shell in SCRIPTS:
        put(SCRIPTS[shell])
        return

    def runs(is_living: bool) -> list[str]:
        known = run_record.records(os.environ)
        return [one.record_id for one in known if one.is_alive() or not is_living]

    put("".join(f"{word}\n" for word in candidates(words, Sources(commands, runs))))


@commands.command("help")
@click.argument("topic", required=False, type=click.Choice(["protect"]))
def show_help(topic: str | None) -> None:
    """Explain a TOPIC: how to protect a training; without it, print what `msrun --help` does."""
    if topic is None:
        from msrun.options.help import short_help

        put(short_help())
    else:
        put(PROTECT)


def run(argv: Sequence[str]) -> int:
    """Run a subcommand; ``argv`` begins with its name.

    Returns:
        The exit code; 0 also if nobody reads the output any more.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    try:
        code = commands.main(args=list(completed(argv)), prog_name="msrun", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        put(f"{error.format_message()}\n")
        return USAGE_EXIT
    except click.ClickException as error:
        raise UsageError(_sentence(_command(argv[0], error), error)) from error
    except click.Abort:  # Ctrl-C
        return INTERRUPTED_EXIT
    except ReaderLeftError:
        return 0
    return code if isinstance(code, int) else 0


def _command(name: str, error: click.ClickException) -> str:
    """The subcommand that was used wrongly, with its groups."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return name if context is None else context.command_path.removeprefix("msrun ")


def _sentence(command: str, error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    joint = " See" if text.endswith("?") else ", see"
    return f"msrun {command}: {text[:1].lower()}{text[1:]}{joint} `msrun {command} --help`"
