"""``msrun status``, ``stop`` and ``logs`` read what a run wrote; ``drill`` tries a job."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from agent import records
from agent.spec import UsageError
from msrun.stdout import ReaderLeftError

INTERRUPTED_EXIT = 130

RUN = click.argument("run", required=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Look after runs of msrun."""


@commands.command()
@RUN
@click.option("--all", "every", is_flag=True, help="List all recorded runs, newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str | None, *, every: bool, as_json: bool) -> None:
    """Show a run's state and its ranks.

    RUN is a run's id or its beginning; without it the newest run that is alive, else the newest.
    """
    from msrun import show_status
    from msrun.run_state import look

    if every:
        if run is not None:
            raise UsageError("msrun status: --all lists every run: leave RUN out")
        newest_first = sorted(records.records(os.environ), key=lambda one: -one.started)
        found = [look(record) for record in newest_first]
        if as_json:
            show_status.show_json([show_status.as_json(one) for one in found])
        else:
            show_status.show_runs(found)
        return
    one = look(records.find(os.environ, run))
    if as_json:
        show_status.show_json(show_status.as_json(one))
    else:
        show_status.show_run(one, time.time())


@commands.command()
@RUN
@click.option("--now", is_flag=True, help="Kill the workers instead of giving them their grace.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait so long for the end (default: as the run's timeouts allow).",
)
def stop(run: str | None, *, now: bool, timeout: float | None) -> int:
    """Stop a run and wait for its end.

    RUN is a run's id or its beginning; without it the only run that is alive.
    """
    from msrun.stop import stop as stop_run

    return stop_run(os.environ, run, timeout, now=now)


@commands.command()
@RUN
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank, lines as they are.")
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt, not the present one.")
@click.option("--scheduler", is_flag=True, help="msrun's own log: what it did and why.")
def logs(
    run: str | None, *, follow: bool, rank: int | None, attempt: int | None, scheduler: bool
) -> None:
    """Show what a run's workers wrote.

    RUN is a run's id or its beginning; without it the newest run that is alive, else the newest.
    """
    from msrun import show_logs
    from msrun.log_files import Wanted
    from msrun.run_state import look

    if scheduler and (rank is not None or attempt is not None):
        raise UsageError(
            "msrun logs: --scheduler is one log for all ranks and attempts: leave those out"
        )
    show = show_logs.follow if follow else show_logs.show
    show(look(records.find(os.environ, run)), Wanted(rank, attempt, scheduler))


@commands.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--kill",
    multiple=True,
    metavar="FAULT",
    help="rank=R,step=S[,phase=data|forward|backward|update|commit|dump|any]"
    "[,signal=SEGV|exit=N|raise][,attempt=N][,delay=0..1]; rank=launcher is msrun itself; "
    "+ joins several faults into one drill.",
)
@click.option("--stop", multiple=True, metavar="FAULT", help="rank=R,step=S[,for=SECONDS].")
@click.option("--random", "number", type=click.IntRange(min=1), help="So many random drills.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the random drills.")
@click.option("--faults", multiple=True, metavar="FILE", help="YAML: a list of drills.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--keep", is_flag=True, help="Keep all logs and checkpoints.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Of each run (default: 10 times the undisturbed one, and 60).",
)
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
def drill(  # one parameter an option
    *,
    kill: tuple[str, ...],
    stop: tuple[str, ...],
    number: int | None,
    seed: int,
    faults: tuple[str, ...],
    as_json: bool,
    keep: bool,
    timeout: float | None,
    job: tuple[str, ...],
) -> int:
    """Kill and stop ranks of a job on purpose, and prove that nothing was lost.

    JOB is what follows `msrun` to train, with a `--` in front. It runs once undisturbed and once
    for each drill, in folders of its own, and every rank's results are compared bit by bit.
    """
    from msrun import drill as drills
    from msrun.drill_faults import Lots, read_file, read_words

    orders = [
        *(read_words(words, "kill") for words in kill),
        *(read_words(words, "stop") for words in stop),
        *(order for path in faults for order in read_file(path)),
        *([Lots(number, seed)] if number is not None else []),
    ]
    return drills.drill(drills.Asked(tuple(orders), job, timeout, as_json, keep), os.environ)


def run(argv: Sequence[str]) -> int:
    """Run a subcommand; ``argv`` begins with its name.

    Returns:
        The exit code; 0 also when nobody reads the output any more.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    try:
        code = commands.main(args=list(argv), prog_name="msrun", standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(_sentence(argv[0], error)) from error
    except click.Abort:  # Ctrl-C
        return INTERRUPTED_EXIT
    except ReaderLeftError:
        return 0
    return code if isinstance(code, int) else 0


def _sentence(command: str, error: click.ClickException) -> str:
    said = " ".join(error.format_message().split()).rstrip(".")
    joint = " See" if said.endswith("?") else ", see"
    return f"msrun {command}: {said[:1].lower()}{said[1:]}{joint} `msrun {command} --help`"
