"""Stand-ins for parts of the agent, which note what they are asked to do."""

from __future__ import annotations

from types import SimpleNamespace


def _nothing(*_, **__):
    pass


def services(*, files, post=_nothing, say=_nothing, call_later=_nothing):
    """The agent's, as far as the handshake and dumps use them."""
    loop = SimpleNamespace(call_later=call_later)
    return SimpleNamespace(loop=loop, post=post, say=say, files=files)


class Links:
    def __init__(self):
        self.said = {}

    def send(self, rank, message):
        self.said.setdefault(rank, []).append(message)

    def send_all(self, ranks, message):
        for rank in ranks:
            self.send(rank, message)


class QueuedFileThread:
    """Does its jobs when told to."""

    def __init__(self):
        self.jobs = []

    def do(self, job, done):
        self.jobs.append((job, done))

    def work(self):
        jobs, self.jobs = self.jobs, []
        for job, done in jobs:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001
                result = error
            done(result)


def quiet_parts(**others):
    """What a JobController is given beside the job, which does nothing; ``others``: that differ."""
    parts = {
        "journal": SimpleNamespace(event=_nothing, of_ranks=_nothing),
        "notifier": SimpleNamespace(tell=_nothing),
        **dict.fromkeys(("say", "tell", "changed", "attempt_ended", "give_up_devices"), _nothing),
    }
    return parts | others


def turn(loop, times=3):
    """Let an event loop do what is due."""
    for _ in range(times):
        loop.call_soon(loop.stop)
        loop.run_forever()
