"""Copies of every rank's state in the agent's memory, taken while training goes on.

Two sets of files: one holds the newest complete copy, the other receives the next one. A copy is of
one step. All ranks are ordered ahead of it, copy behind their commit, and answer. Of a replica
group each rank writes its part of what they hold the same, and the digests of all must be equal. So
a copy is never trusted that is of two steps, or of replicas that differ.

When a copy is taken is decided here, by how long steps and copies take; what it is good for is
decided by the controller.
"""

from __future__ import annotations

import math
import time
from itertools import count
from statistics import median
from typing import NamedTuple

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.dump.copy_files import CopyFiles
from agent.hooks.rank_links import RankLinks
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.spec.job_spec import JobSpec
from agent.text.sanitize import encodable
from worker_hooks.contract import protocol
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, REPLICATED, Manifest, Shard

SHARE = 0.01  # of the training's processor time that copies may take
LEAST_S = 2.0  # from one copy to the next, unless the user wants more: each leaves a line in logs
NOTICE_S = (0.004, 0.05, 4.0)  # before a commit all ranks are told of its copy: least, first, most
SOONER = 0.8  # of the notice, once a copy came about; an order that came too late doubles it
MOST_AHEAD = 1024  # steps
MOST_MISSES = 12  # in a row, within 40 s or more; then the job is said not to be copied
MISSED_S = (0.02, 10.0)  # until the next order, after the first miss and at most
LOOK_S = 0.2  # a copy that is due so much later, or more, is not ordered yet
UNKNOWN_STEP_S = 0.01
ANSWER_S = 0.004  # from one copy to the next for each rank elsewhere: 1 % of the agent's time
ELSEWHERE = "elsewhere"  # in the place of a file's descriptor, which another node knows

Groups = tuple[tuple[int, ...], ...]


def ahead(step_s: float, since_s: float, notice_s: float) -> int:
    """How many steps behind the newest commit the commit is of which a copy is ordered.

    Args:
        step_s: seconds that a step takes.
        since_s: seconds since the newest commit.
        notice_s: seconds that all ranks need to hear of it.
    """
    # the newest commit may be older than it looks, the more so after an order that came too late
    sure = math.ceil((2 + notice_s / step_s) * max(1.0, notice_s / NOTICE_S[1]))
    # a step may be done in half of its time
    likely = math.ceil(2 * (since_s + notice_s) / step_s)
    return min(sure, likely, MOST_AHEAD)


def pause_s(cpu_s: float, far: int = 0) -> float:
    """Seconds from one copy to the next, if the user wants no number of steps.

    Args:
        cpu_s: seconds of processor time that a copy takes on the slowest rank; 0: unknown.
        far: how many ranks are on other nodes: orders and answers all go through this process.
    """
    return max(cpu_s / SHARE, LEAST_S, ANSWER_S * far)


def interval(step_s: float, pause_s: float, every: int) -> int:
    """How many steps lie between two copies, about.

    Args:
        step_s: seconds that a step takes.
        pause_s: from one copy to the next.
        every: what the user wants; 0: no number.
    """
    return every or max(1, math.ceil(pause_s / step_s))


class _Copy(NamedTuple):
    """One copy, complete or not."""

    step: int
    groups: Groups
    files: int  # the number of their set, on each node
    answers: dict[int, protocol.Copied]
    attempt: int


class KeptCopy(NamedTuple):
    """A complete copy."""

    manifest: Manifest  # of the files in memory here
    elsewhere: Manifest | None  # of those of other nodes, without their descriptors
    files: int  # the number of their set there


