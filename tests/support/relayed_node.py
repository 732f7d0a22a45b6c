"""The hooks of two ranks on a node without the controller, and what they hand on."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace

from agent.hooks.listener import name_of, open_listener
from agent.spread.node_writes import NodeWrites
from agent.supervisor.hooks_relay import HooksRelay
from agent.workers.worker import Worker
from support.status_pages import make, write
from worker_hooks.contract import protocol, wire

RANKS = (4, 5)


class RelayedNode:
    """The hooks of the ranks 4 and 5 on a loop, and all that is told of them."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.door = open_listener("test")
        self.said, self.order, self.clients, self.journal = [], [], [], []
        self.workers = {rank: Worker(rank, rank - 4, 0) for rank in RANKS}
        for worker in self.workers.values():
            worker.pid = os.getpid()
        journal = SimpleNamespace(event=lambda name, **about: self.journal.append((name, about)))
        spec = SimpleNamespace(
            ranks_here=RANKS,
            job_id="job",
            node_rank=2,
            dump=SimpleNamespace(ttp=True),
            silence_s=10.0,
        )
        kept = SimpleNamespace(add_place=lambda _: None)
        self.writes = NodeWrites("127.0.0.1", self._send)
        self.relay = HooksRelay(spec, self.door, journal, kept, self._send, self.writes)
        agent = SimpleNamespace(
            announce=lambda: self.order.append("announce"),
            settle=lambda: self.order.append("settle"),
            worker=lambda rank: self.workers[rank],
            workers=lambda: [*self.workers.values()],
            watch=self.order.append,
        )
        self.relay.attach(self.loop, agent)
        self.relay.begin(0, "")

    def _send(self, message):
        self.order.append(type(message).__name__)
        self.said.append(message)

    def turn(self, times=4):
        for _ in range(times):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def rank(self, rank=4, exit_file="", attempt=0):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect("\0" + name_of(self.door))
        client.settimeout(5)
        self.clients.append(client)
        hello = protocol.Hello(rank, attempt, os.getpid(), "", False)
        self.say(client, hello._replace(exit_file=exit_file))
        return client

    def say(self, client, message, fds=()):
        wire.send(client, message, fds)
        self.turn()

    def registered(self, rank=4):
        client = self.rank(rank)
        fd, page = make(rank)
        write(page, 6, 6)
        self.say(client, protocol.Registered(rank, 0, 6), [fd])
        os.close(fd)
        return client, page

    def close(self):
        self.relay.end_attempt()
        self.relay.close()
        self.door.close()
        self.loop.close()
        for client in self.clients:
            client.close()
