"""What processes of one node say to each other: small messages over a local socket.

A message is one JSON object in one packet of a ``SOCK_SEQPACKET`` Unix socket: the kernel keeps
the borders, several writers do not mix, and a reader never waits for the rest of a message. No
pickle: what arrives can be trusted to be data. File descriptors travel beside a message. Messages
are named tuples, not dataclasses: a forkserver is up 20 ms earlier without that import.

    agent -> forkserver    StartWorkers, StartStore, Preload, Spare
    forkserver -> agent    Ready, Forked, ForkFailed, StoreForked
    hooks -> agent         Hello, Registered, Raised, Leaving, ExitRequested, Standing,
                           Frozen, Written, Digested, SaveFailed, Progress
    agent -> hooks         Welcome, Hold, Proceed, Freeze, Save, Leave, Release, Dismiss
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

PACKET_BYTES = 200_000  # below Linux's default socket buffer (net.core.wmem_default, 212,992)


class ProtocolError(Exception):
    """The peer sent something this version does not know."""


class WorkerOrder(NamedTuple):
    """How one worker comes to life."""

    rank: int
    argv: tuple[str, ...]
    environ: dict[str, str]  # on top of the forkserver's own
    stdout: str  # a path to append to; empty: the forkserver's own stream
    stderr: str
    cpus: tuple[int, ...] = ()  # empty: no binding


class StartWorkers(NamedTuple):
    """Start these workers, all of one attempt."""

    attempt: int
    workers: tuple[WorkerOrder, ...]


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


class Spare(NamedTuple):
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


class Registered(NamedTuple):
    """The state can be saved from now on; the status page's descriptor travels beside."""

    rank: int
    attempt: int
    step: int


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


class Frozen(NamedTuple):
    """The rank's state stands still: whole as of ``step``, or torn for the reason in ``why``."""

    rank: int
    attempt: int
    dump_id: int
    step: int
    is_whole: bool
    why: str = ""


class Save(NamedTuple):
    """Digest the replicated state as of ``step``; ``parts`` > 0: write part ``part`` of it, too.

    ``folder`` is the dump's folder while it is written (``..._tmp``), made by the agent.
    """

    dump_id: int
    step: int
    folder: str
    part: int = 0
    parts: int = 0


class Written(NamedTuple):
    """The shard is on disk, fsynced. ``file`` is relative to the dump's folder."""

    rank: int
    attempt: int
    dump_id: int
    file: str
    nbytes: int
    sha256: str
    digest: str  # of the whole replicated state: equal on all replicas


class Digested(NamedTuple):
    """The digest of the whole replicated state."""

    rank: int
    attempt: int
    dump_id: int
    digest: str


class SaveFailed(NamedTuple):
    """The shard or the digest could not be made; ``is_place``: the folder's fault, not ours."""

    rank: int
    attempt: int
    dump_id: int
    why: str
    is_place: bool


class Progress(NamedTuple):
    """So many bytes are done: a dump is slow, not stuck."""

    rank: int
    attempt: int
    dump_id: int
    nbytes: int


class Release(NamedTuple):
    """Nothing is to be saved any more: go on leaving."""

    reason: str


Message = (
    StartWorkers
    | StartStore
    | Preload
    | Spare
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
)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One packet's bytes.

    Raises:
        ValueError: the message is larger than a packet may be.
    """
    fields = message._asdict()
    if isinstance(message, StartWorkers):
        fields["workers"] = [order._asdict() for order in message.workers]
    packet = json.dumps({"kind": type(message).__name__, **fields}).encode()
    if len(packet) > PACKET_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes is over {PACKET_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """The message in a packet.

    Raises:
        ProtocolError: not a message, or not one this version knows.
    """
    try:
        fields = json.loads(packet)
        kind = _KINDS[fields.pop("kind")]
        if kind is StartWorkers:
            orders = tuple(_order(order) for order in fields["workers"])
            return StartWorkers(int(fields["attempt"]), orders)
        if kind is Preload:
            return Preload(tuple(fields["modules"]))
        message: Message = kind(**fields)
        _check(message)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"unreadable message {packet[:80]!r}: {error!r}") from error
    return message


def _check(message: Message) -> None:
    """Refuse fields of another type than declared: what arrives is used as it is."""
    kind: Any = type(message)  # a class can be hashed
    for declared, value in zip(_declared(kind), message, strict=True):
        if type(value) is not declared and (declared, type(value)) != (float, int):
            raise TypeError(f"{value!r:.40} is no {declared.__name__}")


@cache
def _declared(kind: Any) -> tuple[type, ...]:
    return tuple(get_type_hints(kind).values())


def _order(fields: dict[str, object]) -> WorkerOrder:
    order = WorkerOrder(**fields)  # type: ignore[arg-type]  # a wrong field raises TypeError
    return WorkerOrder(
        order.rank,
        tuple(order.argv),
        dict(order.environ),
        order.stdout,
        order.stderr,
        tuple(order.cpus),
    )


def send(link: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message, with file descriptors beside it.

    Raises:
        OSError: the peer is gone.
    """
    socket.send_fds(link, [encode(message)], list(fds))


def receive(link: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and the descriptors that came with it; ``None`` when the peer is gone.

    Raises:
        ProtocolError: the peer sent something unknown.
        BlockingIOError: the link does not block and holds no message.
    """
    try:
        packet, fds, _flags, _address = socket.recv_fds(link, PACKET_BYTES, 4)
    except ConnectionError:
        return None, []
    try:
        return (decode(packet) if packet else None), fds
    except ProtocolError:
        for fd in fds:
            os.close(fd)
        raise
