"""The job goes on as another one: node 0 is lost, or nodes have come or gone.

If node 0 is lost another node takes its part, and the job begins anew where it was saved.

Each node has listened since it joined, and knows where the others do. Of those that live the first
one gathers the others, and whoever takes the place of the lost one; all others join it. If node 0
is there after all, or was started again, they meet at node 0.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agent.launch.doors import Address, DoorWatch
from agent.launch.meeting import (
    REGATHER_S,
    Continuation,
    JobOverError,
    LostControllerError,
    Met,
    OwnSide,
    gather_all,
    join_one,
    own_side,
    program_digest,
)
from agent.launch.past import begins_anew, lost_steps
from agent.launch.search import FIRST, HOME, LEAD, Search
from agent.launch.signals import is_asked_late, take_back
from agent.nodes.gather import Succession
from agent.nodes.join import NobodyThereError
from agent.nodes.line import Loss, LossKind
from agent.nodes.messages import SurvivedStep
from agent.nodes.roster import Doors, NodeZeroBackError, Survivors
from agent.nodes.run_messages import NodeFacts
from agent.records.complete_checkpoint import look_until_there
from agent.records.run_record import Record, new_record_id
from agent.seat.job_seat import claim_of
from agent.seat.records import NodeShare
from agent.seat.rights import SuccessorRight
from agent.spec.job_spec import JobSpec, LeftEarlyError, NotStartedError
from agent.text.wording import duration

if TYPE_CHECKING:
    from worker_hooks.storage.find import FoundCheckpoint, SearchResult

SAVED_LOOK_S = 0.5  # between two looks at what others save
LOOK_S = 0.1  # between two looks at who is there, and two dials
FIRST_LOOK_S = 0.02  # the same as it begins: those that are there answer at once
FIRST_LOOKS = 25
LEFT = "this node has left while the nodes meet again, which go on if they are enough"
FRUITLESS = 3  # losses in a row at one step: the step itself may be what kills the node

Say = Callable[[str], None]


def next_job(asked: JobSpec) -> JobSpec:
    """The job that begins behind one that is over; ``asked``: as this node was started."""
    record, cluster = new_record_id(), asked.cluster
    assert cluster is not None
    return asked._replace(
        record_id=record,
        run_id=asked.given_id or record,
        cluster=cluster._replace(node_rank=-1, is_spare=False, said=(), home=asked.home),
    )


def why_over(
    job: JobSpec, nodes: tuple[NodeFacts, ...], loss: Loss, reached: int, term: str
) -> str:
    """Why nobody takes node 0's part; empty: perhaps somebody does.

    Args:
        job: as this node takes part in it.
        nodes: of the job.
        loss: of the line to node 0.
        reached: the newest step that a rank here has committed.
        term: that is known to count; empty: no store can say that half of the nodes goes on.
    """
    assert job.cluster is not None
    before = job.cluster.lost_at[1 - FRUITLESS :]
    if len(before) == FRUITLESS - 1 and set(before) == {reached}:
        return f"it is lost after step {reached} for the {FRUITLESS}rd time in a row"
    if not job.replace.node_wait_s:
        return "no other node is waited for (--node-wait=0)"
    if not nodes[job.node_rank].door:
        return "this node has no port at which others would find it"
    best = NodeShare.of(len(nodes) - 1, len(nodes))
    if loss.kind in {LossKind.SILENCE, LossKind.MUTE} and (
        best is NodeShare.FEW or (best is NodeShare.HALF and not term)
    ):
        return "it may be alive, and to go on without it takes more than half of the nodes"
    return ""


def saved_step(
    record: Record, job: JobSpec, reached: int, patience_s: float = 0.0
) -> SurvivedStep | None:
    """Where the job goes on; ``None``: what the ranks have reached is not saved.

    Args:
        record: of this node.
        job: as this node took part in it.
        reached: the newest step that a rank here has committed.
        patience_s: until it must be: ranks on other nodes may be at it.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            found = _saved_by(record).newest
        except OSError:  # the file server is gone as well
            return None
        if found is not None and found.manifest.step >= reached:
            break
        if time.monotonic() >= until_s or is_asked_late():
            return None
        time.sleep(SAVED_LOOK_S)
    return _survived(record, job, found)


