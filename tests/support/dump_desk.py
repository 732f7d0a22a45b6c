"""A dump by two of three ranks, with stand-ins for the lines to them and for the thread of files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from agent.controller import actions as do
from agent.dump.executor import DumpExecutor
from agent.spec.job_spec import JobSpec, Program, ProgramKind
from support.stand_ins import services

STEP = 12


class Lines:
    def __init__(self):
        self.sent, self.dropped = [], []

    def send(self, rank, message):
        self.sent.append((rank, message))

    def send_all(self, ranks, message):
        for rank in ranks:
            self.send(rank, message)

    def drop(self, rank, why):
        self.dropped.append((rank, why))


class Places:
    resumed = ""
    resumed_step = 0

    def __init__(self):
        self.completed = []

    def complete(self, path, step):
        self.completed.append((path, step))

    def place(self, _ranks):
        return self.path

    def breakpoint(self, _ranks):
        return None


class QueuedFileThread:
    """Does its jobs when told to, in a thread, as the real one does."""

    def __init__(self):
        self.jobs = []

    def do(self, job, done):
        self.jobs.append((job, done))

    def continue_in_new_thread(self):
        pass

    def tell(self, what, *args):
        what(*args)

    def work(self, count=-1):
        """All jobs, or the first ``count``."""
        while self.jobs and count:
            count -= 1
            job, done = self.jobs.pop(0)
            with ThreadPoolExecutor(1) as thread:
                done(thread.submit(_result, job).result())


def _result(job):
    try:
        return job()
    except Exception as error:  # noqa: BLE001
        return error


class Desk:
    def __init__(self, pages, folder, lineage=(), keep=3):
        self.lines, self.files, self.posted, self.said = Lines(), QueuedFileThread(), [], []
        places = Places()
        places.path, places.lineage = str(folder / "ckpt"), lineage
        self.places = places
        spec = JobSpec(Program("x", (), ProgramKind.SCRIPT, "python"), 3, "run", "rec")
        spec = spec._replace(dump=spec.dump._replace(keep=keep))
        given = services(post=self.posted.append, say=self.said.append, files=self.files)
        self.saving = DumpExecutor(spec, folder / "dumps", self.lines, pages, places, given)
        self.saving.freeze(do.FreezeRanks((0, 1), 1, "rank 2 died"))
        self.lines.sent.clear()

    def save(self, place=do.MEMORY, number=0):
        self.lines.sent.clear()
        self.saving.save(do.SaveRanks(1, STEP, (0,), (1,), place, "", number))
        return dict(self.lines.sent)

    def commit(self, place=do.MEMORY, **how):
        self.posted.clear()
        self.saving.commit(do.CommitDump(1, STEP, place, ((0,),), (), "why", **how))
        if not how.get("is_early"):
            self.files.work()
        (event,) = self.posted
        return event
