"""``msrun drill``: its options."""

from __future__ import annotations

import os

import click


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--kill",
    multiple=True,
    metavar="FAULT",
    help="rank=R,step=S[,phase=data|forward|backward|update|commit|dump|any]"
    "[,signal=SEGV|exit=N|raise][,attempt=N][,delay=0..1]; rank=launcher is msrun itself; "
    "+ joins several faults into one drill.",
)
@click.option("--stop", multiple=True, metavar="FAULT", help="rank=R,step=S[,for=SECONDS].")
@click.option(
    "--graceful",
    multiple=True,
    metavar="FAULT",
    help="step=S[,phase=...][,signal=TERM]: msrun is asked to leave; all ranks must leave at one "
    "step and msrun with 0; msrun --resume goes on.",
)
@click.option(
    "--preempt",
    multiple=True,
    metavar="FAULT",
    help="step=S[,grace=SECONDS][,phase=...]: SIGTERM to msrun and, when the grace (default 30) is "
    "over, SIGKILL to it and all ranks, as Slurm and Kubernetes do; msrun --resume goes on from "
    "what was saved by then, or the job begins anew.",
)
@click.option("--random", "number", type=click.IntRange(min=1), help="So many random drills.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the random drills.")
@click.option(
    "--of",
    "kinds",
    default="kill",
    metavar="KIND,...",
    help="What random drills are: kill (default), double (two ranks at once), again (a second "
    "death in what follows the first), hang, raise, stop, graceful, preempt.",
)
@click.option(
    "--faults",
    multiple=True,
    metavar="FILE",
    help="YAML: a list of drills, as in - graceful: {step: 40}; two kinds in one entry are one "
    "drill.",
)
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
    graceful: tuple[str, ...],
    preempt: tuple[str, ...],
    number: int | None,
    seed: int,
    kinds: str,
    faults: tuple[str, ...],
    as_json: bool,
    keep: bool,
    timeout: float | None,
    job: tuple[str, ...],
) -> int:
    """Kill, stop and preempt a job on purpose, and prove that nothing was lost.

    JOB is what follows `msrun` to train, with a `--` in front. It runs once undisturbed and once
    for each drill, in folders of its own, and every rank's results are compared bit by bit.
    """
    from msrun.drill import session as drills
    from msrun.drill.fault_options import read_file, read_words
    from msrun.drill.random_faults import RandomFaults, read_kinds

    said = {"kill": kill, "stop": stop, "graceful": graceful, "preempt": preempt}
    orders = [
        *(read_words(words, deed) for deed, several in said.items() for words in several),
        *(order for path in faults for order in read_file(path)),
        *([RandomFaults(number, seed, read_kinds(kinds))] if number is not None else []),
    ]
    return drills.drill(drills.DrillRequest(tuple(orders), job, timeout, as_json, keep), os.environ)
