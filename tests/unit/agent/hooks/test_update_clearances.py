"""An update is cleared once every rank of the job is ready for it, and its node's pages are elsewhere."""

import os
import random
from collections import deque

import pytest

from agent.hooks.node_clearance import NodeClearance
from agent.hooks.update_clearances import AHEAD, UpdateClearances
from agent.nodes.messages import pack, unpack
from agent.nodes.run_messages import UpdatesCleared
from worker_hooks.contract import protocol
from worker_hooks.contract.clearance_board import ClearanceBoard


class Links:
    """Links to ranks; those of other nodes are sent nothing beside a message, and at once."""

    def __init__(self):
        self.boards, self.orders, self.is_full = {}, [], False
        self.elsewhere = []  # the ranks of each call

    def send(self, rank, message, fds=()):
        if self.is_full:
            return False
        self.orders.append((rank, message))
        for fd in fds:
            if (old := self.boards.get(rank)) is not None:
                old.close()
            self.boards[rank] = ClearanceBoard(fd)
        return True

    def send_all(self, ranks, message):
        self.elsewhere.append(ranks)
        self.orders += [(rank, message) for rank in ranks]

    def close(self):
        for board in self.boards.values():
            board.close()


class Journal:
    def __init__(self):
        self.said = []

    def event(self, name, **fields):
        self.said.append((name, fields))


class Job:
    """Ranks 0 and 1 on node 0, rank 2 on node 1."""

    def __init__(self):
        self.links, self.journal, self.sent = Links(), Journal(), []
        self.clearances = UpdateClearances(self.links, 3, (0, 1), self.journal, 10.0)
        self.doubts, self.timers = [], []
        self.clearances.over((0, 1), [self])
        self.clearances.attach(lambda seconds, act: self.timers.append((seconds, act)))

    def clear(self, message):
        self.sent.append(message)

    def is_in_doubt(self):
        return self.doubts.pop(0)

    def look(self):
        """Let the time pass until the next look."""
        timers, self.timers = self.timers, []
        for _, act in timers:
            act()

    def open(self, *, is_cut=False, steps=(4, 5, 4), attempt=0):
        self.clearances.open(attempt, range(3), is_cut=is_cut)
        for rank, step in enumerate(steps):
            self.clearances.hear(protocol.VoteOpened(rank, attempt, step, is_cut=is_cut))

    def ready(self, step, nodes=(0, 1), attempt=0):
        for node in nodes:
            self.clearances.ready(node, attempt, step)

    @property
    def cleared(self):
        return self.sent[-1].cleared if self.sent else None


@pytest.fixture
def job():
    before = set(os.listdir("/proc/self/fd"))
    found = Job()
    yield found
    found.clearances.close()
    found.links.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_ranks_of_node_0_are_told_last_but_before_a_freeze(job):
    """If it was cut off in between they had made an update of which the others had not heard."""
    soon = []
    job.clearances.attach(lambda *_: None, soon.append)
    job.open()
    job.ready(7)
    assert job.sent[-1].cleared == 7
    assert not job.links.boards[0].is_cleared(7)
    for act in soon:
        act()
    assert job.links.boards[0].is_cleared(7)
    job.ready(8)
    assert not job.links.boards[0].is_cleared(8)
    job.clearances.freeze()
    assert job.links.boards[0].is_cleared(8)
    job.clearances.go_on()
    job.ready(9)
    job.clearances.close()
    soon[-1]()


def test_it_begins_behind_the_updates_that_nobody_saw(job):
    job.clearances.open(0, range(2), is_cut=False)
    assert job.links.orders == []  # one has yet to register
    job.open()
    assert [rank for rank, _ in job.links.orders] == [0, 1, 2]
    assert sorted(job.links.boards) == [0, 1]  # another node has a board of its own
    board = job.links.boards[1]
    assert [board.is_needed(step) for step in (6, 7)] == [False, True]
    assert not board.is_vote(99)
    assert unpack(pack(job.sent[-1])) == UpdatesCleared(0, 5 + AHEAD, 0, 0)


