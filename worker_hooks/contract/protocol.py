"""The messages between the processes of one node.

:mod:`worker_hooks.contract.wire` sends them. Messages are named tuples, not dataclasses: without
that import a forkserver is ready 20 ms earlier.

    agent -> forkserver    StartWorkers, StartStore, Preload, ProtectWorker
    forkserver -> agent    Ready, Forked, ForkFailed, StoreForked
    hooks -> agent         Hello, Registered, PageWritten, Fingerprinted, Unprotected, Raised,
                           Leaving, ExitRequested, Standing, Frozen, Written, Digested, SaveFailed,
                           Progress, Rejoining, Stack, VoteOpened, Copied, NotesMeasured
    agent -> hooks         Welcome, Hold, Proceed, Freeze, Save, Leave, Release, Dismiss, Rejoin,
                           GoOn, Inspect, PeerPages, Replicated, NotShared, OpenVote, Copy,
                           SaveAlone, EndNotes
    shadows -> agent       ShadowPageWanted, ShadowMade, ShadowRefused, Forked, ForkFailed
    agent -> shadows       ShadowPage, WakeShadow
"""

from __future__ import annotations

from typing import NamedTuple


class WorkerOrder(NamedTuple):
    """How one worker is started."""

    rank: int
    argv: tuple[str, ...]
    environ: dict[str, str]  # on top of the forkserver's own
    stdout: str  # a path to append to; empty: the forkserver's own stream
    stderr: str
    cpus: tuple[int, ...] = ()  # empty: no binding


class StartWorkers(NamedTuple):
    """Start these workers, all of one attempt; ``keeps``: earlier attempts' workers stay alive."""

    attempt: int
    workers: tuple[WorkerOrder, ...]
    keeps: bool = False


class StartStore(NamedTuple):
    """Serve a TCPStore on the listening socket that travels beside this message."""

    attempt: int
    host: str
    port: int


class Preload(NamedTuple):
    """Import these modules now, for a later restart."""

    modules: tuple[str, ...]


class Ready(NamedTuple):
    """The forkserver can fork; ``problem``: why it must not be used, if so."""

    preload_s: float
    problem: str = ""


class Forked(NamedTuple):
    """A worker's process exists."""

    rank: int
    attempt: int
    pid: int


class ForkFailed(NamedTuple):
    """A worker's process could not be forked, or could not be set up as ordered."""

    rank: int
    attempt: int
    why: str


class StoreForked(NamedTuple):
    """The store host's process exists; ``pid`` 0 and ``why``: it does not."""

    attempt: int
    pid: int
    why: str = ""


class ProtectWorker(NamedTuple):
    """If the agent dies, give this worker the time to save its state and to exit by itself."""

    pid: int


class Hello(NamedTuple):
    """A training script has made its TrainState."""

    rank: int
    attempt: int
    pid: int
    ckpt_save_path: str  # absolute; empty: it saves nothing
    wants_resume: bool  # the script itself asks to resume from the newest checkpoint
    exit_file: str = ""  # absolute: the JSON in which a graceful exit can be requested
    checkpoints: str = ""  # absolute: of periodic checkpoints; a resume looks there, too
    breakpoints: str = ""  # their prefix, if an exception's dump is saved there; empty: not


def runs_of(lineage: str) -> tuple[str, ...]:
    """The record ids of a lineage, which are joined by ":"."""
    return tuple(filter(None, lineage.split(":")))


class Welcome(NamedTuple):
    """The agent guards this rank; ``resume``: the folder to resume from, or empty.

    ``folder``: if that is in memory, and being written, where it will be; a replacement has none.
    """

    resume: str
    refusal: str = ""  # why the rank must exit with code 2
    fallback: str = ""  # where to save when ckpt_save_path cannot be written
    update_grace_s: float = 10.0
    stall_s: float = 20.0  # a dump without progress for this long is given up
    is_barred: bool = False  # no update may begin before GoOn: peers have not joined yet
    lineage: str = ""  # record ids of the runs that this one resumed, newest first, joined by ":"
    resumed_step: int = 0  # of those runs, that this one began from
    folder: str = ""


