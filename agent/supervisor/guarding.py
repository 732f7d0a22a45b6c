"""What only a job with hooks needs.

The bridge imports this module when the first rank says Hello: without hooks the agent starts 40 ms
earlier, which a short command that is not Python notices.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from agent.dump.executor import DumpExecutor
from agent.failure import post_mortem  # noqa: F401  a restart must not wait for this import
from agent.health.monitor import HealthMonitor
from agent.health.stopped import StoppedRanks
from agent.hooks.handshake import Handshake
from agent.hooks.rank_links import RankLinks
from agent.hooks.rank_processes import RankProcesses
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.kept.kept_ranks import KeptRanks
from agent.records.run_record import KeptRecord
from agent.spec.job_spec import JobSpec
from agent.workers.worker import Worker


class Guarding(NamedTuple):
    """Who answers the ranks, carries out dumps, keeps dead ranks' memory and looks for hangs."""

    handshake: Handshake
    dumps: DumpExecutor
    kept: KeptRanks
    health: HealthMonitor
    stopped: StoppedRanks


def guarding(
    spec: JobSpec,
    fallback: Path,
    links: RankLinks,
    pages: StatusPages,
    processes: RankProcesses,
    worker: Callable[[int], Worker],
    finished: AbstractSet[int],
    wake: Callable[[int], None],
    kept: KeptRecord,
    services: Services,
) -> Guarding:
    """All of them, for a whole job.

    Args:
        fallback: where dumps go when the script's folder cannot be written.
        worker: a rank's, in the present attempt.
        finished: ranks that may exit, because their training is over; it changes.
        wake: sends SIGCONT to a rank.
        kept: remembers where the run saves, and what it began from; does file work.
    """
    handshake = Handshake(spec.dump, spec.saves_as, fallback, links, kept, services)
    dumps = DumpExecutor(spec, fallback, links, pages, handshake, services)
    memory = KeptRanks()
    dumps.kept = memory
    return Guarding(
        handshake=handshake,
        dumps=dumps,
        kept=memory,
        health=HealthMonitor(spec.timeouts.hang_s, pages, links, processes, worker, services),
        stopped=StoppedRanks(
            () if spec.timeouts.hang_s == 0 else range(spec.world_size),
            processes,
            worker,
            finished,
            wake,
            services,
        ),
    )
