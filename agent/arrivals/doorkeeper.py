"""Decides about a node that asks for a place while the job runs: one of a lost node, or to wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from agent.arrivals.late import NodePlace
from agent.arrivals.places import LostPlaces, Relation, relation
from agent.arrivals.resize import Resize
from agent.arrivals.successors import swapped
from agent.nodes.gather import MISSING
from agent.nodes.guest import WRONG
from agent.nodes.messages import AGAIN, ANY_RANK, Begin, Join, Refused, Spare, SurvivedStep
from agent.nodes.roster import local_rank, named, of_another_program, why_other_job
from agent.nodes.run_messages import NodeFacts
from agent.spec.job_spec import JobSpec

FULL = Refused(
    "the job runs, and no lost node has left a place for this one: let it wait for one with "
    "--spare-node and without --node-rank, or give another --master-port",
    WRONG,
)
LEFT = Refused("the job runs without this node, whose ranks it has replaced, or waits to", AGAIN)
NONE_AWAITED = Refused("the job runs, and waits for no node, as it has --node-wait=0", WRONG)


class RunningJob(NamedTuple):
    """What the doorkeeper knows of it."""

    spec: JobSpec
    program: str  # a digest of what its ranks run
    settings: Mapping[str, object]  # what all its nodes are told
    newest_step: Callable[[], int]  # that a rank has committed
    end: Callable[[str], None]  # ends it, because of this
    say: Callable[[str], None]


class Doorkeeper:
    """Judges who may join one job.

    Those that take part are ``facts``, by their ranks; they are at ``addresses``.
    """

    def __init__(
        self, job: RunningJob, nodes: tuple[NodeFacts, ...], places: LostPlaces, resize: Resize
    ) -> None:
        """Nobody has come yet; the parts stay the caller's as well."""
        self._job = job
        self._places = places
        self._resize = resize
        self._spares: set[tuple[str, int]] = set()  # nodes that wait, or waited: host, pid
        self.facts = list(nodes)
        self.addresses = _addresses(nodes)

    def judge(self, join: Join, address: str) -> NodePlace | Spare | Refused:
        """Whether a node gets the place of a lost one, or waits."""
        spec = self._job.spec
        wanted = spec.given_id
        if join.run_id != wanted:
            who = named(join.host, address)
            return Refused(why_other_job(who, join.run_id, wanted, "runs"), WRONG)
        if join.living is not None:
            is_ours = join.living.job in {spec.saves_as, *spec.dump.lineage}
            return LEFT if is_ours else Refused(of_another_program(join.host), WRONG)
        if join.survived is not None and (refused := self._judge_survivor(join, join.survived)):
            return refused
        if not spec.replace.node_wait_s:
            return NONE_AWAITED
        is_elastic, cluster = self._resize.is_elastic, spec.cluster
        # one that changes its size has numbered its nodes anew
        only = ANY_RANK if is_elastic else join.node_rank
        rank = self._places.place(self.facts, join.nproc, join.name, only)
        if rank is None or self._resize.expected:  # the next run has places for all that wait
            # one that was taken for lost, and has ended its ranks, may be of use again
            by_hand = cluster is not None and cluster.by_hand is not None
            may_wait = join.is_spare or is_elastic or by_hand or join.survived is not None
            may_wait |= self._places.is_in_doubt
            return self._spared(join) if may_wait else FULL
        new = NodeFacts(
            rank, join.host, address, join.nproc, join.pid, join.torch, join.door, join.name
        )
        others = (each for each in self.facts if each.rank != rank)
        before = self.facts[rank]
        is_same = (before.host, before.pid) == (join.host, join.pid)
        is_haunted = self._places.is_haunted(rank, time.monotonic()) and not is_same
        self.facts[rank] = new._replace(local_first=local_rank(others, new))
        self.addresses = _addresses(self.facts)
        settings = {**self._job.settings, "is_late": True, "is_haunted": is_haunted}
        return NodePlace(rank, Begin(tuple(self.facts), settings))

    def _judge_survivor(self, join: Join, survived: SurvivedStep) -> Refused | None:
        """Why a node that has lost node 0 has no part in this job; ``None``: it may have.

        If it knows a later step of the same training, that is what was to go on: this job ends.
        """
        spec, newest = self._job.spec, self._job.newest_step()
        found = relation(survived, (spec.saves_as, *spec.dump.lineage), self._job.program, newest)
        if found is Relation.STRANGER:
            return Refused(of_another_program(join.host), WRONG)
        if found is not Relation.AHEAD:
            return None
        why = (
            f"{join.host} has saved step {survived.step} of the same training in {survived.path}, "
            f"and was not here when this job began, which has come to step {newest}"
        )
        self._job.end(why)
        return Refused(f"the job here has begun without this node, and ends: {why}", MISSING)

    def _spared(self, join: Join) -> Spare | Refused:
        """A node that has come to wait, or waits already."""
        if self._resize.has_room and not join.is_spare:
            return self._waiting(join, "it is taken in once the state can be saved")
        own = self._job.spec.node_rank
        sizes = sorted({facts.nproc for facts in self.facts if facts.rank != own})
        if not sizes:
            return Refused("the job runs on one node, whose place no other one can take", WRONG)
        if join.nproc not in sizes:
            have = " or ".join(map(str, sizes))
            return Refused(
                f"this node has {join.nproc} workers, but those that it could replace have {have}",
                WRONG,
            )
        return self._waiting(join, "it takes the place of a lost one")

    def _waiting(self, join: Join, why: str) -> Spare:
        who = join.host, join.pid
        if who not in self._spares:
            self._spares.add(who)
            kind = "a spare node" if join.is_spare else "another node"
            self._job.say(f"{kind} has come ({join.host}): {why}")
        return Spare(swapped(tuple(self.facts), self._job.spec.node_rank))


def _addresses(nodes: Iterable[NodeFacts]) -> frozenset[str]:
    return frozenset(each.address for each in nodes)
