"""Nodes of a job without a process on them: they say what the msruns of real ones would say.

    fake_nodes.py PORT COUNT NPROC FIRST FOLDER BEAT_S

Each has a connection of its own to node 0. What it does is a script: it joins, its ranks start,
register, train, lose their peer when one dies, and answer what they are asked at once. On standard
input come the ranks that die, on standard output go lines of what all ranks here have come to:
``joined``, ``trained`` and ``on`` with the attempt; and how many heartbeats they have sent by then.

Thousands of them share a machine with node 0, whose time is what counts. So nothing is checked
here, what several ranks of a node say alike is said at once, as real nodes do, and what no fake
needs to know is not even read.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from signal import SIGKILL
from time import monotonic_ns
from typing import Any

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.heartbeats import BEAT_S, MANY_NODES, RARE_BEAT_S
from agent.machine.process_use import ProcessNews
from agent.nodes.alike import said_alike
from agent.nodes.codec import pack_event
from agent.nodes.frames import PREAMBLE, FrameReader, message_of
from agent.nodes.line import RECEIVE_BYTES, bytes_of
from agent.nodes.messages import ANY_RANK, Admitted, AwaitedNodes, Challenge, Join, unpack
from agent.nodes.run_messages import (
    Beats,
    Fact,
    FromRank,
    MemoryTaken,
    PageNews,
    PageSeen,
    RunMessage,
    SweptNode,
    pack_said,
)
from agent.nodes.tls import PLAIN
from agent.nodes.transfer import asked, give
from agent.text.ranges import parse_increasing
from msrun import __version__
from worker_hooks.contract import protocol
from worker_hooks.contract.packed_page import packed
from worker_hooks.contract.status_page import MAGIC, Entry, Page, Phase, create
from worker_hooks.storage.manifest import PRIVATE

HOST = "127.0.0.1"
AT_ONCE = 32  # nodes of this process that are about to join
GENERATOR = Entry("rng.torch", "U8", (5056,), 5056)  # what torch's generator takes
STATE = bytes(1 << 16)  # the replicated one
DIGEST = "a" * 32
LOST_PEER = "RuntimeError: Connection closed by peer [10.0.0.7]:41022"
UNUSED = b'{"kind":"ShownStatus"'
BESIDE = 1 << 30  # in a frame's length: bytes follow its JSON, see agent.nodes.frames
HOLDS = {"model": "12 parts", "crc32": "abcdef"}
INTERRUPTED = {each.value for each in JobState if each.is_interrupted}
RARE = RARE_BEAT_S / BEAT_S
_OF = struct.Struct("<II")  # whose page it is: rank, attempt


class Crowd:
    """All nodes of this process."""

    def __init__(
        self, nproc: int, folder: Path, count: int, beat_s: float, *, are_many: bool
    ) -> None:
        self.beat_s = beat_s  # between two heartbeats of a node
        self.are_many = are_many  # nodes of the job
        self.nproc = nproc
        self.folder = folder
        self.count = count
        self.nodes: dict[int, FakeNode] = {}  # by their ranks
        self.threads = ThreadPoolExecutor(4)
        self.beats = 0  # that were sent
        self._reached: Counter[str] = Counter()
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()

    def reached(self, what: str) -> None:
        """A rank, or a node, has come there: say so once all have."""
        self._reached[what] += 1
        most = self.count * (1 if what == "joined" else self.nproc)
        if self._reached[what] == most:
            print(f"{what}, {self.beats}", flush=True)

    def do(self, work: Callable[..., None], *about: object) -> None:
        """In a thread; what goes wrong there ends all."""

        def done(future: Future[None]) -> None:
            if error := future.exception():
                print(repr(error), file=sys.stderr, flush=True)
                self.loop.call_soon_threadsafe(self.over.set)

        self.threads.submit(work, *about).add_done_callback(done)

    def strike(self) -> None:
        """Ranks die, as standard input says."""
        for word in os.read(sys.stdin.fileno(), 1 << 16).split() or [b""]:
            if not word:
                self.over.set()
                return
            rank = int(word)
            if node := self.nodes.get(rank // self.nproc + 1):
                node.die(rank)


class FakeNode:
    """One node."""

    def __init__(
        self,
        crowd: Crowd,
        rank: int,
        connection: socket.socket,
        reader: FrameReader[dict[str, object]],
    ) -> None:
        self._crowd = crowd
        first = (rank - 1) * crowd.nproc
        self._ranks = range(first, first + crowd.nproc)
        self._attempt = 0
        self._step = 0
        self._dead: set[int] = set()
        self._connection = connection
        self._unread = reader.rest()
        self._unsent = b""
        crowd.loop.add_reader(connection, self._read)
        crowd.loop.call_soon(self._take, b"")
        self._beat_s, self._told_s = crowd.beat_s, crowd.loop.time()
        # not all nodes of a cluster were started in the same moment
        self._beats = crowd.loop.call_later(crowd.beat_s * (1 + rank % 100 / 100), self._tell_beats)
        self._rank = rank

    def die(self, rank: int) -> None:
        """A rank is killed."""
        self._dead.add(rank)
        self._happened(ev.WorkerExited(rank, self._attempt, -SIGKILL))
        self._flush()

    def _lose(self) -> None:
        if not self._crowd.over.is_set():
            print(f"node {self._rank} has lost node 0", file=sys.stderr, flush=True)
        self._close()

    def _close(self) -> None:
        self._beats.cancel()
        self._crowd.loop.remove_reader(self._connection)
        self._crowd.loop.remove_writer(self._connection)
        self._connection.close()
        self._crowd.over.set()

    # --- what it says ---------------------------------------------------------------------------

    def _send(self, message: RunMessage) -> None:
        self._unsent += bytes_of(message)

    def _flush(self) -> None:
        """Send what was said."""
        if not self._unsent or self._connection.fileno() < 0:
            return
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._crowd.loop.add_writer(self._connection, self._flush)
        else:
            self._crowd.loop.remove_writer(self._connection)

    def _happened(self, event: ev.Event) -> None:
        self._send(Fact(pack_event(event)))

    def _say(self, said: protocol.Message) -> None:
        self._send(FromRank(pack_said(said)))

    def _all_say(self, ranks: Sequence[int], said: protocol.Message) -> None:
        """``said``: by the first of these ranks."""
        alike = ranks if len(ranks) < len(self._ranks) else ()
        self._send(said_alike(alike, pack_said(said)))

    def _tell_beats(self) -> None:
        """All ranks are a step further."""
        self._told_s = self._crowd.loop.time()
        self._beats = self._crowd.loop.call_later(self._beat_s, self._tell_beats)
        self._crowd.beats += 1
        alive = tuple(rank for rank in self._ranks if rank not in self._dead)
        octets = monotonic_ns().to_bytes(8, "little") + _beats(self._step, alive)
        self._send(Beats(octets))
        self._flush()

    def _set_beats(self, state: str) -> None:
        """As a real node does: more rarely while the ranks wait, if the nodes are many."""
        is_rare = state in INTERRUPTED and self._crowd.are_many
        before_s, self._beat_s = self._beat_s, self._crowd.beat_s * (RARE if is_rare else 1)
        if self._beat_s != before_s:
            soon_s = min(self._beats.when(), self._crowd.loop.time() + self._beat_s)
            when_s = max(self._told_s + self._beat_s, soon_s)
            self._beats.cancel()
            self._beats = self._crowd.loop.call_at(when_s, self._tell_beats)

    # --- what node 0 says -----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(data)
        else:
            self._lose()

    def _take(self, data: bytes) -> None:
        data = self._unread + data
        at = 0
        while len(data) >= at + 4:
            length = int.from_bytes(data[at : at + 4], "big")
            body, end = at + 4, at + 4 + (length & ~BESIDE)
            if len(data) < end:
                break
            if not data.startswith(UNUSED, body):
                stop = end
                if length & BESIDE:
                    body, stop = body + 4, body + 4 + int.from_bytes(data[body : body + 4], "big")
                self._hear(json.loads(data[body:stop]))
            at = end
        self._unread = data[at:]
        self._flush()

    def _hear(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "JobKnown":
                self._attempt = message["attempt"]
                self._set_beats(message["state"])
            case "Order":
                self._obey(message["action"])
            case "ToRank":
                self._answer((message["rank"],), message["message"])
            case "ToRanks":
                self._answer(_numbers(message["ranks"]) or self._ranks, message["message"])
            case "SaveHere":  # the state is small: they only say what they hold
                for group in message["groups"]:
                    self._answer(_numbers(group), message["message"])
            case "SaveFar":
                self._crowd.do(self._give, message)
            case "TakeMemory":
                self._have(message)
            case "Ended":
                self._close()
            case _:
                pass

    def _obey(self, action: dict[str, Any]) -> None:
        match action["kind"]:
            case "StartAttempt":
                self._start(self._ranks)
            case "ReplaceRanks":
                newcomers = [one for one in _numbers(action["newcomers"]) if one in self._ranks]
                self._dead -= set(newcomers)
                self._start(newcomers)
            case "SignalRanks":
                for rank in _numbers(action["ranks"]):
                    self._dead.add(rank)
                    self._happened(ev.WorkerExited(rank, self._attempt, -action["signum"]))
            case "Sweep":
                self._send(SweptNode(self._attempt, ()))
            case _:
                pass

    def _have(self, order: dict[str, Any]) -> None:
        if order["key"]:
            self._crowd.do(self._fetch, order)
        else:  # all that is needed at once has come with the order
            self._send(MemoryTaken(order["path"]))

    def _start(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._happened(ev.WorkerStarted(rank, self._attempt, 1000 + rank))
        for rank in ranks:
            folder = str(self._crowd.folder)
            self._say(protocol.Hello(rank, self._attempt, 1000 + rank, folder, wants_resume=False))

    def _answer(self, ranks: Sequence[int], order: dict[str, Any]) -> None:
        """What several ranks are told they answer alike."""
        first, attempt, step = ranks[0], self._attempt, self._step
        match order["kind"]:
            case "Welcome":
                self._register(ranks)
                if not order["is_barred"]:
                    self._train(ranks)
            case "Freeze":
                self._all_say(ranks, protocol.Raised(first, attempt, LOST_PEER))
                for rank in ranks:
                    self._send(PageNews.of(rank, attempt, _news(step)))
                frozen = protocol.Frozen(
                    first,
                    attempt,
                    order["dump_id"],
                    step,
                    is_whole=True,
                    nbytes=len(STATE),
                    host_nbytes=len(STATE),
                )
                self._all_say(ranks, frozen)
            case "Save":
                if not order["is_quick"]:
                    raise RuntimeError("the ranks are not replaced")
                about = order["dump_id"], DIGEST, order["round"]
                self._all_say(ranks, protocol.Digested(first, attempt, *about))
            case "Rejoin":
                self._all_say(ranks, protocol.Rejoining(first, order["attempt"]))
                self._register(ranks)
            case "GoOn":
                for _ in ranks:
                    self._crowd.reached(f"on {attempt}")
                self._train(ranks)
            case _:
                pass

    def _register(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            page = _page_of(rank, self._attempt, self._step)
            self._send(PageSeen.of(rank, self._attempt, page))
            said = protocol.Registered(rank, self._attempt, self._step, "", compares=True)
            self._all_say((rank,), said)

    def _train(self, ranks: Sequence[int]) -> None:
        """Two steps, of which all ranks report what they hold then."""
        for step in (self._step + 1, self._step + 2):
            about = self._attempt, step, HOLDS
            self._all_say(ranks, protocol.Fingerprinted(ranks[0], *about, holds="12 parts"))
        if self._ranks[-1] in ranks:
            self._step += 2
        for _ in ranks:
            self._crowd.reached(f"trained {self._attempt}")

    # --- in threads -----------------------------------------------------------------------------

    def _soon(self, call: Callable[[], None]) -> None:
        def then() -> None:
            call()
            self._flush()

        self._crowd.loop.call_soon_threadsafe(then)

    def _give(self, order: dict[str, Any]) -> None:
        save, rank = order["message"], order["rank"]
        size = len(STATE) // save["parts"]
        file = os.memfd_create("fake-state")
        os.write(file, STATE[:size])
        with open(file, "rb") as readable:
            readable.seek(0)
            give(HOST, order["port"], bytes.fromhex(order["key"]), readable, lambda _: None)
        written = protocol.Written(
            rank, self._attempt, save["dump_id"], "", size, "", DIGEST, save["round"]
        )
        self._soon(lambda: self._say(written))

    def _fetch(self, order: dict[str, Any]) -> None:
        """Take all of it, and keep nothing: many nodes are one process here."""
        shards = json.loads(order["manifest"])["shards"]
        left = sum(each["nbytes"] for each in shards if each["kind"] == PRIVATE)
        shared = [each["nbytes"] for each in shards if each["kind"] != PRIVATE]
        left += sum(_numbers(order["heads"]) or shared)
        with asked(HOST, order["port"], bytes.fromhex(order["key"]), PLAIN) as connection:
            while left:
                data = connection.recv(min(left, RECEIVE_BYTES))
                assert data, "the checkpoint is cut short"
                left -= len(data)
        self._soon(lambda: self._send(MemoryTaken(order["path"])))


def _numbers(ranges: str | list[int]) -> Sequence[int]:
    return parse_increasing(ranges, 1 << 20) if isinstance(ranges, str) else ranges


@lru_cache(maxsize=1 << 12)
def _beats(step: int, alive: tuple[int, ...]) -> bytes:
    """All but the time."""
    news = ProcessNews("S", monotonic_ns() / 1e9, False).packed()
    told = Beats.of(0, dict.fromkeys(alive, _beat(step)), dict.fromkeys(alive, news), 0)
    return told.packed[8:]


# --- pages ----------------------------------------------------------------------------------------


@cache
def _written(step: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A page after the commit of a step, and what was written to it since the one before."""
    fd = create(0, 0, [GENERATOR])
    page = Page(fd)
    known: dict[int, int] = {}
    for each in range(max(step - 1, 0), step + 1):
        page.news(known)
        for is_commit in (False, True):
            page.write(each, 0, each, b'{"at": 1}', lambda _: None, is_commit=is_commit)
        page.beat(each, 0, each, Phase.FORWARD)
    news = page.news(known)
    content = packed(page)
    page.close()
    os.close(fd)
    return content, news


