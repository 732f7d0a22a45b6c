"""The options of ``msrun drill``."""

from __future__ import annotations

import os

import click

from agent.spec.job_spec import UsageError


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--kill",
    multiple=True,
    metavar="FAULT",
    help="rank=R,step=S[,phase=data|forward|backward|update|commit|dump|any]"
    "[,signal=SEGV|exit=N|raise][,attempt=N][,delay=0..1]; rank=launcher: msrun itself; with "
    "--nodes also node=N,step=S: all of a node, agent=N,step=S: its msrun, controller,step=S: that "
    "of node 0; + joins several faults into one drill.",
)
@click.option("--stop", multiple=True, metavar="FAULT", help="rank=R,step=S[,for=SECONDS].")
@click.option(
    "--graceful",
    multiple=True,
    metavar="FAULT",
    help="step=S[,phase=...][,signal=TERM]: msrun gets the signal, with --nodes that of node=N "
    "(0); all ranks must exit at one step, and msrun with 0; then msrun --resume continues.",
)
@click.option(
    "--preempt",
    multiple=True,
    metavar="FAULT",
    help="step=S[,grace=SECONDS][,phase=...]: SIGTERM to msrun, on each node, and, after the grace "
    "(default 30), SIGKILL to it and all ranks, as Slurm and Kubernetes do; then msrun --resume "
    "continues from what was saved until then, or the job starts from the beginning.",
)
@click.option(
    "--cut",
    multiple=True,
    metavar="FAULT",
    help="node=N,step=S[,for=SECONDS][,delay=0..1]: the node's cable is pulled out, and put back "
    "after that time (8 s).",
)
@click.option(
    "--poweroff",
    multiple=True,
    metavar="FAULT",
    help="node=N,step=S[,delay=0..1]: the node is off, and nobody is told.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=2),
    metavar="N",
    help="The job runs on so many nodes, which are namespaces of this machine; JOB is what each of "
    "them runs, the drill adds --nnodes, --node-rank and where they meet.",
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes more, which wait to take the place of a lost one; without any, a lost one is "
    "started again.",
)
@click.option("--random", "number", type=click.IntRange(min=1), help="Number of random drills.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random drills.")
@click.option(
    "--of",
    "kinds",
    metavar="KIND,...",
    help="Kinds of random drills: kill (default), double (two ranks at once), all (all ranks "
    "at once), again (a second death during recovery from the first), hang, raise, stop, "
    "graceful, preempt; with --nodes also node, poweroff, cut (0.5 to 8 s), away (cut for 12 to "
    "30 s), msrun, pair (two nodes, or a node and a rank of another one; default: kill, graceful, "
    "preempt and these).",
)
@click.option(
    "--faults",
    multiple=True,
    metavar="FILE",
    help="YAML list of drills, such as - graceful: {step: 40}; two kinds in one entry make one "
    "drill.",
)
@click.option(
    "--patterns",
    metavar="[NAMES]",
    is_flag=False,
    flag_value="all",
    help="Instead of a job: train the catalogue of small scripts, each killed in every phase of a "
    "step, with replacement and with restarts; NAMES, with commas: some of them; with --random: at "
    "random moments.",
)
@click.option(
    "--marathon",
    type=click.IntRange(min=1),
    metavar="N",
    help="One job that lives through N faults of all kinds in random order, at random moments, "
    "some in pairs: ranks, newcomers, the forkserver, the store host and msrun itself; without "
    "JOB, or with options of msrun alone, a script of the drill's own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--keep", is_flag=True, help="Keep all logs and checkpoints.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Limit for each run (default: 10 times the undisturbed run, plus 60); of a marathon: for "
    "its job without a step (default: 240).",
)
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
def drill(
    *,
    kill: tuple[str, ...],
    stop: tuple[str, ...],
    graceful: tuple[str, ...],
    preempt: tuple[str, ...],
    cut: tuple[str, ...],
    poweroff: tuple[str, ...],
    nodes: int | None,
    spare_nodes: int | None,
    number: int | None,
    seed: int,
    kinds: str | None,
    faults: tuple[str, ...],
    patterns: str | None,
    marathon: int | None,
    as_json: bool,
    keep: bool,
    timeout: float | None,
    job: tuple[str, ...],
) -> int:
    """Kill, stop and preempt a job on purpose, and prove that nothing is lost.

    JOB is the job's msrun command line without `msrun`, after a `--`. It runs once undisturbed and
    once for each drill, in folders of its own, and every rank's results are compared bit by bit.
    With --patterns, JOB is only the options of msrun for the catalogue's scripts.
    """
    from msrun.drill.session import DrillOptions
    from msrun.trials.node_fault import NodesOfDrill

    size = NodesOfDrill(nodes or 1, spare_nodes or 0)
    if spare_nodes and nodes is None:
        raise UsageError("msrun drill: --spare-nodes needs --nodes")
    if nodes and (patterns is not None or marathon is not None):
        raise UsageError("msrun drill: --patterns and --marathon have one node: leave out --nodes")
    options = DrillOptions(job, seed, timeout, as_json, keep, size)
    given = {"kill": kill, "stop": stop, "graceful": graceful, "preempt": preempt}
    given |= {"cut": cut, "poweroff": poweroff}
    if patterns is not None:
        from msrun.drill import pattern_session

        if faults or kinds or any(given.values()):
            raise UsageError("msrun drill: --patterns has its own faults: give none besides")
        return pattern_session.drill(patterns, number, options, os.environ)
    if marathon is not None:
        from msrun.drill import marathon as marathons

        if faults or kinds or number or any(given.values()):
            raise UsageError("msrun drill: --marathon has its own faults: give none besides")
        return marathons.drill(marathon, options, os.environ)
    from msrun.drill import session
    from msrun.drill.fault_options import read_file, read_words
    from msrun.drill.random_faults import KILLS, ON_NODES, RandomFaults, read_kinds

    of_random = read_kinds(kinds) if kinds else (ON_NODES if nodes else KILLS)
    orders = [
        *(read_words(words, deed) for deed, several in given.items() for words in several),
        *(order for path in faults for order in read_file(path)),
        *([RandomFaults(number, seed, of_random)] if number is not None else []),
    ]
    return session.drill(orders, options, os.environ)
