"""Stand-ins for parts of the agent, which note what they are asked to do."""

from __future__ import annotations


class Links:
    def __init__(self):
        self.said = {}

    def send(self, rank, message):
        self.said.setdefault(rank, []).append(message)


class Scribe:
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
