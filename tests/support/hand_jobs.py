"""Jobs whose scheduler and workers are started one by one, by hand, as MindSpore's dynamic cluster."""

from __future__ import annotations

from collections.abc import Sequence

from support.node_jobs import PORT, NodeJobs, NodeMsrun, NodesJob

PLACES = (0, 1, 1, 0)  # the nodes of the workers, by their numbers
SCHEDULER = "sched"


def start(
    jobs: NodeJobs,
    name: str,
    *words: object,
    again: object = "",
    place: int | None = None,
    workers: int = len(PLACES),
    at: Sequence[str] = ("node0", str(PORT)),
    **more: str,
) -> NodeMsrun:
    """`msrun WORDS` for the scheduler, or for ``worker_2``.

    Args:
        jobs: starts them.
        name: of the process.
        words: options and the program.
        again: it was started before; tells its folder from that one's.
        place: its node, if it is another one than usual.
        workers: how many the job has.
        at: where the scheduler is.
        more: of its environment.
    """
    is_scheduler = name == SCHEDULER
    number = -1 if is_scheduler else int(name.removeprefix("worker_"))
    place = (0 if is_scheduler else PLACES[number]) if place is None else place
    node = jobs.cluster.nodes[place]
    environ = {
        "MS_ROLE": "MS_SCHED" if is_scheduler else "MS_WORKER",
        "MS_WORKER_NUM": str(workers),
        "MS_SCHED_HOST": at[0],
        "MS_SCHED_PORT": at[1],
        "MS_NODE_ID": name,
        **more,
    }
    folder = node.folder / f"logs_{name}{again}"
    nproc = int(not is_scheduler)
    part = jobs.start_one(node, *words, nproc=nproc, log_dir=folder, **environ)
    part.rank = number + 1
    return part


def start_all(jobs: NodeJobs, *words: object) -> NodesJob:
    """The last one first; the scheduler is the first of the parts."""
    names = [*(f"worker_{number}" for number in reversed(range(len(PLACES)))), SCHEDULER]
    parts = [start(jobs, name, *words) for name in names]
    return NodesJob(sorted(parts, key=lambda part: part.rank))
