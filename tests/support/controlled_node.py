"""A node that another one controls, with nothing real in it but what it does then."""

import asyncio
from types import SimpleNamespace

from agent.nodes.line import CLOSED
from agent.spread.written_here import WrittenHere
from agent.supervisor.remote_controller import RemoteController


class FakeLink:
    def __init__(self):
        self.said, self.is_open, self.limit_s = [], True, 10.0

    def mute_s(self):
        return 0.0

    def catch_up(self):
        pass

    def give_up(self, loss):
        self.lose(loss)

    def is_in_doubt(self):
        return not self.is_open

    def attach(self, _loop, heard, lost):
        self.hear, self._lost = heard, lost

    def send(self, message):
        if self.is_open:
            self.said.append(message)

    def close(self):
        self.is_open = False

    def open(self, line):
        self.line, self.is_open = line, True

    def lose(self, loss=CLOSED):
        self.is_open = False
        self._lost(loss)


class FakeNode:
    """A supervisor with two ranks."""

    def __init__(self, loop):
        self.loop, self.log, self.alive = loop, [], (2, 3)

    def act(self, action):
        self.log.append(action)

    def decided(self, view, holders):
        self.log.append((view, holders))

    def living(self):
        return self.alive

    def workers(self):
        return [
            SimpleNamespace(
                rank=rank,
                attempt=4,
                pid=100 + rank,
                exit_code=None if rank in self.alive else self.code,
            )
            for rank in (2, 3)
        ]

    code = -9

    def wake(self, rank):
        self.log.append(("wake", rank))

    def settle(self):
        """Take in deaths that nobody has been told of yet."""
        self.alive = tuple(rank for rank in self.alive if rank not in self.unnoticed)

    unnoticed = ()

    @property
    def starter(self):
        return self

    def meet_at(self, port):
        self.log.append(("port", port))

    def move(self, port, host):
        self.log.append(("moved", port, host))

    def finish(self):
        self.log.append("finish")
        self.loop.stop()


class FakeHooks:
    ranks = (2, 3)

    def __init__(self):
        self.log, self.saving = [], ()
        self.writes = SimpleNamespace(
            here=WrittenHere(),
            move=lambda host: self.log.append(("memory at", host)),
            close=lambda: self.log.append("memory is forgotten"),
        )

    def watch(self, is_in_doubt):
        self.is_in_doubt = is_in_doubt

    def tell_beats(self):
        self.log.append("beats")

    def hear(self, message):
        self.log.append(message)

    def tell(self, rank, message):
        self.log.append((rank, message))

    are_calm = True
    may_wait = True
    is_brief = False
    meets_at = ""
    are_in_a_step = True
    are_in_script = True
    may_save = True
    disturbed = None

    def be_alone(self, disturbed, *, briefly=False):
        self.disturbed, self.is_brief = disturbed, self.is_brief or briefly

    def say_again(self):
        self.log.append("said again")

    def leave_pages(self, ranks, *, is_last=False, is_late=False):
        how = ("with copies",) * is_last + ("late",) * is_late
        self.log.append(("pages", *ranks, *how))

    step = 7

    def newest_step(self):
        return self.step

    def forsake(self, why, *, is_proven, memory):
        self.log.append(("forsaken", why, is_proven, *filter(None, [memory])))
        return self.saving


class FakeLogs:
    """Questions about logs, and answers, of which nothing is done but to remember."""

    def __init__(self):
        self.log = []

    def attach(self, _loop, send, is_open):
        self.send, self.is_open = send, is_open

    def hear(self, message):
        self.log.append(message)

    def rest(self):
        self.send("what is left of logs")

    def close(self):
        self.log.append("closed")


def controlled_node():
    loop = asyncio.new_event_loop()
    link, hooks, here = FakeLink(), FakeHooks(), FakeNode(loop)
    logs = FakeLogs()
    shown, said, losses, complete, spent = [], [], [], [], []
    controller = RemoteController(
        link,
        hooks,
        logs,
        evidence=lambda workers: [{"rank": worker} for worker in workers],
        show_status=shown.append,
        say=said.append,
        grace_s=0.02,
        host="127.0.0.1",
        lost=lambda *about: losses.append(about) or True,
        complete=complete.append,
        spent=spent.append,
    )
    controller.attach(loop, here)
    controller.begin()
    yield SimpleNamespace(
        loop=loop,
        link=link,
        hooks=hooks,
        logs=logs,
        here=here,
        controller=controller,
        shown=shown,
        said=said,
        losses=losses,
        complete=complete,
        spent=spent,
    )
    loop.close()
