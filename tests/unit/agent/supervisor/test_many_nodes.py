"""What nodes cost the controller grows with them, not with their square."""

import asyncio
import gc
from signal import SIGKILL
from time import thread_time
from types import SimpleNamespace

from support.node_cluster import PROGRAM, FakeHooks, FakeLink
from support.stand_ins import quiet_parts

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.nodes.messages import pack
from agent.nodes.run_messages import NodeFacts
from agent.nodes.tls import PLAIN
from agent.spec.job_spec import ClusterSpec, HandSpec, JobSpec
from agent.supervisor.all_nodes import AllNodes
from agent.supervisor.job_controller import JobController
from agent.supervisor.remote_node import RemoteNode
from worker_hooks.contract import protocol

FEW, MANY, NPROC = 64, 256, 8
ATTEMPTS = 5
HOLDS = {"model": "12"}


class CountingLink(FakeLink):
    """Knows how much was said, but not what."""

    def send(self, message):
        self.said.append(len(pack(message)))


class Job:
    """A scheduler, and so many nodes."""

    def __init__(self, count):
        self.loop = asyncio.new_event_loop()
        self.ranks = range(count * NPROC)
        spec = JobSpec(
            PROGRAM,
            0,
            "job",
            "rec",
            nodes=(0, *[NPROC] * count),
            max_restarts=1,
            cluster=ClusterSpec(count + 1, by_hand=HandSpec(has_worker=False)),
        )
        self.controller = JobController(spec, **quiet_parts())
        own = SimpleNamespace(
            act=lambda _: None,
            decided=lambda *_: None,
            workers=lambda: (),
            refresh_of=lambda _: False,
            next_end=lambda: 1,
            starter=SimpleNamespace(reserve=lambda _: 4711),
            loop=self.loop,
        )
        facts = [NodeFacts(rank, "", "", NPROC, 1) for rank in range(count + 1)]
        self.links = [CountingLink() for _ in range(count)]
        others = [
            RemoteNode(facts[at + 1], range(at * NPROC, at * NPROC + NPROC), link, FakeHooks())
            for at, link in enumerate(self.links)
        ]
        met = SimpleNamespace(
            door=SimpleNamespace(setblocking=lambda _: None, fileno=lambda: -1),
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
        self.all = AllNodes(own, others, FakeHooks(), self.controller, met, lambda _: None)
        self.all._loop = self.loop
        for node in others:
            node._job = self.all
        self.controller.attach(self.loop, self.all)

    def post(self, kind, *about):
        for rank in self.ranks:
            self.controller.post(kind(rank, *about))

    def live(self):
        """All start, register, and show what they hold; one dies, and all are asked for the state.

        Returns:
            This thread's processor time. Without the collections of garbage: a full one looks at
            all that other tests have left, too, and happens at random.
        """
        gc.collect()
        gc.disable()
        try:
            return self._live()
        finally:
            gc.enable()

    def _live(self):
        began_s = thread_time()
        self.controller.begin()
        self.post(ev.WorkerStarted, 0, 100)
        self.post(protocol.Registered, 0, 0, "", True)
        for step in (1, 2):
            self.post(protocol.Fingerprinted, 0, step, HOLDS)
        self.controller.post(ev.WorkerExited(3, 0, -SIGKILL, 2))
        left = [rank for rank in self.ranks if rank != 3]
        for rank in left:
            self.controller.post(protocol.Frozen(rank, 0, 1, 2, is_whole=True, nbytes=1 << 20))
        took_s = thread_time() - began_s
        assert self.controller.view.state is JobState.DUMPING
        self.loop.close()
        return took_s

    @property
    def said(self):
        return sum(len(link.said) for link in self.links)


def test_four_times_the_nodes_take_about_four_times_as_long():
    many, few = [], []
    for _ in range(ATTEMPTS):  # others on the machine make any of them look slow, and none fast
        many.append(Job(MANY).live())
        few.append(Job(FEW).live())
        if min(many) < 2 * MANY / FEW * min(few):
            return
    raise AssertionError((many, few))


def test_each_node_is_told_as_much_as_in_a_small_job():
    few, many = Job(FEW), Job(MANY)
    few.live(), many.live()
    # one node is told more: whom to prepare in the place of the dead rank, and what is done by then
    assert (many.said - 2) / MANY == (few.said - 2) / FEW < 10