class Registered(NamedTuple):
    """The state can be saved from now on; the status page's descriptor is attached."""

    rank: int
    attempt: int
    step: int
    not_replaceable_why: str = ""  # why this rank cannot join a new process group; empty: it can
    compares: bool = False  # it says Fingerprinted at its first commits
    rehearses: bool = False  # a new rank in its place has to run its script alone, up to run()
    not_copied_why: str = ""  # why its state cannot be copied to the agent's memory; empty: it can
    keeper: int = 0  # the process that keeps its memory when it is killed; 0: there is none
    board: int = 0  # an address there, see machine.kept_memory
    not_kept_why: str = ""  # why there is none, if it was wanted


class NotesMeasured(NamedTuple):
    """What it costs the rank to note where its state lies in its memory, which a keeper keeps.

    Medians, in seconds, of a note and of the step it belongs to; told now and then.
    """

    rank: int
    attempt: int
    cost_s: float = 0.0
    step_s: float = 0.0
    why_not: str = ""  # why what it notes can never be read; empty: it can


class EndNotes(NamedTuple):
    """Note no more where the state lies, and end the keeper; ``why``: for people."""

    why: str


class PageWritten(NamedTuple):
    """The record of the step under way is on the page, for a node that keeps no pages.

    Only ranks of jobs on several nodes say it: nothing on a node outlives that. ``ready``: the step
    whose update needs nothing more of this rank; 0: it does not say.
    """

    rank: int
    attempt: int
    ready: int = 0


class Fingerprinted(NamedTuple):
    """What the rank holds as of its commit ``step``, to be compared with what the others hold."""

    rank: int
    attempt: int
    step: int
    texts: dict[str, str]  # as worker_hooks.contract.fingerprint
    is_late: bool = False  # only of parts that did not exist at the rank's first commits
    problem: str = ""  # why the state cannot be compared, nor saved
    holds: str = ""  # what it was compared of, as text: ``3 modules, 1 optimizer``
    is_again: bool = False  # all of it, behind the first commits: ranks may train apart by now


class Raised(NamedTuple):
    """The main thread is held at the top level, with an exception or a failing exit."""

    rank: int
    attempt: int
    error: str  # its last line
    is_futile: bool = False  # a new rank in its place would fail, too


class CheckpointCompleted(NamedTuple):
    """A checkpoint that ranks save by themselves is complete: it must be there from now on."""

    rank: int
    attempt: int
    step: int
    path: str  # its folder


class Unprotected(NamedTuple):
    """Something of the script's cannot be restored; said before training begins."""

    rank: int
    attempt: int
    text: str  # one sentence, for people
    is_refused: bool = False  # so it does not train: ``--strict``


class Leaving(NamedTuple):
    """The process is about to exit by itself; it waits for Release."""

    rank: int
    attempt: int
    is_done: bool = False  # its training is over


class ExitRequested(NamedTuple):
    """The rank got a request for a graceful exit, which concerns the whole job."""

    rank: int
    attempt: int
    why: str  # ``rank 3 received SIGTERM``


class Hold(NamedTuple):
    """Stop at the end of the current step, and report which one that is."""

    dump_id: int


class Standing(NamedTuple):
    """The rank stops once it has committed ``step``, and begins no later one by itself."""

    rank: int
    attempt: int
    dump_id: int
    step: int


class Proceed(NamedTuple):
    """Train to the commit of ``step``, which all ranks share, stop there and answer Frozen."""

    dump_id: int
    step: int


class Leave(NamedTuple):
    """A graceful exit: ranks that stopped at ``step`` exit with 0; their state is not needed."""

    dump_id: int
    step: int
    reason: str


class Dismiss(NamedTuple):
    """The job is being stopped: let the caught signal end the process."""

    reason: str


class Freeze(NamedTuple):
    """Begin no update; one in progress may reach its commit within the grace time.

    It may come again with a newer ``step``, for a rank that is frozen before that.
    """

    dump_id: int
    update_grace_s: float
    step: int = 0  # the newest that any rank committed: a rank behind it may reach it


class Frozen(NamedTuple):
    """The rank's state no longer changes: whole as of ``step``, or torn because of ``why``."""

    rank: int
    attempt: int
    dump_id: int
    step: int
    is_whole: bool
    why: str = ""
    nbytes: int = 0  # of the replicated state, about; 0: unknown
    host_nbytes: int = 0  # of those, how many are not on an accelerator
    limit: int = 0  # the order's newest step, which this rank might reach


