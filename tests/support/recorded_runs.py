"""Runs as they are recorded, written without a job. Not a test itself."""

from __future__ import annotations

import itertools
import json
import os
from html.parser import HTMLParser

from agent.records import run_record
from agent.records.run_record import Record

BEGAN = 1_795_000_000.0


def kills(ranks, count, every_s=60.0):
    """The lines of a job of so many ranks, one of which is killed and replaced now and then."""
    at = BEGAN

    def line(event, **fields):
        return {"time": at, "event": event, **fields}

    yield line("LaunchRequested", job="starting")
    yield line("StartAttempt", attempt=0, reason="the job begins", resume=None)
    for rank in range(ranks):
        at += 0.001
        job = "running" if rank == ranks - 1 else "starting"
        yield line("WorkerStarted", rank=rank, attempt=0, pid=100 + rank, job=job)
    at += 1.0
    for rank in range(ranks):
        yield line("Registered", rank=rank, attempt=0, step=0, job="running")
    for attempt in range(count):
        died, lost = at + every_s, (7 * attempt) % ranks
        at = died - 1.0
        step = 100 * (attempt + 1)
        shown = list(range(min(ranks, 16)))
        times = [0.02 + 0.001 * rank for rank in shown]
        yield line("StepsTimed", step=step, ranks=shown, median_s=times)
        at = died
        yield line(
            "WorkerExited", rank=lost, attempt=attempt, exit_code=-9, step=step, job="freezing"
        )
        at += 0.01
        others = [rank for rank in range(ranks) if rank != lost]
        yield line("DumpCommitted", dump_id=attempt + 1, path="/m", job="replacing")
        yield line(
            "ReplaceRanks", attempt=attempt + 1, survivors=others, newcomers=[lost], step=step
        )
        yield line("WorkerStarted", rank=lost, attempt=attempt + 1, pid=9, job="replacing")
        at += 0.3
        for rank in range(ranks):
            job = "running" if rank == ranks - 1 else "replacing"
            yield line("Registered", rank=rank, attempt=attempt + 1, step=step, job=job)
        yield line("GoOn", ranks=list(range(ranks)), attempt=attempt + 1, reason="all joined")
        yield line("IncidentOver", **incident(died, lost, attempt, step + 1))
    at += every_s
    for rank in range(ranks):
        job = "succeeded" if rank == ranks - 1 else "running"
        yield line("WorkerExited", rank=rank, attempt=count, exit_code=0, step=9, job=job)
    yield line("Finish", state="succeeded", exit_code=0, reason="every rank exited with 0")


def incident(at, rank, attempt, step):
    return {
        "at": at,
        "attempt": attempt,
        "ranks": [rank],
        "kind": "killed",
        "cause": f"rank {rank} was killed by SIGKILL",
        "step": step,
        "answer": "replaced",
        "lost_s": 0.31,
        "lost_steps": 0,
    }


def status(record_id, ranks, incidents=(), **changes):
    worker = {
        "pid": 7,
        "state": "succeeded",
        "attempt": len(incidents),
        "started": BEGAN,
        "ended": BEGAN + 100,
        "exit": "exited with code 0",
        "step": 500,
        "step_median_s": 0.02,
    }
    return {
        "record_id": record_id,
        "host": os.uname().nodename,
        "state": "succeeded",
        "attempt": len(incidents),
        "restarts": 0,
        "max_restarts": 0,
        "replaced": len(incidents),
        "reason": None,
        "started": BEGAN,
        "updated": BEGAN + 100,
        "ended": BEGAN + 100,
        "goodput": {
            "share": 0.9876,
            "training_s": 98.7,
            "wall_s": 100.0,
            "lost_s": 0.31 * len(incidents),
            "lost_steps": 0,
            "incidents": len(incidents),
        },
        "incidents": list(incidents)[-5:],
        "workers": [
            {**worker, "rank": rank, "local_rank": rank, "log": f"/l/worker_{rank}.log"}
            for rank in range(ranks)
        ],
        **changes,
    }


def write(folder, record_id, lines, said, argv=("msrun", "train.py"), lineage=()):
    """Record a run that ended; its record. ``folder`` is the ``XDG_STATE_HOME``."""
    logs = folder / "logs" / record_id
    logs.mkdir(parents=True)
    with (logs / "events.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    if said is not None:
        (logs / "status.json").write_text(json.dumps(said))
    pid = os.getpid()
    born = (run_record.birth(pid) or 0) + 1  # of a process that has ended
    record = Record(record_id, "job", pid, born, str(logs), argv, "/", BEGAN, lineage=lineage)
    runs = run_record.writable_folder({"XDG_STATE_HOME": str(folder)})
    run_record.write(runs, record)
    return record


class Page(HTMLParser):
    """A page as a browser reads it: its elements, closed in order, and its text."""

    VOID = frozenset({"meta", "path", "rect"})

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)

    def rows(self, first):
        """The cells of the table whose first title is this."""
        after = itertools.dropwhile(lambda text: text != first, self.texts)
        return list(after)
