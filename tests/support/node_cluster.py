"""A cluster for tests of what is decided about several nodes: nothing of it is real but the values."""

import socket
from types import SimpleNamespace

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.nodes.codec import pack_event, unpack_action
from agent.nodes.frames import FrameReader
from agent.nodes.line import bytes_of, message_in
from agent.nodes.messages import ANY_RANK, Join
from agent.nodes.run_messages import Fact, NodeFacts, Order
from agent.nodes.tls import PLAIN
from agent.spec.job_spec import ClusterSpec, DumpSpec, JobSpec, Program, ProgramKind, ReplaceSpec
from agent.spec.spent_budget import SpentBudget
from agent.supervisor.all_nodes import AllNodes
from agent.supervisor.job_view import JobView
from agent.supervisor.remote_node import RemoteNode
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

PROGRAM = Program("train.py", (), ProgramKind.SCRIPT, "python")
START = do.StartAttempt(0, "the job begins")


def wish(nproc=3, host="d", pid=77, is_spare=False, rank=ANY_RANK):
    """A node that comes while the job runs."""
    return Join("", "record", rank, nproc, host, pid, "1", "", "", "", is_spare)


def travelled(message):
    """As it arrives at the other end."""
    (found,) = FrameReader(message_in).feed(bytes_of(message))
    return found


class FakeLink:
    """A line to a node that says what the test says."""

    def __init__(self):
        self.limit_s = 10.0
        self.said, self.is_open, self.drained = [], True, None
        self.unread = []  # messages that :meth:`catch_up` hears
        self.is_stopped, self.doubted_s = False, 0.0

    def attach(self, _loop, heard, lost):
        self._heard, self._lost = heard, lost

    def hear(self, message):
        self._heard(travelled(message))

    def catch_up(self):
        unread, self.unread = self.unread, []
        for message in unread:
            self.hear(message)

    def send(self, message):
        if self.is_open:
            self.said.append(travelled(message))

    def is_in_doubt(self):
        return not self.is_open

    def unheard_s(self):
        return 0.0

    def mute_s(self):
        return 1e3 * self.is_stopped

    def drain(self, timeout_s):
        self.drained = timeout_s

    def close(self):
        self.is_open = False

    def lose(self, loss):
        self.is_open = False
        self._lost(loss)

    give_up = lose

    def orders(self):
        found = [unpack_action(each.action) for each in self.said if isinstance(each, Order)]
        self.said.clear()
        return found


class FakeHooks:
    """Hooks of all ranks, of which nothing is asked but to remember."""

    def __init__(self):
        self.heard, self.finished, self.newest = [], set(), 0
        self.alike = ()  # replica groups; one without ranks: all hold the same
        self.has_common_folder = True

    def relay(self, send):
        self.send_all = send
        self.send = lambda rank, message: send((rank,), message)

    def hear_out(self, rank):
        self.heard.append(("out", rank))
        return 40 + rank

    def newest_step(self):
        return self.newest

    def has_finished(self, rank):
        return rank in self.finished

    def hear_relayed(self, message):
        self.heard.append(message)

    def mirror(self, rank, attempt, page):
        self.heard.append(("page", rank, attempt, page))

    def take_memory(self, *about):
        self.heard.append(("memory", *about))

    def copy_pages(self, send):
        self.copies = send

    def clear_over(self, nodes, others):
        self.clearing, self.cleared = {*nodes}, others

    def updates_ready(self, node, told):
        self.heard.append(("ready", node, told))

    def replicated(self, rank):
        alike = next((group for group in self.alike or () if rank in group), ())
        return protocol.Replicated("" if self.alike else "nobody knows", [*alike])

    def dump_with(self, others):
        self.stays, self.spread, self.gather, self.collect = others

    def mirror_news(self, rank, attempt, pieces):
        self.heard.append(("news", rank, attempt, pieces))

    def mirror_beats(self, *about):
        self.heard.append(("beats", *about))

    def lost_elsewhere(self, rank, attempt):
        self.heard.append(("unlinked", rank, attempt))


class Cluster:
    """Node 0 with the ranks 0 and 1; node 1 with 2, 3 and 4; node 2 with 5."""

    def __init__(self, loop, wait_s=0.0):
        self.loop = loop
        self.acts, self.events, self.said, self.told = [], [], [], []
        self.ends, self.woken = 0, []
        self.decide = self.events.append
        self.hooks = FakeHooks()
        self.links = [FakeLink(), FakeLink()]
        self.others = [
            RemoteNode(NodeFacts(1, "b", "10.0.0.2", 3, 9), range(2, 5), self.links[0], self.hooks),
            RemoteNode(NodeFacts(2, "c", "10.0.0.3", 1, 9), range(5, 6), self.links[1], self.hooks),
        ]
        self.own_workers = (Worker(0, 0, 0), Worker(1, 1, 0))
        own = SimpleNamespace(
            act=self.acts.append,
            decided=lambda *about: self.told.append(about),
            workers=lambda: self.own_workers,
            worker=lambda rank: self.own_workers[rank],
            next_end=self._next_end,
            wake=self.woken.append,
            finish=lambda: self.told.append("finish"),
            catch_up=lambda: None,
            refresh_of=lambda _: False,
            starter=SimpleNamespace(reserve=lambda _: 4711, reserved_port=4711, port=4712),
            loop=loop,
        )
        self.controller = SimpleNamespace(
            view=JobView(JobState.STARTING, 0),
            spent=SpentBudget(),
            post=self._post,
            post_soon=self._post,
            decide_now=lambda: None,
            why_never_replaced="",
            is_to_end=False,
            retire=lambda: self.told.append("retired"),
            go_on=lambda: self.told.append("go on"),
            ending=SimpleNamespace(
                exit_code=3,
                reason="rank 1 failed",
                state=JobState.FAILED,
                saved=None,
                lost="",
                is_to_end=False,
                asking=frozenset(),
            ),
        )
        facts = (NodeFacts(0, "a", "10.0.0.1", 2, 9), *(node.facts for node in self.others))
        self.door = socket.create_server(("127.0.0.1", 0))
        spec = JobSpec(
            PROGRAM,
            2,
            "r",
            "r",
            cluster=ClusterSpec(3),
            nodes=tuple(node.nproc for node in facts),
            master_port=4711,
            dump=DumpSpec(lineage=("before",)),
            replace=ReplaceSpec(node_wait_s=wait_s),
        )
        met = SimpleNamespace(
            door=self.door,
            version="1",
            token=b"",
            prepared=SimpleNamespace(spec=spec),
            asked=spec,
            held=None,
            roster=SimpleNamespace(nodes=facts),
            settings={},
            checkpoint=None,
            security=PLAIN,
        )
        self.all = AllNodes(own, self.others, self.hooks, self.controller, met, self.said.append)
        self.all.attach(loop)

    def size(self, resize):
        """The job may have so many nodes."""
        self.all._size.resize = self.all._doorkeeper._resize = resize
        self.all._size._leaving._resize = resize

    def _post(self, event):
        self.decide(event)

    def _next_end(self):
        self.ends += 1
        return self.ends

    def start(self, *ranks):
        """The attempt begins, and these ranks of node 1 have processes."""
        self.all.act(START)
        for rank in ranks:
            self.hear(ev.WorkerStarted(rank, 0, 100 + rank))
        self.events.clear()
        self.acts.clear()
        for link in self.links:
            link.said.clear()

    def hear(self, event):
        self.links[0].hear(Fact(pack_event(event)))