def test_a_rank_that_waits_for_nobody_leaves_all_without(job):
    job.clearances.open(0, range(3), is_cut=False)
    for rank in range(3):
        why_not = "it has an accelerator" if rank else ""
        job.clearances.hear(protocol.VoteOpened(rank, 0, 4, why_not, is_cut=False))
    job.ready(9)
    assert job.sent == []


def test_all_nodes_have_to_be_ready(job):
    job.open()
    job.ready(7, nodes=(0,))
    assert job.cleared == 0
    job.ready(7, nodes=(1,))
    assert job.cleared == 7
    assert job.links.boards[0].is_cleared(7)
    job.ready(9, nodes=(0,))
    job.ready(8, nodes=(1,))
    assert job.cleared == 8
    job.ready(9, nodes=(1,))
    assert job.cleared == 9


def test_a_node_that_asks_hears_whether_a_line_is_in_doubt(job):
    """It is told in any case: an answer shows that the line to it lives."""
    job.open()
    job.ready(7, nodes=(1,))
    job.doubts, told = [False, True], len(job.sent)
    job.ready(7, nodes=(1,))
    assert job.sent[told:] == [UpdatesCleared(0, 7, 0, 0)]
    job.ready(7, nodes=(1,))  # so soon nothing could have come back
    assert len(job.sent) == told + 1
    job.look()
    job.ready(7, nodes=(1,))
    assert job.sent[-1] == UpdatesCleared(0, 7, 0, 0, is_in_doubt=True)
    assert job.links.boards[0].doubt_s
    job.ready(7, nodes=(0,))
    assert job.sent[-1] == UpdatesCleared(0, 7, 0, 7)
    assert not job.links.boards[0].doubt_s


def test_who_asks_in_another_attempt_is_not_heard(job):
    job.open(attempt=1)
    told = len(job.sent)
    job.ready(0, attempt=0)
    assert len(job.sent) == told


def test_ranks_of_the_controllers_node_ask_as_well(job):
    job.open()
    job.clearances.ready_here(0, 7)
    job.links.boards[0].wait_for(7)
    job.doubts, told = [True], len(job.sent)
    job.look()
    assert job.sent[told:] == [UpdatesCleared(0, 7, 0, 0, is_in_doubt=True)]


class Waiting:
    """Rank 4 alone on a node, which waits for its clearance."""

    def __init__(self):
        self.links, self.timers, self.asked, self.doubt = Links(), [], [], False
        self.node = NodeClearance(self.links, (4,), 10.0)
        later = lambda _, act: self.timers.append(act)  # noqa: E731
        self.node.attach(later, lambda: self.doubt, self.asked.append)
        self.node.hand(4, protocol.OpenVote(is_over_nodes=True))
        self.node.take(UpdatesCleared(0, 7, 0, 6))
        self.board = self.links.boards[4]
        self.node.ready(4, 7)

    def look(self):
        timers, self.timers = self.timers, []
        for act in timers:
            act()


@pytest.fixture
def waiting():
    found = Waiting()
    yield found
    found.node.close()
    found.links.close()


def test_a_node_asks_while_its_ranks_wait(waiting):
    waiting.look()
    assert waiting.asked == []  # the backward takes its time
    waiting.board.wait_for(7)
    waiting.look()
    waiting.look()
    assert waiting.asked == [7, 7]
    waiting.node.take(UpdatesCleared(0, 7, 0, 7))
    waiting.look()
    assert (waiting.asked, waiting.timers) == ([7, 7], [])
    waiting.node.ready(4, 8)
    waiting.board.wait_for(8)
    waiting.board.waive(8)
    waiting.look()
    assert waiting.asked == [7, 7]


def test_a_line_is_in_doubt_until_something_is_heard(waiting):
    waiting.board.wait_for(7)
    waiting.doubt = True
    waiting.look()
    assert waiting.board.doubt_s
    waiting.doubt = False
    waiting.look()
    assert not waiting.board.doubt_s