def _page_of(rank: int, attempt: int, step: int) -> bytes:
    content = _written(step)[0]
    at = content.index(MAGIC) + len(MAGIC)
    return content[:at] + _OF.pack(rank, attempt) + content[at + _OF.size :]


def _news(step: int) -> list[tuple[int, bytes]]:
    return _written(step)[1]


@cache
def _beat(step: int) -> bytes:
    fd = create(0, 0, [])
    page = Page(fd)
    page.beat(step, 0, step, Phase.FORWARD)
    raw = page.raw_beat()
    page.close()
    os.close(fd)
    return raw


# --- joining --------------------------------------------------------------------------------------


async def joined(crowd: Crowd, port: int, number: int, turns: asyncio.Semaphore) -> None:
    """One node joins, and begins once all have."""
    connection = socket.socket()
    connection.setblocking(False)
    reader = FrameReader(message_of)
    loop = crowd.loop
    async with turns:
        await loop.sock_connect(connection, (HOST, port))
        await loop.sock_sendall(connection, PREAMBLE)
        challenge = unpack(await _next(connection, reader))
        assert isinstance(challenge, Challenge)
        wish = Join(
            "",
            f"record-{number}",
            ANY_RANK,
            crowd.nproc,
            f"node{number:04}",
            1 + number,
            __version__,
            "",
            "nonce",
            "",
            door=1 + number,
        )
        await loop.sock_sendall(connection, bytes_of(wish))
    # on a busy machine it takes long enough for node 0 to tell whom it waits for
    while isinstance(admitted := unpack(await _next(connection, reader)), AwaitedNodes):
        pass
    assert isinstance(admitted, Admitted), admitted
    begin = await _next(connection, reader)
    assert begin["kind"] == "Begin"
    rank = admitted.node_rank
    crowd.nodes[rank] = FakeNode(crowd, rank, connection, reader)
    crowd.reached("joined")


async def _next(
    connection: socket.socket, reader: FrameReader[dict[str, object]]
) -> dict[str, object]:
    while (message := reader.take()) is None:
        data = await asyncio.get_running_loop().sock_recv(connection, RECEIVE_BYTES)
        assert data, "node 0 has closed the line"
        reader.add(data)
    return message


async def main(port: int, count: int, nproc: int, first: int, folder: str, beat_s: float) -> None:
    """Be these nodes until the job is over."""
    are_many = first + count > MANY_NODES
    crowd = Crowd(nproc, Path(folder), count, beat_s, are_many=are_many)
    turns = asyncio.Semaphore(AT_ONCE)
    numbers = range(first, first + count)
    await asyncio.gather(*(joined(crowd, port, number, turns) for number in numbers))
    crowd.loop.add_reader(sys.stdin.fileno(), crowd.strike)
    await crowd.over.wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:5]), sys.argv[5], float(sys.argv[6])))