class Save(NamedTuple):
    """Digest the replicated state as of ``step``; ``parts`` > 0: write part ``part`` of it, too.

    ``folder`` is the unfinished folder (``..._tmp``), made by the agent; of a quick dump it is the
    file itself, in the agent's memory.
    """

    dump_id: int
    step: int
    folder: str
    part: int = 0
    parts: int = 0
    is_quick: bool = False  # to memory: no checksum, and a digest that only finds accidents
    round: int = 0  # of the dump's orders: the answer repeats it
    share: int = 0  # which of the state's parts that the rank holds: the answer repeats it
    without: list[str] = []  # noqa: RUF012  names of what is in none but others of these


class Written(NamedTuple):
    """The shard is on disk, fsynced. ``file`` is relative to the dump's folder."""

    rank: int
    attempt: int
    dump_id: int
    file: str
    nbytes: int
    sha256: str
    digest: str  # of the whole replicated state: equal on all replicas
    round: int = 0  # of the order that this answers
    share: int = 0  # of the same


class Digested(NamedTuple):
    """The digest of the whole replicated state."""

    rank: int
    attempt: int
    dump_id: int
    digest: str
    round: int = 0  # of the order that this answers
    share: int = 0  # of the same


class SaveFailed(NamedTuple):
    """The shard or the digest could not be made; ``is_place``: because of the folder."""

    rank: int
    attempt: int
    dump_id: int
    why: str
    is_place: bool
    round: int = 0  # of the order that this answers
    share: int = 0  # of the same


class Progress(NamedTuple):
    """A sign that a dump is slow, not stuck: ``nbytes`` are done."""

    rank: int
    attempt: int
    dump_id: int
    nbytes: int


class Release(NamedTuple):
    """Nothing more will be saved: continue to exit."""

    reason: str


class SaveAlone(NamedTuple):
    """The job's controller, on another node, is gone: save as if msrun had died, and exit.

    ``is_proven``: its msrun has ended; else it is only not heard. ``path``: what this node has of
    the newest dump in memory; other ranks may have been told to resume from it.
    """

    why: str
    is_proven: bool = False
    path: str = ""


class Rejoin(NamedTuple):
    """Leave the broken process group and resume in a new one, from a dump in memory.

    ``attempt`` is the rank's attempt from now on, ``path`` the dump. Ranks meet at another
    ``port``: a rank that is late at the old port finds no peers there.
    """

    attempt: int
    path: str
    reason: str
    port: int = 0  # 0: the same as before
    host: str = ""  # where that is; empty: the same as before


class Rejoining(NamedTuple):
    """The main thread has left the training function and is about to enter it again."""

    rank: int
    attempt: int  # the new one


class BringMemory(NamedTuple):
    """Bring the tensors of a partial dump in memory to this node. Answered by MemoryBrought."""

    rank: int
    attempt: int
    inode: int  # of one of its files, which the rank has open: a path may be another dump's by now
    variants: list[int] = []  # noqa: RUF012  of which states


class MemoryBrought(NamedTuple):
    """They are there, or cannot be brought because of ``why_not``. It may come unasked."""

    inode: int
    why_not: str = ""
    absent: list[int] = []  # noqa: RUF012  the states whose tensors are still not there


class GoOn(NamedTuple):
    """Every rank has joined: updates may begin."""

    attempt: int


class PeerPages(NamedTuple):
    """What a rank needs of others if the agent dies; their status pages travel beside this.

    Without ranks: what it has of other nodes is kept elsewhere now.
    """

    ranks: list[int]
    pids: list[int]  # of the same ranks; 0: on another node, of which this is a copy


class Replicated(NamedTuple):
    """Whose state a rank may save if the agent dies: that of those that hold the same.

    ``why_not``: it may not, as nobody knows who does, or all would save into different folders;
    empty: it may. ``alike``: these ranks, with itself; none: nobody knows.

    ``parts``: what it holds if it holds some of it alike with other ranks than the rest, by the
    ranks that hold each part; ``without``: for each the names of what it holds besides; ``total``:
    how many parts the state of all ranks has.
    """

    why_not: str
    alike: list[int] = []  # noqa: RUF012  never changed
    parts: list[list[int]] = []  # noqa: RUF012
    without: list[list[str]] = []  # noqa: RUF012
    total: int = 0