def older_step(record: Record, job: JobSpec, reached: int, say: Say) -> SurvivedStep | None:
    """Where the job begins again whose newest step is not saved: what is lost is said.

    That is its newest checkpoint, or its own beginning if it has none. ``None``: it has some, and
    none that can be read, or the newest one is not there, so somebody has to look into that.

    Args:
        record: of this node.
        job: as this node took part in it.
        reached: the newest step that a rank has committed.
        say: prints one sentence for people.
    """

    def look() -> SearchResult:
        for folder in filter(os.path.isdir, record.checkpoints):
            os.listdir(folder)  # else it would seem to be empty
        return _saved_by(record)

    known = record.complete
    try:
        found, is_away = look_until_there(known, look, _step_of, is_asked_late)
    except OSError as error:
        say(f"what was saved cannot be looked at: {error}")
        return None
    if known is not None and is_away:
        say(
            f"{known.describe()} Once it is back, start all nodes again, node 0 with "
            f"--resume={shlex.quote(known.folder)}"
        )
        return None
    for remark in found.remarks:
        say(remark)
    if found.newest is not None:
        older = _survived(record, job, found.newest)._replace(reached=reached)
        lost = lost_steps(older) or "no step is lost"
        say(f"step {older.step} is saved in {older.path}: the job goes on from there, {lost}")
        return older
    if found.has_damaged:
        return None
    if job.dump.resume is not None:
        say(f"the checkpoint {job.dump.resume}, from which the job began, is not found")
        return None
    anew = _survived(record, job, None)._replace(reached=reached)
    say(begins_anew(anew))
    return anew


def _step_of(found: SearchResult) -> int:
    return -1 if found.newest is None else found.newest.manifest.step


def _saved_by(record: Record) -> SearchResult:
    from worker_hooks.storage.find import Verify, search_of_run  # rarely needed

    folders = [*map(Path, record.checkpoints)]
    return search_of_run(folders, _lineage(record), record.resumed_step, verify=Verify.QUICK)


def _survived(record: Record, job: JobSpec, found: FoundCheckpoint | None) -> SurvivedStep:
    """What this node brings along; ``found``: from where; ``None``: nothing is saved."""
    survived = SurvivedStep(job.saves_as, job.node_rank, "", 0, (), program_digest(job), job.nnodes)
    if found is None:
        return survived
    path = str(found.path.absolute())
    return survived._replace(path=path, step=found.manifest.step, lineage=_lineage(record))


def _lineage(record: Record) -> tuple[str, ...]:
    return (record.saves_as, *record.lineage)


def meet_again(lost: Continuation, environ: Mapping[str, str], version: str, say: Say) -> Met:
    """Wait until all nodes are here that the job needs, without node 0 or with a new one.

    Args:
        lost: what this node knows.
        environ: msrun's environment.
        version: of msrun.
        say: prints one sentence for people.

    Raises:
        UsageError: the request is wrong on this node.
        NotStartedError: not all nodes came.
        LeftEarlyError: this node was asked to end.
    """
    cluster, path = lost.job.cluster, "" if lost.saved is None else lost.saved.path

    def left(_: int) -> LeftEarlyError:
        return LeftEarlyError(f"{LEFT}, from {path}" if path else LEFT)

    take_back(lost.job, left if cluster is not None and cluster.leaves else None)
    if lost.expected:
        return _regathered(lost, environ, version, say)
    while True:
        silent = frozenset({FIRST} if lost.is_silent and not lost.is_mute else ())
        watch = DoorWatch(_addresses(lost), silent, lost.job.silence_s)
        try:
            return _Meeting(lost, environ, version, say, watch).met()
        except (JobOverError, LeftEarlyError):  # others go on from what this node has saved
            raise
        except NotStartedError as error:
            if kept := lost.kept:
                again = f"start all nodes again, node 0 with --resume={shlex.quote(kept)}"
                raise NotStartedError(f"{error}. To resume, {again}", error.exit_code) from error
            if lost.saved is None or not lost.saved.path:
                raise
            kept = f"step {lost.saved.step} is saved in {lost.saved.path}"
            raise NotStartedError(f"{error}; {kept}", error.exit_code) from error
        except LostControllerError as error:  # it waited as a spare, and that job's is lost as well
            lost = error.lost
        finally:
            watch.close()


def _regathered(lost: Continuation, environ: Mapping[str, str], version: str, say: Say) -> Met:
    """On node 0: the others come, those that were in the job and those that are new."""
    side = own_side(
        lost.job,
        environ,
        version,
        say,
        lost.door,
        is_first=True,
        survived=lost.saved,
        known=lost.token,
    )
    wait_s = lost.job.replace.node_wait_s or REGATHER_S
    met = gather_all(side, wait_s, early=lost.early, expected=lost.expected)
    return met._replace(held=lost.held)


def _addresses(lost: Continuation) -> dict[int, Address]:
    found = {node.rank: Address(node.address, node.door) for node in lost.nodes if node.door}
    if FIRST in found:  # its name may mean another machine by now
        found[FIRST] = Address(lost.job.master_addr, found[FIRST].port)
    assert lost.job.cluster is not None
    if lost.job.cluster.home is not None:
        home = Address(*lost.job.cluster.home)
        if home != found.get(FIRST):
            found[HOME] = home
    return found


