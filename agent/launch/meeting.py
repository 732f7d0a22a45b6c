"""The nodes of a job meet, before anything of it starts; then each knows its ranks.

One node listens and decides, the controller's; the others dial it. Which one it is follows from the
node's rank, or else from whose address the meeting point has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from agent.launch import rank_plan, signals
from agent.launch.certificates import TlsConfig, tls_context
from agent.launch.job_token import JobToken
from agent.launch.past import LOST, adopting, from_newer, going_on, resuming_from
from agent.launch.prepare import (
    Prepared,
    StartedForkserver,
    check_before_others,
    prepare,
    start_early,
)
from agent.machine.interfaces import interface_of
from agent.nodes.checkpoint_copy import (
    SEEN_S,
    CheckpointPlace,
    CheckpointServer,
    NewerHere,
    have_checkpoint,
)
from agent.nodes.gather import (
    FIRST_WORD_S,
    NEXT_WORD_S,
    KeptNewer,
    MissingNodesError,
    Past,
    Resuming,
    Succession,
    gather,
)
from agent.nodes.join import (
    LostWhileSpareError,
    NeverBegunError,
    RefusedError,
    Where,
    join,
    nowhere_else,
)
from agent.nodes.line import Line, set_options
from agent.nodes.messages import (
    AskedSize,
    LivingRanks,
    SurvivedStep,
    ToldSettings,
)
from agent.nodes.roster import OwnNode, Roster, WantedNodes
from agent.nodes.run_messages import NodeFacts
from agent.nodes.tls import PLAIN, Security, Tls
from agent.records import run_record
from agent.records.gathering import SPARE, ShownGathering
from agent.records.run_record import KeptRecord
from agent.seat.job_seat import Whereabouts
from agent.seat.records import HeldSeat
from agent.spec.job_spec import (
    ClusterSpec,
    JobSpec,
    NotStartedError,
    StoppedEarlyError,
    UsageError,
)
from agent.spec.spent_budget import SpentBudget
from agent.text.wording import duration, other_world
from agent.workers.master_port import (
    is_loopback,
    is_of_this_host,
    listen,
    listen_for_nodes,
    listen_in_reserve,
    why_unresolved,
)
from worker_hooks.contract.env import TOKEN
from worker_hooks.storage import manifest

OPEN_DOOR = (
    "the nodes have no token: whoever reaches port {} may join the job (set {}, or --token-file)"
)
REGATHER_S = 10.0  # for the nodes of a job that goes on with others, which have just ended it
NAME_LOOK_S = 0.5  # between two questions which host has a name
LATE_S = 30.0  # until a file server shows everywhere what was saved on one node


class Met(NamedTuple):
    """What a node knows once all nodes have met."""

    prepared: Prepared
    roster: Roster
    lines: Mapping[int, Line]  # node rank -> the connection to it; of other nodes only to node 0
    door: socket.socket | None  # where nodes meet, or would if node 0 were lost
    version: str  # of msrun
    token: bytes
    security: Security  # of connections between nodes
    settings: Mapping[str, object]  # what all nodes are told, on the controller's node
    interface: str  # of this machine, at which other nodes are reached; empty: not known
    asked: JobSpec  # the job as it was before they met
    checkpoint: CheckpointServer | None = None  # on node 0: what the job resumes from
    early: StartedForkserver | None = None  # that of a spare node is at work
    held: HeldSeat | None = None  # the controller's seat, which this node has from before


class Continuation(NamedTuple):
    """Node 0 is lost, or the job has another size, and this node takes part in what follows."""

    job: JobSpec  # that begins
    nodes: tuple[NodeFacts, ...]  # of the one that is over
    saved: SurvivedStep | None  # None: this node was a spare one
    door: socket.socket | None
    early: StartedForkserver | None  # of the job that begins
    is_silent: bool = False  # node 0 may be alive
    is_mute: bool = False  # its machine answers, its msrun does not
    token: bytes = b""  # of the job that is over
    expected: int = 0  # on node 0, which is there: so many nodes begin
    past: KeptRecord | None = None  # of the run that is over: shown as alive until all have met
    term: str = ""  # of the controller's seat that is known to count; empty: none
    held: HeldSeat | None = None  # that seat, on node 0
    kept: str = ""  # where the job is saved that is over, on a node which does not go on from there
    without_first: int = 0  # node 0 has left: so many others begin, one of them in its place


class LostControllerError(Exception):
    """Node 0 is lost while this node waits as a spare."""

    def __init__(self, lost: Continuation) -> None:
        super().__init__("node 0 is lost")
        self.lost = lost


class JobOverError(NotStartedError):
    """The job beside which this node has waited has come to its end."""


def meet(
    spec: JobSpec, environ: Mapping[str, str], version: str, say: Callable[[str], None]
) -> Met:
    """Wait until all nodes are here, and prepare the run.

    ``spec``: the job; how many ranks it has, and which are here, is known only then.

    Raises:
        UsageError: the request is wrong, or another node's is.
        NotStartedError: not all nodes came.
        LostControllerError: node 0 is lost while this node waits as a spare.
    """
    cluster = spec.cluster
    assert cluster is not None
    check_before_others(spec, environ)
    folder = run_record.writable_folder(environ)
    layout = rank_plan.run_layout(spec, folder)
    with (
        ShownGathering(folder, layout, spec, environ) as shown,
        signals.raised(spec, shown.asked),
    ):
        return _met(spec, cluster, environ, version, say, shown)


def _met(
    spec: JobSpec,
    cluster: ClusterSpec,
    environ: Mapping[str, str],
    version: str,
    say: Callable[[str], None],
    shown: ShownGathering,
) -> Met:
    whereabouts = Whereabouts(spec, say)
    whereabouts.check()
    may_lead = not is_guest(spec, cluster)  # workers look for their scheduler where it was
    is_moved = may_lead and cluster.by_hand is None and whereabouts.settle(is_of_this_host)
    door = None if is_moved else _door(spec, cluster)
    is_first = shown.leads = door is not None
    if door is None and spec.replace.node_wait_s:
        door = listen_in_reserve(spec.master_addr)
    try:
        side = own_side(spec, environ, version, say, door, is_first=is_first)
        if not is_first:
            with side.token.marked():
                return join_one(side, where=whereabouts, shows=shown.wait)
        side.token.make()
        if not (side.token.read() or cluster.tls_config):
            say(OPEN_DOOR.format(spec.master_port, TOKEN))
        for sentence in cluster.said:
            say(sentence)
        try:
            return gather_all(side, spec.timeouts.start_s, shows=shown.wait)
        except BaseException:
            side.token.forget()
            raise
    except LostControllerError:  # the door is needed now
        raise
    except BaseException:
        if door is not None:
            door.close()
        raise


def await_name(spec: JobSpec, say: Callable[[str], None]) -> None:
    """Wait until it is known here which host MASTER_ADDR names: name servers may be late.

    Whether this is node 0 follows from that; who is not node 0 in any case dials until it is known.

    Raises:
        NotStartedError: it does not become known in time.
    """
    cluster = spec.cluster
    if cluster is None or _is_guest_anywhere(cluster):
        return
    whereabouts = Whereabouts(spec, lambda _: None)  # who joins says it
    begin_s = time.monotonic()
    word_s, patience_s = begin_s + FIRST_WORD_S, spec.timeouts.start_s
    while (why := why_unresolved(spec.master_addr)) and whereabouts() is None:
        now_s = time.monotonic()
        what = f"{spec.master_addr}:{spec.master_port} {why}"
        if patience_s is not None and now_s >= begin_s + patience_s:
            waited = duration(now_s - begin_s)
            raise NotStartedError(f"the job did not begin within {waited}: {what}")
        if now_s >= word_s:
            word_s = now_s + NEXT_WORD_S
            say(f"waiting to begin: {what}")
        time.sleep(NAME_LOOK_S)


class OwnSide(NamedTuple):
    """What a node brings along to meet the others."""

    spec: JobSpec
    environ: Mapping[str, str]  # msrun's
    own: OwnNode
    token: JobToken
    security: Security
    door: socket.socket | None
    say: Callable[[str], None]


def own_side(
    spec: JobSpec,
    environ: Mapping[str, str],
    version: str,
    say: Callable[[str], None],
    door: socket.socket | None,
    *,
    is_first: bool,
    survived: SurvivedStep | None = None,
    known: bytes = b"",
) -> OwnSide:
    """Put it together.

    Args:
        say: prints one sentence for people.
        door: where this node listens; ``None``: nowhere.
        is_first: the others come to it.
        survived: where its job goes on, if that has lost node 0.
        known: the token of that job.

    Raises:
        UsageError: a file that it needs is unfit.
    """
    cluster = spec.cluster
    assert cluster is not None
    own = OwnNode(
        node_rank=cluster.node_rank,
        nproc=spec.nproc,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=spec.given_id,
        record_id=spec.record_id,
        version=version,
        is_spare=cluster.is_spare,
        door=0 if door is None else int(door.getsockname()[1]),
        survived=survived,
        program=program_digest(spec),
        name="" if cluster.by_hand is None else cluster.by_hand.name,
        resumes=cluster.resumes or spec.dump.resume is not None,
        size=AskedSize(cluster.world or 0, cluster.least, cluster.nnodes),
        spent=spec.spent,
        place=cluster.place,
    )
    secured = _security(cluster, environ, say, is_server=is_first)
    token = JobToken(cluster, environ, known)
    return OwnSide(spec, environ, own, token, secured, door, say)


def program_digest(spec: JobSpec) -> str:
    """Stands for what the ranks run, and with which arguments."""
    program = spec.program
    # it may lie elsewhere on another node; but experiments have folders of their own
    where = Path(program.name).absolute().parts[-2:]
    what = (program.kind.value, where, program.args)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def _security(
    cluster: ClusterSpec, environ: Mapping[str, str], say: Callable[[str], None], *, is_server: bool
) -> Security:
    if cluster.tls_config is None:
        return PLAIN
    config = TlsConfig.read(cluster.tls_config)
    return Tls(tls_context(config, environ, say, is_server=is_server))


def is_guest(spec: JobSpec, cluster: ClusterSpec) -> bool:
    """Whether this is surely not the controller's node."""
    if _is_guest_anywhere(cluster):
        return True
    is_decided = cluster.by_hand is not None or cluster.node_rank == 0
    return not (is_decided or is_of_this_host(spec.master_addr))


