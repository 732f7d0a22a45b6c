"""Nodes of a job without a process on them: they say what the msruns of real ones would say.

    fake_nodes.py PORT COUNT NPROC FIRST FOLDER

Each has a connection of its own to node 0, by the code of a real link. What it does is a script: it
joins, its ranks start, register, train and answer what they are asked at once. On standard input
come the ranks that die, on standard output go lines of what all ranks here have come to:
``joined``, ``trained`` and ``on`` with the attempt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from signal import SIGKILL
from time import monotonic_ns

from agent.controller import actions as do
from agent.controller import events as ev
from agent.machine.process_use import ProcessNews
from agent.nodes.codec import pack_event, unpack_action
from agent.nodes.frames import PREAMBLE, FrameReader
from agent.nodes.line import RECEIVE_BYTES, Line, Loss, bytes_of
from agent.nodes.link import NodeLink
from agent.nodes.messages import ANY_RANK, Admitted, Challenge, Join, unpack
from agent.nodes.run_messages import (
    Beats,
    Ended,
    Fact,
    FromRank,
    JobKnown,
    MemoryTaken,
    Order,
    PageNews,
    RunMessage,
    SaveFar,
    SweptNode,
    TakeMemory,
    ToRank,
    pack_said,
    unpack_said,
)
from agent.nodes.transfer import give
from msrun import __version__
from worker_hooks.contract import protocol
from worker_hooks.contract.packed_page import packed
from worker_hooks.contract.status_page import MAGIC, Entry, Page, Phase, create
from worker_hooks.storage import manifest

HOST = "127.0.0.1"
BEAT_S = 1.0
AT_ONCE = 32  # nodes of this process that are about to join
GENERATOR = Entry("rng.torch", "U8", (5056,), 5056)  # what torch's generator takes
STATE = bytes(1 << 16)  # the replicated one
DIGEST = "a" * 32
HOLDS = {"model": "12 parts", "crc32": "abcdef"}
_OF = struct.Struct("<II")  # whose page it is: rank, attempt


class Crowd:
    """All nodes of this process."""

    def __init__(self, nproc: int, folder: Path, count: int) -> None:
        self.nproc = nproc
        self.folder = folder
        self.count = count
        self.nodes: dict[int, FakeNode] = {}  # by their ranks
        self.threads = ThreadPoolExecutor(4)
        self._reached: Counter[str] = Counter()
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()

    def reached(self, what: str) -> None:
        """A rank, or a node, has come there: say so once all have."""
        self._reached[what] += 1
        most = self.count * (1 if what == "joined" else self.nproc)
        if self._reached[what] == most:
            print(what, flush=True)

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

    def __init__(self, crowd: Crowd, rank: int, line: Line) -> None:
        self._crowd = crowd
        first = (rank - 1) * crowd.nproc
        self._ranks = range(first, first + crowd.nproc)
        self._attempt = 0
        self._step = 0
        self._dead: set[int] = set()
        self._link = NodeLink(line)
        self._link.attach(crowd.loop, self._hear, self._lost)
        self._beats = crowd.loop.call_later(BEAT_S, self._tell_beats)
        self._rank = rank

    def die(self, rank: int) -> None:
        """A rank is killed."""
        self._dead.add(rank)
        self._happened(ev.WorkerExited(rank, self._attempt, -SIGKILL))

    def _lost(self, loss: Loss) -> None:
        print(f"node {self._rank} has lost node 0: it {loss.why}", file=sys.stderr, flush=True)
        self._close()

    def _close(self) -> None:
        self._beats.cancel()
        self._crowd.over.set()

    def _send(self, message: RunMessage) -> None:
        self._link.send(message)

    def _happened(self, event: ev.Event) -> None:
        self._send(Fact(pack_event(event)))

    def _say(self, said: protocol.Message, page: str = "") -> None:
        self._send(FromRank(pack_said(said), page))

    def _tell_beats(self) -> None:
        """All ranks are a step further."""
        self._beats = self._crowd.loop.call_later(BEAT_S, self._tell_beats)
        news = ProcessNews("S", monotonic_ns() / 1e9, False)
        beat = b64encode(_beat(self._step)).decode()
        alive = [rank for rank in self._ranks if rank not in self._dead]
        beats = {str(rank): beat for rank in alive}
        self._send(Beats(monotonic_ns(), beats, {str(rank): news for rank in alive}, 0))

    # --- what node 0 says -----------------------------------------------------------------------

    def _hear(self, message: object) -> None:
        match message:
            case JobKnown():
                self._attempt = message.attempt
            case Order():
                self._obey(unpack_action(message.action))
            case ToRank():
                self._answer(message.rank, unpack_said(message.message))
            case SaveFar():
                self._crowd.do(self._give, message)
            case TakeMemory():
                self._crowd.do(self._fetch, message)
            case Ended():
                self._close()
                self._link.close()
            case _:
                pass

    def _obey(self, action: do.Action) -> None:
        match action:
            case do.StartAttempt():
                self._start(self._ranks)
            case do.ReplaceRanks(newcomers=newcomers):
                self._dead -= set(newcomers)
                self._start(newcomers)
            case do.SignalRanks(ranks=ranks, signum=signum):
                for rank in ranks:
                    self._dead.add(rank)
                    self._happened(ev.WorkerExited(rank, self._attempt, -signum))
            case do.Sweep():
                self._send(SweptNode(self._attempt, ()))
            case _:
                pass

    def _start(self, ranks: range | tuple[int, ...]) -> None:
        for rank in ranks:
            self._happened(ev.WorkerStarted(rank, self._attempt, 1000 + rank))
        for rank in ranks:
            folder = str(self._crowd.folder)
            self._say(protocol.Hello(rank, self._attempt, 1000 + rank, folder, wants_resume=False))

    def _answer(self, rank: int, order: protocol.Message) -> None:
        attempt = self._attempt
        match order:
            case protocol.Welcome():
                self._register(rank)
                if not order.is_barred:
                    self._train(rank)
            case protocol.Freeze(dump_id=dump):
                self._send(PageNews(rank, attempt, _news(self._step)))
                size = len(STATE)
                self._say(
                    protocol.Frozen(
                        rank,
                        attempt,
                        dump,
                        self._step,
                        is_whole=True,
                        nbytes=size,
                        host_nbytes=size,
                    )
                )
            case protocol.Save(is_quick=False):
                raise RuntimeError("the ranks are not replaced")
            case protocol.Save(dump_id=dump, round=number):
                self._say(protocol.Digested(rank, attempt, dump, DIGEST, number))
            case protocol.Rejoin():
                self._say(protocol.Rejoining(rank, order.attempt))
                self._register(rank)
            case protocol.GoOn():
                self._crowd.reached(f"on {attempt}")
                self._train(rank)
            case _:
                pass

    def _register(self, rank: int) -> None:
        page = b64encode(_page_of(rank, self._attempt, self._step)).decode()
        self._say(protocol.Registered(rank, self._attempt, self._step, "", compares=True), page)

    def _train(self, rank: int) -> None:
        """Two steps, of which all ranks report what they hold then."""
        for step in (self._step + 1, self._step + 2):
            self._say(protocol.Fingerprinted(rank, self._attempt, step, HOLDS, holds="12 parts"))
        if rank == self._ranks[-1]:
            self._step += 2
        self._crowd.reached(f"trained {self._attempt}")

    # --- in threads -----------------------------------------------------------------------------

    def _soon(self, call: Callable[[], None]) -> None:
        self._crowd.loop.call_soon_threadsafe(call)

    def _give(self, order: SaveFar) -> None:
        save = unpack_said(order.message)
        assert isinstance(save, protocol.Save)
        size = len(STATE) // save.parts
        file = os.memfd_create("fake-state")
        os.write(file, STATE[:size])
        with open(file, "rb") as readable:
            readable.seek(0)
            give(HOST, order.port, bytes.fromhex(order.key), readable, lambda _: None)
        written = protocol.Written(
            order.rank, self._attempt, save.dump_id, "", size, "", DIGEST, save.round
        )
        self._soon(lambda: self._say(written))

    def _fetch(self, order: TakeMemory) -> None:
        """Take all of it, and keep nothing: many nodes are one process here."""
        left = sum(shard.nbytes for shard in manifest.decode(order.manifest).shards)
        with socket.create_connection((HOST, order.port)) as connection:
            connection.sendall(bytes.fromhex(order.key))
            while left:
                data = connection.recv(min(left, RECEIVE_BYTES))
                assert data, "the checkpoint is cut short"
                left -= len(data)
        here = f"/proc/{os.getpid()}/fd/9999"
        self._soon(lambda: self._send(MemoryTaken(order.path, here)))


# --- pages ----------------------------------------------------------------------------------------


@cache
def _written(step: int) -> tuple[bytes, dict[str, str]]:
    """A page after the commit of a step, and what was written to it since the one before."""
    fd = create(0, 0, [GENERATOR])
    page = Page(fd)
    known: dict[int, int] = {}
    for each in range(max(step - 1, 0), step + 1):
        page.news(known)
        for is_commit in (False, True):
            page.write(each, 0, each, b'{"at": 1}', lambda _: None, is_commit=is_commit)
        page.beat(each, 0, each, Phase.FORWARD)
    news = {str(at): b64encode(one).decode() for at, one in page.news(known)}
    content = packed(page)
    page.close()
    os.close(fd)
    return content, news


def _page_of(rank: int, attempt: int, step: int) -> bytes:
    content = _written(step)[0]
    at = content.index(MAGIC) + len(MAGIC)
    return content[:at] + _OF.pack(rank, attempt) + content[at + _OF.size :]


def _news(step: int) -> dict[str, str]:
    return _written(step)[1]


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
    reader = FrameReader()
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
    admitted = unpack(await _next(connection, reader))
    assert isinstance(admitted, Admitted), admitted
    begin = await _next(connection, reader)
    assert begin["kind"] == "Begin"
    rank = admitted.node_rank
    crowd.nodes[rank] = FakeNode(crowd, rank, Line(connection, reader.rest()))
    crowd.reached("joined")


async def _next(connection: socket.socket, reader: FrameReader) -> dict[str, object]:
    while (message := reader.take()) is None:
        data = await asyncio.get_running_loop().sock_recv(connection, RECEIVE_BYTES)
        assert data, "node 0 has closed the line"
        reader.add(data)
    return message


async def main(port: int, count: int, nproc: int, first: int, folder: str) -> None:
    """Be these nodes until the job is over."""
    crowd = Crowd(nproc, Path(folder), count)
    turns = asyncio.Semaphore(AT_ONCE)
    numbers = range(first, first + count)
    await asyncio.gather(*(joined(crowd, port, number, turns) for number in numbers))
    crowd.loop.add_reader(sys.stdin.fileno(), crowd.strike)
    await crowd.over.wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:5]), sys.argv[5]))