class NotShared(NamedTuple):
    """A folder is another one on each node: what takes files of all ranks is never complete there.

    ``why``: a sentence without its full stop.
    """

    folder: str
    why: str


class OpenVote(NamedTuple):
    """Ranks hold different parts of the state: vote on each update.

    The descriptor of :mod:`worker_hooks.contract.vote_board` travels beside this; on several nodes
    that of :mod:`worker_hooks.contract.clearance_board`, also where ranks are replicas.
    """

    is_over_nodes: bool = False
    is_cut: bool = True  # ranks hold different parts


class VoteOpened(NamedTuple):
    """The rank votes from now on, or waits for clearances; ``step``: its newest commit.

    ``why_not``: it does not, and begins its updates by itself; empty: it does. ``why_cut_inside``:
    why it can join no new process group, as only its training has shown; empty: it can.
    """

    rank: int
    attempt: int
    step: int
    why_not: str = ""
    why_cut_inside: str = ""
    is_cut: bool = True  # as in the order


class Copy(NamedTuple):
    """Copy the state as of the commit of ``step`` into the agent's memory, before the next update.

    Part ``part`` of ``parts`` of what replicas hold the same goes to the file ``state``, private
    state to ``private``. Both may hold an older and longer copy. Answered by Copied. The node's
    agent has these files in the set ``files``, and the newest complete copy in the set ``newest``;
    0: there is none.
    """

    step: int
    state: str
    private: str
    part: int
    parts: int
    files: int = 0
    newest: int = 0


class Copied(NamedTuple):
    """The state as of ``step`` is in the agent's memory, or is not because of ``why_not``.

    ``digest``: of the whole replicated state, like that of a quick dump. ``is_final``: this rank's
    state can never be copied.
    """

    rank: int
    attempt: int
    step: int
    nbytes: int = 0
    private_nbytes: int = 0
    digest: str = ""
    epoch: int = 0  # from 1
    batch: int = 0
    cpu_s: float = 0.0  # of the processor; how long it kept an update waiting is not known
    why_not: str = ""
    is_final: bool = False
    files: int = 0  # as the order said


class Inspect(NamedTuple):
    """Write all threads' stacks to the rank's log, and answer Stack."""

    id: int


class Stack(NamedTuple):
    """What the main thread is doing."""

    rank: int
    attempt: int
    id: int
    is_in_collective: bool
    text: str  # its innermost lines, for people
    is_at_prompt: bool = False  # in a debugger, or for input: it waits for a person


class ShadowPageWanted(NamedTuple):
    """A rank that makes copies asks where it is told at which steps."""

    rank: int
    attempt: int


class ShadowPage(NamedTuple):
    """The file that says that travels beside this message."""

    attempt: int


class ShadowMade(NamedTuple):
    """A sleeping copy of a rank exists, as the rank was after an optimizer step."""

    rank: int
    attempt: int
    step: int  # optimizer steps since the script began
    pid: int
    collectives: dict[str, int]  # that the rank has begun, by the name of their group
    seconds: float  # that the rank needed before the copy was made


class ShadowRefused(NamedTuple):
    """No copy of a rank can be made at an optimizer step."""

    rank: int
    attempt: int
    step: int
    why: str
    is_guarded: bool = False  # by the script's own TrainState


class WakeShadow(NamedTuple):
    """Fork the rank's process of a new attempt, which answers Forked."""

    attempt: int
    environ: dict[str, str]  # what changes in it
    stdout: str  # a path to append to; empty: the stream it has
    stderr: str


# fmt: off
Message = (
    StartWorkers | StartStore | Preload | ProtectWorker | Ready | Forked | ForkFailed | StoreForked
    | Hello | Welcome | Registered | NotesMeasured | EndNotes | PageWritten | Fingerprinted
    | CheckpointCompleted | Unprotected | Raised | Leaving | ExitRequested | Hold | Standing
    | Proceed | Leave | Dismiss
    | Freeze | Frozen | Save | Written | Digested | SaveFailed | Progress | Release | SaveAlone
    | Rejoin | Rejoining | BringMemory | MemoryBrought | GoOn | PeerPages | Replicated | NotShared
    | OpenVote | VoteOpened | Copy | Copied | Inspect | Stack | ShadowPageWanted | ShadowPage
    | ShadowMade | ShadowRefused | WakeShadow
)
# fmt: on