def _is_guest_anywhere(cluster: ClusterSpec) -> bool:
    """Whether it is none wherever nodes meet."""
    if cluster.by_hand is not None:
        return cluster.by_hand.has_worker
    return cluster.is_spare or cluster.node_rank > 0


def _door(spec: JobSpec, cluster: ClusterSpec) -> socket.socket | None:
    """The listening socket, if this is the controller's node."""
    host, port = spec.master_addr, spec.master_port
    if is_guest(spec, cluster):
        return None
    try:
        return listen_for_nodes(host, port)
    except UsageError:
        if cluster.node_rank == 0:
            raise
        return None  # another msrun on this machine was first


# --- the controller's node ------------------------------------------------------------------------


def gather_all(
    side: OwnSide,
    timeout_s: float | None,
    succession: Succession | None = None,
    early: StartedForkserver | None = None,
    expected: int = 0,
    shows: Callable[[str], object] = lambda _: None,
) -> Met:
    """Wait for the other nodes: this is the controller's.

    Args:
        timeout_s: for how long; ``None``: for ever.
        succession: this node takes the part of a lost one.
        early: its forkserver is at work.
        expected: the job goes on with so many nodes, or with fewer if not all of them come soon.
        shows: takes who is missing, now and then.

    Raises:
        UsageError: the request is wrong, or another node's is.
        NotStartedError: not all nodes came, or the job cannot go on from where it was saved.
        NodeZeroBackError: the nodes meet at node 0 after all.
    """
    spec, environ, own, kept, secured, door, say = side
    token = kept.read()
    assert door is not None
    cluster = spec.cluster
    assert cluster is not None
    resuming = resuming_from(spec) if expected == 0 and succession is None else None
    prepared: list[Prepared] = []
    told: dict[str, object] = {}
    served: list[CheckpointServer] = []

    def take_newer(found: list[KeptNewer]) -> None:
        nonlocal spec
        spec = from_newer(spec, found, secured, say)

    def settings(roster: Roster, past: Past, spent: SpentBudget) -> dict[str, object]:
        """Prepare the run first: if that fails, no other node has begun."""
        if isinstance(past, LivingRanks):
            met = adopting(spec, past, say)
        else:
            count = len(roster.nodes)
            why = f"it goes on with {count} node{'' if count == 1 else 's'}" if expected else LOST
            met = going_on(spec, past, say, why)
        nodes = tuple(node.nproc for node in roster.nodes)
        met = met._replace(nodes=nodes, node_rank=0, spent=spent)
        met = _on_its_host(met, roster)
        prepared.append(prepare(met, environ, listen_for_nodes(spec.master_addr, 0)))
        dump = met.dump
        if dump.resume is not None and cluster.world is None:  # else it was said before
            with contextlib.suppress(ValueError):  # it was read a moment ago
                before = manifest.read(dump.resume).world_size
                if before != met.world_size:
                    say(other_world(before, met.world_size))
        told.update(
            {
                "job_id": met.saves_as,
                "run_id": spec.run_id,
                "store_port": prepared[0].port,
                "max_restarts": spec.max_restarts,
                "resume": None if dump.resume is None else str(dump.resume),
                "resume_step": dump.resume_step,
                "lineage": list(dump.lineage),
                "is_late": False,
                "silence_s": cluster.silence_s,
            }
        )
        if dump.resume is not None:
            with contextlib.suppress(ValueError):  # whoever needs it will say so
                served.append(CheckpointServer(dump.resume, secured))
                told["checkpoint"] = served[0].place.told()
        signals.defer(spec)
        return told

    try:
        gathered = gather(
            door,
            own._replace(node_rank=0),
            WantedNodes(
                cluster.nnodes,
                cluster.world,
                cluster.has_sparse_ranks,
                cluster.least,
                REGATHER_S if expected else cluster.last_call_s,
                expected,
            ),
            token,
            timeout_s,
            say,
            settings,
            cluster.silence_s,
            security=secured,
            succession=succession,
            shows=shows,
            resuming=None if resuming is None else Resuming(resuming, take_newer),
        )
    except BaseException as error:
        for each in served:
            each.close()
        if isinstance(error, MissingNodesError):
            raise NotStartedError(str(error)) from error
        raise
    reached = [line.connection.getsockname()[0] for line in gathered.lines.values()]
    # another msrun on this host is no other machine
    here = min(reached, key=is_loopback, default="")
    return Met(
        prepared[0],
        gathered.roster,
        gathered.lines,
        door,
        own.version,
        token,
        secured,
        told,
        interface_of(here),
        spec,
        served[0] if served else None,
        early,
    )


