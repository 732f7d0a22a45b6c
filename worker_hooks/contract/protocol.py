"""What processes of one node say to each other: small messages over a local socket.

How they travel is :mod:`worker_hooks.contract.wire`'s business. Messages are named tuples, not
dataclasses: a forkserver is up 20 ms earlier without that import.

    agent -> forkserver    StartWorkers, StartStore, Preload, Spare
    forkserver -> agent    Ready, Forked, ForkFailed, StoreForked
    hooks -> agent         Hello, Registered, Raised, Leaving, ExitRequested, Standing,
                           Frozen, Written, Digested, SaveFailed, Progress, Rejoining, Stack
    agent -> hooks         Welcome, Hold, Proceed, Freeze, Save, Leave, Release, Dismiss, Rejoin,
                           GoOn, Inspect
"""

from __future__ import annotations

from typing import NamedTuple


class WorkerOrder(NamedTuple):
    """How one worker comes to life."""

    rank: int
    argv: tuple[str, ...]
    environ: dict[str, str]  # on top of the forkserver's own
    stdout: str  # a path to append to; empty: the forkserver's own stream
    stderr: str
    cpus: tuple[int, ...] = ()  # empty: no binding


class StartWorkers(NamedTuple):
    """Start these workers, all of one attempt; ``keeps``: those of attempts before live on."""

    attempt: int
    workers: tuple[WorkerOrder, ...]
    keeps: bool = False


class StartStore(NamedTuple):
    """Serve a TCPStore on the listening socket that travels beside this message."""

    attempt: int
    host: str
    port: int


class Preload(NamedTuple):
    """Import these modules now, to be warm for a restart."""

    modules: tuple[str, ...]


class Ready(NamedTuple):
    """The forkserver can fork; ``problem`` says why its warmth must not be used, if so."""

    preload_s: float
    problem: str = ""


class Forked(NamedTuple):
    """A worker's process exists."""

    rank: int
    attempt: int
    pid: int


class ForkFailed(NamedTuple):
    """A worker's process could not be made, or could not become what was ordered."""

    rank: int
    attempt: int
    why: str


class StoreForked(NamedTuple):
    """The store host's process exists; ``pid`` 0 and ``why``: it does not."""

    attempt: int
    pid: int
    why: str = ""


class Protect(NamedTuple):
    """If the agent dies, leave this worker its time to save what it guards and end by itself."""

    pid: int


class Hello(NamedTuple):
    """A training script made its TrainState."""

    rank: int
    attempt: int
    pid: int
    ckpt_save_path: str  # absolute; empty: it saves nothing
    wants_resume: bool  # the script itself asks to go on from the newest checkpoint
    exit_file: str = ""  # absolute: the JSON in which a graceful exit can be asked for
    checkpoints: str = ""  # absolute: where it saves now and then; a resume looks there, too
    breakpoints: str = ""  # the prefix under which an exception's dump is saved there; empty: not


class Welcome(NamedTuple):
    """The agent guards this rank; ``resume``: the folder to go on from, or empty."""

    resume: str
    refusal: str = ""  # why the rank must leave with exit code 2
    fallback: str = ""  # where to save when ckpt_save_path cannot be written
    update_grace_s: float = 10.0
    stall_s: float = 20.0  # a dump without progress for so long is given up
    is_barred: bool = False  # no update may begin before GoOn: peers are still on their way


class Registered(NamedTuple):
    """The state can be saved from now on; the status page's descriptor travels beside."""

    rank: int
    attempt: int
    step: int
    why_fixed: str = ""  # why this rank can join no other group of processes; empty: it can


class Raised(NamedTuple):
    """The main thread is held at its top with an exception (or a failing exit) in its hands."""

    rank: int
    attempt: int
    error: str  # its last line


class Leaving(NamedTuple):
    """The process is about to exit by itself; it waits for Release."""

    rank: int
    attempt: int
    is_done: bool = False  # its training is over


class ExitRequested(NamedTuple):
    """Somebody asked this rank to leave gracefully; that asks for the whole job."""

    rank: int
    attempt: int
    why: str  # ``rank 3 received SIGTERM``