def test_a_doubt_that_is_told_stays_until_it_is_taken_back(waiting):
    waiting.board.wait_for(7)
    waiting.node.take(UpdatesCleared(0, 7, 0, 6, is_in_doubt=True))
    waiting.look()
    assert waiting.board.doubt_s
    waiting.node.take(UpdatesCleared(0, 7, 0, 6))
    assert not waiting.board.doubt_s


def test_a_board_is_looked_at_no_more_once_it_is_closed(waiting):
    waiting.node.close()
    waiting.look()
    assert waiting.timers == []


def test_what_a_node_says_of_another_attempt_is_not_heard(job):
    job.open(attempt=1)
    job.ready(7, attempt=0)
    assert job.cleared == 0


def test_nothing_is_cleared_once_a_freeze_is_ordered(job):
    job.open()
    job.ready(7)
    job.clearances.freeze()
    job.ready(8)
    assert job.cleared == 7
    job.clearances.go_on()
    assert job.cleared == 8


def test_replicas_that_turn_out_to_be_none_vote(job):
    job.open()
    job.ready(7)
    job.clearances.open(0, range(3), is_cut=True)
    assert [order.is_cut for _, order in job.links.orders] == [False] * 3 + [True] * 3
    job.clearances.hear(protocol.VoteOpened(0, 0, 7, is_cut=True))
    job.clearances.hear(protocol.VoteOpened(1, 0, 7, is_cut=False))  # the answer to the first order
    job.clearances.hear(protocol.VoteOpened(2, 0, 8, is_cut=True))
    assert job.sent[-1].first_vote == 0
    job.clearances.hear(protocol.VoteOpened(1, 0, 7, is_cut=True))
    assert job.sent[-1] == UpdatesCleared(0, 8 + AHEAD, 8 + AHEAD, 7)
    job.clearances.open(0, range(3), is_cut=False)  # nobody is asked again
    assert len(job.links.orders) == 6


def test_who_could_not_be_sent_the_board_is_sent_it_later(job):
    job.links.is_full = True
    job.clearances.open(0, range(3), is_cut=False)
    assert [rank for rank, _ in job.links.orders] == [2]  # on another node
    job.links.is_full = False
    job.clearances.open(0, range(3), is_cut=False)
    assert [rank for rank, _ in job.links.orders] == [2, 0, 1]


def test_all_ranks_of_other_nodes_are_told_by_one_call(job):
    job.clearances = UpdateClearances(job.links, 5, (0, 1), job.journal, 10.0)
    job.clearances.open(0, range(5), is_cut=False)
    assert job.links.elsewhere == [[2, 3, 4]]


def test_a_new_attempt_begins_anew(job):
    job.open()
    job.ready(7)
    job.clearances.freeze()
    job.clearances.close()
    job.open(attempt=1, steps=(7, 7, 7))
    assert job.cleared == 0
    job.ready(9, attempt=1)
    assert job.cleared == 9


def test_a_node_is_ready_once_all_its_ranks_are():
    node = NodeClearance(Links(), (4, 5), 10.0)
    assert [node.ready(4, 7), node.ready(5, 6), node.ready(5, 8), node.ready(4, 8)] == [0, 6, 7, 8]


def test_without_a_controller_no_rank_waits():
    links = Links()
    node = NodeClearance(links, (4,), 10.0)
    assert node.hand(4, protocol.OpenVote(is_over_nodes=True))
    node.take(UpdatesCleared(0, 7, 0, 6))
    assert links.boards[4].is_needed(7)
    node.stop()
    assert not links.boards[4].is_needed(7)
    node.close()
    links.close()


# --- a job whose messages take their time -----------------------------------------------------


class OtherNode:
    def __init__(self, network, node):
        self.network, self.node = network, node

    def clear(self, message):
        self.network.send(0, self.node, message)

    def is_in_doubt(self):
        return False