def _on_its_host(spec: JobSpec, roster: Roster) -> JobSpec:
    """With its local ranks, if each worker has an msrun of its own, several on one machine."""
    if spec.cluster is None or spec.cluster.by_hand is None:
        return spec
    own = roster.nodes[spec.node_rank]
    there = [each for each in roster.nodes if (each.host, each.address) == (own.host, own.address)]
    ends = (each.local_first + each.nproc for each in there)
    return spec._replace(local_first=own.local_first, local_world=max(ends))


# --- the other nodes ------------------------------------------------------------------------------


def join_one(
    side: OwnSide,
    started: StartedForkserver | None = None,
    *,
    is_once: bool = False,
    where: Where = nowhere_else,
    shows: Callable[[str], object] = lambda _: None,
) -> Met:
    """Take part in the job whose nodes meet at its MASTER_ADDR: this is none of them yet.

    ``started``: its forkserver is at work already. ``is_once``: whether to dial only once.
    ``where``: knows where they meet instead, if that has changed. ``shows``: takes who is missing.

    Raises:
        UsageError: the request is wrong.
        NotStartedError: the job does not take this node, or did not begin in time.
        NobodyThereError: dialling once came to nothing.
        LostControllerError: node 0 is lost while this node waits as a spare.
    """
    spec, environ, own, token, secured, door, say = side
    assert spec.master_port is not None
    first, dialled = spec, spec

    def turned() -> tuple[str, int] | None:
        nonlocal dialled
        at = where()
        dialled = first if at is None else _moved(first, *at)
        return at

    kept, early = NewerHere(secured), [] if started is None else [started]

    def waits_as_spare() -> None:
        say(SPARE)
        shows(SPARE)
        if not early:
            early.append(start_early(spec, environ))

    try:
        joined = join(
            spec.master_addr,
            spec.master_port,
            own,
            token.read,
            spec.timeouts.start_s,
            say,
            spec.silence_s,
            waits_as_spare,
            security=secured,
            is_once=is_once,
            late_s=LATE_S if token.is_own and not is_once else 0.0,  # else it is known for long
            where=turned,
            shows=shows,
            seek=kept.answer,
        )
    except LostWhileSpareError as error:
        say(error.why)
        lost = Continuation(dialled, error.nodes, None, door, early[-1], token=token.read())
        lost = lost._replace(is_mute=error.is_mute)
        raise LostControllerError(lost) from error
    except RefusedError as error:
        raise _refusal(error) from error
    except NeverBegunError as error:
        raise NotStartedError(str(error), error.exit_code) from error
    finally:
        kept.close()
    spec = dialled
    signals.defer(spec)
    try:
        cluster = spec.cluster
        is_new = cluster is not None and cluster.home is not None  # saved a moment ago
        if (place := CheckpointPlace.read(joined.settings.get("checkpoint"))) is not None:
            host, patience_s = joined.line.connection.getpeername()[0], SEEN_S if is_new else 0.0
            have_checkpoint(place, host, secured, say, patience_s, spec.dump.keep)
        told = ToldSettings.read(joined.settings)
        set_options(joined.line.connection, told.silence_s)
        if cluster is not None:
            spec = spec._replace(cluster=cluster._replace(silence_s=told.silence_s))
        met = spec._replace(
            nodes=tuple(node.nproc for node in joined.roster.nodes),
            node_rank=joined.node_rank,
            job_id=told.job_id,
            run_id=told.run_id,
            max_restarts=told.max_restarts,
            dump=spec.dump._replace(
                resume=told.resume, resume_step=told.resume_step, lineage=told.lineage
            ),
        )
        met = _on_its_host(met, joined.roster)
        prepared = prepare(met, environ, listen("127.0.0.1", 0))
        prepared = prepared._replace(store_port=told.store_port, is_late=told.is_late)
    except BaseException:
        joined.line.connection.close()
        raise
    return Met(
        prepared,
        joined.roster,
        {0: joined.line},
        door,
        own.version,
        token.read(),
        secured,
        joined.settings,
        interface_of(joined.line.connection.getsockname()[0]),
        spec,
        early=early[-1] if early else None,
    )


def _refusal(error: RefusedError) -> NotStartedError:
    if error.is_over:
        return JobOverError(error.why, error.exit_code)
    if (signum := error.exit_code - 128) > 0:  # it has stopped the job
        return StoppedEarlyError(error.why, signum)
    return NotStartedError(error.why, error.exit_code)


def _moved(spec: JobSpec, host: str, port: int) -> JobSpec:
    """The job where its nodes meet by now; its name in the store stays."""
    cluster = spec.cluster
    assert cluster is not None
    cluster = cluster._replace(node_rank=-1, home=spec.home)
    return spec._replace(master_addr=host, master_port=port, cluster=cluster)