class Hold(NamedTuple):
    """Stay at the end of the step that is under way, and say which one that is."""

    dump_id: int


class Standing(NamedTuple):
    """The rank stays once it has committed ``step``, and begins no later one by itself."""

    rank: int
    attempt: int
    dump_id: int
    step: int


class Proceed(NamedTuple):
    """Go on to the commit of ``step``, which all ranks agreed on, stay there and say Frozen."""

    dump_id: int
    step: int


class Leave(NamedTuple):
    """A graceful exit: all that stay at ``step`` leave with 0 now; nobody needs their state."""

    dump_id: int
    step: int
    reason: str


class Dismiss(NamedTuple):
    """The job is being stopped already: let the signal that was caught end the process."""

    reason: str


class Freeze(NamedTuple):
    """Begin no update; let one that is under way come to its commit, so long at most."""

    dump_id: int
    update_grace_s: float
    step: int = 0  # the newest that any rank committed: whoever is one behind may come to it


class Frozen(NamedTuple):
    """The rank's state stands still: whole as of ``step``, or torn for the reason in ``why``."""

    rank: int
    attempt: int
    dump_id: int
    step: int
    is_whole: bool
    why: str = ""
    nbytes: int = 0  # of the replicated state, about; 0: nobody knows
    host_nbytes: int = 0  # of those, what is not on an accelerator


class Save(NamedTuple):
    """Digest the replicated state as of ``step``; ``parts`` > 0: write part ``part`` of it, too.

    ``folder`` is the dump's folder while it is written (``..._tmp``), made by the agent; of a quick
    one it is the file itself, in memory that is the agent's.
    """

    dump_id: int
    step: int
    folder: str
    part: int = 0
    parts: int = 0
    is_quick: bool = False  # to memory: no checksum, and a digest that only finds accidents
    round: int = 0  # of the dump's orders: the answer repeats it


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


class Digested(NamedTuple):
    """The digest of the whole replicated state."""

    rank: int
    attempt: int
    dump_id: int
    digest: str
    round: int = 0  # of the order that this answers


class SaveFailed(NamedTuple):
    """The shard or the digest could not be made; ``is_place``: the folder's fault, not ours."""

    rank: int
    attempt: int
    dump_id: int
    why: str
    is_place: bool
    round: int = 0  # of the order that this answers


class Progress(NamedTuple):
    """So many bytes are done: a dump is slow, not stuck."""

    rank: int
    attempt: int
    dump_id: int
    nbytes: int


class Release(NamedTuple):
    """Nothing is to be saved any more: go on leaving."""

    reason: str


class Rejoin(NamedTuple):
    """Leave the broken group of processes and go on in a new one, from a checkpoint in memory.

    ``attempt`` is the rank's from now on, ``path`` the checkpoint. Ranks meet at another ``port``:
    who comes late to the old one meets nobody.
    """

    attempt: int
    path: str
    reason: str
    port: int = 0  # 0: the same as before


class Rejoining(NamedTuple):
    """The main thread has left the training function, and is about to enter it again."""

    rank: int
    attempt: int  # the new one


class GoOn(NamedTuple):
    """Every rank has joined: updates may begin."""

    attempt: int


class Inspect(NamedTuple):
    """Write all threads' stacks to the rank's log, and say what the main thread waits for."""

    id: int


class Stack(NamedTuple):
    """Where the main thread stands."""

    rank: int
    attempt: int
    id: int
    is_in_collective: bool
    text: str  # its innermost lines, for people


Message = (
    StartWorkers
    | StartStore
    | Preload
    | Protect
    | Ready
    | Forked
    | ForkFailed
    | StoreForked
    | Hello
    | Welcome
    | Registered
    | Raised
    | Leaving
    | ExitRequested
    | Hold
    | Standing
    | Proceed
    | Leave
    | Dismiss
    | Freeze
    | Frozen
    | Save
    | Written
    | Digested
    | SaveFailed
    | Progress
    | Release
    | Rejoin
    | Rejoining
    | GoOn
    | Inspect
    | Stack
)