class Network:
    """Three nodes of two ranks that train, and lines between them that keep their order.

    What a rank alone holds after a step is sent as its backward begins. Of node 0 it goes to node 1,
    of the others to node 0.
    """

    RANKS = 6

    def __init__(self, seed, *, waits):
        self.draw, self.waits = random.Random(seed), waits
        self.links = [Links() for _ in range(3)]
        self.clearances = UpdateClearances(self.links[0], self.RANKS, (0, 1), Journal(), 10.0)
        self.nodes = [
            NodeClearance(links, (2 * node, 2 * node + 1), 10.0)
            for node, links in enumerate(self.links)
        ]
        self.lines = {
            (a, b): deque() for a, b in ((0, 1), (0, 2), (1, 0), (2, 0))
        }  # what is on its way from a node to another one
        self.clearances.over(range(3), [OtherNode(self, node) for node in (1, 2)])
        self.phase = dict.fromkeys(range(self.RANKS), "forward")
        self.step = dict.fromkeys(range(self.RANKS), 0)
        self.given = dict.fromkeys(range(self.RANKS), 0)  # the step whose gradients left
        self.kept = dict.fromkeys(range(self.RANKS), 0)  # on another node: the step of its page
        self.dead = None
        self.clearances.open(0, range(self.RANKS), is_cut=False)
        for node in (1, 2):
            for rank in (2 * node, 2 * node + 1):
                self.nodes[node].hand(rank, protocol.OpenVote(is_over_nodes=True, is_cut=False))
        for rank in range(self.RANKS):
            self.clearances.hear(protocol.VoteOpened(rank, 0, 0, is_cut=False))

    def send(self, a, b, message):
        self.lines[a, b].append(message)

    def deliver(self, a, b):
        message = self.lines[a, b].popleft()
        if b == self.dead:
            return
        match message:
            case ("page", rank, step):
                self.kept[rank] = step
            case ("ready", node, step):
                self.clearances.ready(node, 0, step)
            case ("told", step):
                self.send(b, a, ("ready", a, step))
            case UpdatesCleared():
                self.nodes[b].take(message)

    def board(self, rank):
        return self.links[rank // 2].boards[rank]

    def move(self, rank):
        node, step = rank // 2, self.step[rank] + 1
        match self.phase[rank]:
            case "forward":
                self.phase[rank] = "backward"
                self.send(node, 1 if node == 0 else 0, ("page", rank, step))
                if node == 0 and (ready := self.clearances.ready_here(rank, step)):
                    self.send(0, 1, ("told", ready))
                elif node and (ready := self.nodes[node].ready(rank, step)):
                    self.send(node, 0, ("ready", node, ready))
            case "backward":
                self.given[rank] = step
                self.phase[rank] = "update"
            case "update" if min(self.given.values()) >= step:
                board = self.board(rank)
                if not self.waits or not board.is_needed(step) or board.is_cleared(step):
                    self.step[rank], self.phase[rank] = step, "forward"
            case _:
                pass

    def run(self, steps):
        """Until a node is off: which rank's page is older than what another node has committed."""
        quick = 0.05 + 0.5 * self.draw.random()  # lines, compared with ranks
        at, victim = self.draw.randint(6, steps), self.draw.randrange(3)
        while max(self.step.values()) < at or self.draw.random() < 0.97:
            busy = [line for line, waiting in self.lines.items() if waiting]
            if busy and self.draw.random() < quick:
                self.deliver(*self.draw.choice(busy))
            else:
                self.move(self.draw.randrange(self.RANKS))
        self.dead = victim
        for line in [*self.lines]:
            if victim in line:
                self.lines[line].clear()
        while busy := [line for line, waiting in self.lines.items() if waiting]:
            self.deliver(*busy[0])  # what is between the others comes
        left = [rank for rank in range(self.RANKS) if rank // 2 != victim]
        newest = max(self.step[rank] for rank in left)
        return [r for r in range(self.RANKS) if r // 2 == victim and self.kept[r] < newest]

    def close(self):
        self.clearances.close()
        for node, links in zip(self.nodes, self.links, strict=True):
            node.close()
            links.close()


def stale(seed, *, waits):
    network = Network(seed, waits=waits)
    try:
        return network.run(30)
    finally:
        network.close()


def test_no_step_is_committed_that_a_lost_node_would_take_state_of_along():
    assert [seed for seed in range(300) if stale(seed, waits=True)] == []


def test_without_waiting_some_would_be():
    assert [seed for seed in range(40) if stale(seed, waits=False)] != []