class _Meeting:
    """The search for whom to meet, of one node."""

    def __init__(
        self,
        lost: Continuation,
        environ: Mapping[str, str],
        version: str,
        say: Say,
        watch: DoorWatch,
    ) -> None:
        self._lost = lost
        self._environ = environ
        self._version = version
        self._say = say
        self._watch = watch
        self._addresses = _addresses(lost)
        self._wait_s = lost.job.replace.node_wait_s
        if lost.without_first:
            self._wait_s = max(self._wait_s, REGATHER_S)
        self._deadline_s = time.monotonic() + self._wait_s
        self._said: set[str] = set()
        self._search = Search(
            # a spare one comes after all: it was in no roster
            len(lost.nodes) if lost.saved is None else lost.saved.node_rank,
            self._addresses,
            time.monotonic(),
            is_spare=lost.saved is None,
            is_silent=lost.is_silent,
            is_mute=lost.is_mute,
        )
        self._sides: dict[bool, OwnSide] = {}  # by whether the others come to it
        self._term = lost.term  # of the controller's seat, the newest that this node knows of

    def met(self) -> Met:
        """Join the first node that gathers others, or gather them."""
        looks = 0
        while time.monotonic() < self._deadline_s:
            looks += 1
            doors = self._watch.look(self._search.candidates())
            node = self._search.look(doors, time.monotonic())
            if node == LEAD:
                try:
                    return self._gathered()
                except NodeZeroBackError:
                    if not self._search.is_first_mute:
                        self._say_once("node 0 is back: the nodes meet there")
            elif node is not None and (met := self._joined(node)):
                return met
            time.sleep(FIRST_LOOK_S if node is None and looks <= FIRST_LOOKS else LOOK_S)
        raise NotStartedError(
            f"no node has taken the part of node 0 within {duration(self._wait_s)}"
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _joined(self, node: int) -> Met | None:
        address, lost = self._addresses[node], self._lost
        job, cluster = lost.job, lost.job.cluster
        assert cluster is not None
        job = job._replace(master_addr=address.host, master_port=address.port)
        if lost.saved is None and not cluster.least:  # else it has come to be taken in
            job = job._replace(cluster=cluster._replace(is_spare=True))
        try:
            return join_one(self._side(job, is_first=False), lost.early, is_once=True)
        except NobodyThereError:
            self._search.unanswered(node, time.monotonic())
            return None
        except (JobOverError, LeftEarlyError):
            raise
        except NotStartedError as error:
            if not self._search.refused(node, time.monotonic()):
                raise
            self._say_once(f"{address.host}:{address.port} is not node 0 of this job: {error}")
            return None

    def _gathered(self) -> Met:
        lost = self._lost
        assert lost.saved is not None
        assert lost.door is not None
        node = lost.nodes[lost.saved.node_rank]
        job = lost.job._replace(master_addr=node.address, master_port=node.door)
        assert job.cluster is not None
        how = f"--master-addr={node.address} --master-port={node.door} and without --node-rank"
        if job.cluster.by_hand is not None:
            how = f"MS_SCHED_HOST={node.address} MS_SCHED_PORT={node.door} MS_ROLE=MS_WORKER"
        kept = f"step {lost.saved.step} is saved" if lost.saved.path else "no step is saved"
        what = "has left" if lost.without_first else "is lost"
        self._say_once(
            f"this node takes the part of node 0, which {what}; {kept}. "
            f"To give a node to the job, start msrun there with {how}"
        )
        side = self._side(job, is_first=True)
        nodes, saved = len(lost.nodes), lost.saved
        needs_store = lost.is_silent and NodeShare.of(nodes - 1, nodes) is NodeShare.HALF
        right = SuccessorRight(self._term, needs_store=needs_store)
        claim = claim_of(job, saved.job, nodes, saved.path, right)
        survivors = Survivors(nodes, saved.job, right)

        def knock(awaited: set[int]) -> Doors:
            doors = self._watch.look(awaited | {FIRST, HOME})
            here = {*range(nodes)} - awaited
            are_enough = survivors.may_begin(here, doors)
            is_seated = right.held is not None
            doors = self._search.gather(
                doors, time.monotonic(), is_seated=is_seated, are_enough=are_enough
            )
            claim.look(survivors.standing(here, doors))
            return doors

        wait_s = self._deadline_s - time.monotonic()
        try:
            succession = Succession(survivors, knock)
            met = gather_all(side, wait_s, succession, lost.early, lost.without_first)
        except BaseException:
            claim.close(is_given_back=True)
            self._term = self._term if right.held is None else right.held.term
            raise
        claim.close()
        return met._replace(held=right.held)

    def _side(self, job: JobSpec, *, is_first: bool) -> OwnSide:
        if (side := self._sides.get(is_first)) is None:  # its certificate is read, and judged, once
            side = self._sides[is_first] = own_side(
                job,
                self._environ,
                self._version,
                self._say,
                self._lost.door,
                is_first=is_first,
                survived=self._lost.saved,
                known=self._lost.token,
            )
        return side._replace(spec=job)
