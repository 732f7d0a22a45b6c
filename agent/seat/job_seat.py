"""The seat of a job as it was asked for: its store, its name there, and where the job is met."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from agent.seat.claim import Claim
from agent.seat.records import HeldSeat, Seat, SeatRecord, StoreError, Will
from agent.seat.rights import SuccessorRight
from agent.seat.store import TTL_S, SeatStore
from agent.seat.tenure import Tenure
from agent.spec.job_spec import JobSpec, UsageError
from agent.text.sanitize import sanitized

SETTLE_S = TTL_S + 2.0  # for the seat of who has just died to be free
LOOK_S = 2.0  # from one look at the store to the next, while a node asks to be let in
KNOCK_S = 1.0

Say = Callable[[str], None]


def store_of(job: JobSpec) -> SeatStore | None:
    """The store of a job; ``None``: it has none."""
    cluster = job.cluster
    if cluster is None or not cluster.store:
        return None
    from agent.seat.etcd import Etcd  # few jobs have one

    host, port = job.home
    return SeatStore(Etcd(cluster.store), job.given_id or f"{host}:{port}")


def tenure_of(
    asked: JobSpec, saves_as: str, nodes: int, held: HeldSeat | None, say: Say
) -> Tenure | None:
    """How node 0 keeps the seat of a job; ``None``: it has no store.

    Args:
        asked: the job as this node was started, or where it takes a lost node's part.
        saves_as: the id by which its checkpoints are known.
        nodes: how many it has.
        held: the seat, if this node has it already.
        say: prints one sentence for people.
    """
    store = store_of(asked)
    if store is None:
        return None
    return Tenure(store, _own(asked), Will(saves_as, nodes), held, say)


def claim_of(job: JobSpec, saves_as: str, nodes: int, saved: str, right: SuccessorRight) -> Claim:
    """How a node asks for the seat that takes node 0's part.

    Args:
        job: with the address and the port of this node.
        saves_as: the id of the job that is lost.
        nodes: how many that had.
        saved: its newest checkpoint.
        right: to it.
    """
    return Claim(store_of(job), _own(job), Will(saves_as, nodes, saved), right)


class Whereabouts:
    """Where a job is met now, if not where it was to be met first."""

    def __init__(self, job: JobSpec, say: Say) -> None:
        """Nothing is asked yet; ``say`` prints one sentence for people."""
        self._store = store_of(job)
        self._job = job
        self._say = say
        self._moved: tuple[str, int] | None = None
        self._will: Will | None = None
        self._is_known = False  # somebody has had the seat
        self._looked_s = 0.0

    def check(self) -> None:
        """Find the store.

        Raises:
            UsageError: it does not answer.
        """
        if self._store is None:
            return
        try:
            self._note(self._store.look())
        except StoreError as error:
            assert self._job.cluster is not None
            where = ",".join(f"{host}:{port}" for host, port in self._job.cluster.store)
            raise UsageError(f"--controller-store: the store at {where} {error}") from error

    def settle(self, is_here: Callable[[str], bool]) -> bool:
        """Before this node becomes node 0: whether the job is met elsewhere, or will be.

        Args:
            is_here: whether an address is this machine's.
        """
        end_s = time.monotonic() + SETTLE_S
        while (at := self()) is not None and time.monotonic() < end_s:
            is_own = at[1] == self._job.master_port and is_here(at[0])
            if is_own:
                return False
            if _answers(at):
                return True
            time.sleep(KNOCK_S / 2)
        will = self._will
        if at is None and will is not None and will.saved and self._job.dump.resume is None:
            self._say(
                f"run {sanitized(will.job)} of this name has ended before its time; to go on from "
                f"what it saved, add --resume={sanitized(will.saved)}"
            )
        return at is not None or (self._is_known and not is_here(self._job.master_addr))

    def __call__(self) -> tuple[str, int] | None:
        """Host and port; ``None``: where it was to be met first."""
        if self._store is not None and time.monotonic() > self._looked_s + LOOK_S:
            try:
                self._note(self._store.look())
            except StoreError:  # what is known may still be true
                self._looked_s = time.monotonic()
        return self._moved

    def _note(self, found: SeatRecord) -> None:
        self._looked_s, self._will = time.monotonic(), found.will
        self._is_known = bool(found.term)
        before, self._moved = self._moved, None
        if found.seat is not None:
            at = found.seat.address, found.seat.port
            if at != (self._job.master_addr, self._job.master_port):
                self._moved = at
                if at != before:
                    self._say(f"the store says that {sanitized(found.who)} controls this job")


def _own(job: JobSpec) -> Seat:
    assert job.master_port is not None
    return Seat(job.record_id, socket.gethostname(), job.master_addr, job.master_port, os.getpid())


def _answers(at: tuple[str, int]) -> bool:
    try:
        socket.create_connection(at, KNOCK_S).close()
    except (OSError, UnicodeError):
        return False
    return True