class MemoryCopies:
    """The newest complete copy, and the next one on its way."""

    def __init__(
        self, spec: JobSpec, links: RankLinks, pages: StatusPages, services: Services
    ) -> None:
        """Nothing is copied before :meth:`decided`."""
        self._spec = spec
        self._links = links
        self._pages = pages
        self._services = services
        self._attempt = 0
        self._groups: Groups = ()
        self._newest: _Copy | None = None
        self._next: _Copy | None = None
        self._here = frozenset(spec.ranks_here)
        # all ranks are about as far; heartbeats of other nodes are a second old
        self._timed = spec.ranks_here or range(spec.world_size)
        self._files = CopyFiles(spec.ranks_here)
        self._numbers = count(1)  # of their sets
        self._spare = 0  # the set that nobody writes to, and nobody needs; 0: there is none
        self._misses = 0
        self._notice_s = NOTICE_S[1]
        self._due_s = 0.0  # when the next is due, unless after a number of steps
        self._cpu_s = 0.0
        self._is_refused = False
        self._waiting: object | None = None  # who looks again; of these the newest counts

    def begin(self, attempt: int) -> None:
        """An attempt begins; of the one before it a copy may be complete, or still be written."""
        self._attempt = attempt
        self._give_up()

    def decided(self, state: JobState, groups: Groups) -> None:
        """The job is in this state now.

        ``groups``: the replica groups of which each is to keep copies; none: nothing is copied.
        """
        is_running = state is JobState.RUNNING
        self._groups = groups if is_running and not self._is_refused else ()
        if not is_running:
            self._give_up()
        elif self._groups and self._next is None and self._waiting is None:
            self._look()

    def _give_up(self) -> None:
        """Some ranks may have an order, so nobody else writes to its files."""
        self._waiting = self._next = None

    # --- ordering -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Order the next copy if it is due soon, else look again."""
        self._waiting = None
        if not self._groups or self._next is not None:
            return
        commits, step_s = self._pages.newest_commits(self._timed), self._step_s()
        newest = max((step for step, _ in commits), default=0)
        began_ns = min((at_ns for step, at_ns in commits if step == newest), default=0)
        since_s = time.monotonic() - began_ns / 1e9
        soonest = newest + ahead(step_s, since_s, self._notice_s)
        every, last = self._spec.dump.copy_every, self._newest
        step = soonest if last is None or not every else max(last.step + every, soonest)
        # a number of steps is waited for by their usual length, anything else by the clock
        wait_s = (step - soonest) * step_s / 2 if every else self._due_s - time.monotonic()
        if last is None and not newest:
            self._wait(LOOK_S)
        elif wait_s > LOOK_S / 2:
            self._wait(wait_s)
        else:
            self._order(step)

    def _wait(self, seconds: float) -> None:
        self._waiting = object()
        self._services.loop.call_later(seconds, self._wake, self._waiting)

    def _wake(self, waiting: object) -> None:
        if waiting is self._waiting:
            self._look()

    def _step_s(self) -> float:
        paces = self._pages.paces(self._timed).values()
        found = [pace.step_ns for each in paces for pace in each[-8:]]
        return max(median(found) / 1e9, 1e-5) if found else UNKNOWN_STEP_S

    def _order(self, step: int) -> None:
        files, self._spare = self._spare or next(self._numbers), 0
        newest = 0 if self._newest is None else self._newest.files
        self._next = _Copy(step, self._groups, files, {}, self._attempt)
        for group in self._groups:
            for part, rank in enumerate(group):
                order = protocol.Copy(step, "", "", part, len(group), files, newest)
                try:
                    if rank in self._here:  # another node's agent has files of its own
                        order = self._files.placed(rank, order)
                except OSError:  # no descriptor is left
                    self._refuse(step, "the agent has no descriptor left")
                    return
                self._links.send(rank, order)

    # --- answers --------------------------------------------------------------------------------

    def hear(self, answer: protocol.Copied) -> None:
        """A rank has copied its state, or has not."""
        coming = self._next
        if coming is None or _what(answer) != _what(coming):
            return
        if why := self._files.why_unsound(answer):
            self._links.drop(answer.rank, why)
            return
        if answer.is_final:
            self._refuse(answer.step, encodable(answer.why_not))
            return
        coming.answers[answer.rank] = answer
        if len(coming.answers) < self._spec.world_size:
            return
        self._next = None
        why = next((each.why_not for each in coming.answers.values() if each.why_not), "")
        why = encodable(why) or _why_unequal(coming)
        if not why and coming.groups != self._groups:
            why = "who holds the same is not known any more"
        if why:
            self._misses += 1
            self._notice_s = min(2 * self._notice_s, NOTICE_S[2])
            self._spare = coming.files
            self._services.journal.event("CopyMissed", step=coming.step, why=why)
            if self._misses >= MOST_MISSES:
                self._refuse(coming.step, f"{MOST_MISSES} times in a row, the last time as {why}")
                return
            self._wait(min(MISSED_S[0] * 2**self._misses, MISSED_S[1]))
        else:
            self._complete(coming)
            self._look()

    def _refuse(self, step: int, why: str) -> None:
        self._is_refused, self._groups = True, ()
        self._give_up()
        self._services.post(ev.StateCopied(self._attempt, step, why_not=why))

    def _complete(self, copy: _Copy) -> None:
        self._misses = 0
        self._notice_s = max(SOONER * self._notice_s, NOTICE_S[0])
        last, self._newest = self._newest, copy
        answers = copy.answers.values()
        self._cpu_s = max(each.cpu_s for each in answers)
        pause = pause_s(self._cpu_s, self._spec.world_size - len(self._here))
        self._due_s = time.monotonic() + pause
        if last is None:
            every = interval(self._step_s(), pause, self._spec.dump.copy_every)
            # short steps are not copied one by one
            every = max(every, ahead(self._step_s(), self._cpu_s, self._notice_s))
        else:
            self._spare, every = last.files, max(1, copy.step - last.step)
        nbytes = sum(each.nbytes + each.private_nbytes for each in answers)
        self._services.post(ev.StateCopied(self._attempt, copy.step, every, copy.groups, nbytes))

    # --- what is kept ---------------------------------------------------------------------------

    def newest(self, step: int, reason: str) -> KeptCopy | None:
        """The newest copy as a checkpoint in memory; ``None``: it is not of this step.

        ``reason``: the failure that it is saved for.
        """
        copy = self._newest
        if copy is None or copy.step != step:
            return None
        first = copy.answers[copy.groups[0][0]]
        variants = {rank: number for number, group in enumerate(copy.groups) for rank in group}
        shards = [
            Shard(ELSEWHERE, rank, kind, nbytes, "", variants[rank] if kind == REPLICATED else 0)
            for rank, one in copy.answers.items()
            for kind, nbytes in ((PRIVATE, one.private_nbytes), (REPLICATED, one.nbytes))
        ]
        here, elsewhere = list[Shard](), list[Shard]()
        for shard in shards:
            (here if shard.rank in self._here else elsewhere).append(shard)
        manifest = Manifest(
            MEMORY_KIND,
            step=step,
            epoch=max(0, first.epoch - 1),
            batch=first.batch,
            world_size=self._spec.world_size,
            attempt=copy.attempt,
            record_id=self._spec.saves_as,
            reason=reason,
            shards=tuple(shards),
            digest=",".join(copy.answers[group[0]].digest for group in copy.groups),
            holders=copy.groups if len(copy.groups) > 1 else (),
        ).completed()
        found = self._files.found(copy.files, here)
        far = manifest._replace(shards=tuple(elsewhere), holders=()) if elsewhere else None
        return KeptCopy(manifest._replace(shards=found), far, copy.files)

    def forget(self) -> None:
        """Free the memory: the attempt is over, and what is written to a disk holds its files."""
        self._give_up()
        self._groups, self._misses, self._is_refused = (), 0, False
        self._cpu_s = self._due_s = 0.0
        self._spare, self._newest = 0, None
        self._files.close()


def _what(copy: _Copy | protocol.Copied) -> tuple[int, int, int]:
    """Which copy it is, or is an answer to."""
    return copy.step, copy.files, copy.attempt


def _why_unequal(copy: _Copy) -> str:
    """Which replicas hold different state; empty: none."""
    for group in copy.groups:
        if len({copy.answers[rank].digest for rank in group}) > 1:
            return f"the replicas {', '.join(map(str, group))} differ"
    return ""
