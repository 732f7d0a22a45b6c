"""The present state of a run as one small JSON object: what ``msrun status`` reads.

A new state of the job is published at once, so a reader that saw its event does not read an older
state for long. Changes within a state are published together: a replacement changes it forty times
in 0.3 s. Of very many ranks it takes so long that it has to be done more rarely: then a new state
is published beside what was known of the ranks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.controller.protection import Level, Protection, protection
from agent.controller.states import JobState
from agent.records.journal import Journal
from agent.spec.run_facts import RunFacts
from agent.text.wording import describe_exit
from agent.workers.worker import Worker
from worker_hooks.contract.layout import RunLayout


def status(
    facts: RunFacts, job: Job, workers: Sequence[Worker], account: Account
) -> dict[str, object]:
    """Everything known; times in seconds since the epoch."""
    spec, layout, folder = facts.spec, facts.layout, str(facts.layout.folder)
    ended, known = time.time() if job.state.is_end else None, protection(job)
    if known.level is Level.UNKNOWN and facts.unprotected and not job.has_hooks:
        known = Protection(Level.NOT_PROTECTED, facts.unprotected)
    return {
        "record_id": spec.record_id,
        "run_id": spec.run_id,
        "host": facts.host,
        "state": job.state.value,
        "attempt": job.attempt,
        "restarts": job.restarts,
        "max_restarts": spec.max_restarts,
        "replaced": job.replaced_in_all,
        "max_replacements": spec.replace.max_replacements,  # within the period
        "grace_s": spec.timeouts.grace_s,
        "kill_s": spec.timeouts.kill_s,
        "exit_s": spec.timeouts.exit_s,
        "asked_exit_s": spec.timeouts.asked_exit_s,
        "dump_s": spec.dump.stall_s,
        "reason": job.now.failure,
        "goodput": account.facts(),
        "incidents": [incident.facts() for incident in account.shown],
        "protection": {"level": known.level.value, "why": known.why},
        "started": facts.started,
        "updated": time.time(),
        "ended": ended,
        "log_dir": folder,
        "workers": [_worker(layout, folder, worker) for worker in workers],
    }


def _worker(layout: RunLayout, folder: str, worker: Worker) -> dict[str, object]:
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "pid": worker.pid or None,
        "state": worker.state.value,
        "attempt": worker.attempt,
        "began": worker.began,
        "started": worker.started_at,
        "ended": worker.ended_at,
        "exit_code": worker.exit_code,
        "exit": _exit_words(worker),
        **_progress(worker),
        "log": f"{folder}/{layout.worker_log_name(worker.rank)}",  # of thousands each time
    }


def _progress(worker: Worker) -> dict[str, object]:
    """How far a guarded rank is: its newest commit, epoch and batch as the script counts."""
    beat = worker.beat
    if beat is None:
        return {}
    phase = beat.phase.name.lower()
    progress = {"step": beat.step, "epoch": beat.epoch, "batch": beat.batch, "phase": phase}
    return progress | _tempo(worker)


def _tempo(worker: Worker) -> dict[str, object]:
    """How long its recent steps took, in seconds, and whether it is slower than its peers."""
    tempo = worker.tempo
    if tempo is None:
        return {}
    figures = ("median_s", "p95_s", "own_median_s", "own_p95_s")
    times = {f"step_{name}": round(getattr(tempo, name), 6) for name in figures}
    return {**times, "is_slow": worker.is_slow}


def _exit_words(worker: Worker) -> str:
    """How it ended; empty while it has not."""
    if worker.why:
        return f"not started: {worker.why}"
    return "" if worker.exit_code is None else describe_exit(worker.exit_code)


class StatusFile:
    """The object in its file."""

    def __init__(self, facts: RunFacts, journal: Journal) -> None:
        """Write nothing yet."""
        self._facts = facts
        self._journal = journal
        self._workers = _NONE  # as JSON, as of the last time

    def replace(self, job: Job, workers: Sequence[Worker], account: Account) -> dict[str, object]:
        """Write everything known, and return it."""
        content = status(self._facts, job, workers, account)
        self._workers = json.dumps(content["workers"])
        self._write({**content, "workers": []})
        return content

    def replace_state(self, job: Job, account: Account) -> None:
        """Write all but what is new of the ranks."""
        self._write(status(self._facts, job, (), account))

    def _write(self, content: dict[str, object]) -> None:
        text = json.dumps(content)
        assert text.endswith(_NONE + "}")
        self._journal.replace_text(
            self._facts.layout.status, text.removesuffix(_NONE + "}") + self._workers + "}"
        )


_NONE = json.dumps([])
REFRESH_S = 2.0  # how old the published steps may be
PUBLISH_S = 0.1  # how old everything else may be
CHEAP_S = 0.01  # of processor time: what takes less is done at once
MOST_BUSY = 0.02  # share of a processor: the more ranks there are, the older it may be
SHOWN_S = 10.0  # how old what is shown of very many ranks may be, twice that amid a replacement
AGAIN_S = 1.0
_INTERRUPTED = {each.value for each in JobState if each.is_interrupted}
MOST_SHOWN = 256  # ranks of which every node shows the state: each time it goes to all nodes


class StatusPublisher:
    """Publishes changes, now or soon."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[], bool],
        publish_state: Callable[[], None],
    ) -> None:
        """Publish nothing yet.

        Args:
            loop: calls what is to be done later.
            publish: returns whether what it published grows old by itself.
            publish_state: publishes what takes no time, whatever the ranks.
        """
        self._loop = loop
        self._publish = publish
        self._publish_state = publish_state
        self._state = JobState.NEW
        self._published_at = loop.time() - PUBLISH_S
        self._took_s = 0.0  # of processor time, the last time
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, state: JobState) -> None:
        """Something changed; ``state``: the job's."""
        if state is self._state and not state.is_end:
            self._by(self._published_at + self._pause_s(PUBLISH_S))
            return
        self._state = state
        if state.is_end or self._took_s < CHEAP_S:
            self._now()
        else:
            self._publish_state()
            now_s = self._loop.time()
            self._cancel()  # a replacement has more to do, and is several states soon
            self._by(max(now_s, min(now_s + self._pause_s(0.0), self._published_at + SHOWN_S)))

    def _pause_s(self, least_s: float) -> float:
        return least_s if self._took_s < CHEAP_S else max(least_s, self._took_s / MOST_BUSY)

    def _now(self) -> None:
        self._cancel()
        self._published_at = self._loop.time()
        began_s = time.thread_time()
        changes_by_itself = self._publish()
        self._took_s = time.thread_time() - began_s
        if changes_by_itself:
            self._by(self._published_at + self._pause_s(REFRESH_S))

    def _by(self, when: float) -> None:
        if self._timer is None or self._timer.when() > when:
            self._cancel()
            self._timer = self._loop.call_at(when, self._now)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ShownNode(Protocol):
    """Another node, where people may ask for the state."""

    ranks: range

    def show(self, status: dict[str, object], step: int) -> None:
        """Tell it the state of the whole job, and the newest step of any rank."""


class ShownNodes:
    """Shows the other nodes what is published, of very many ranks only what is theirs, and later.

    A replacement is several states within a second or two, and each would go to thousands of nodes,
    which have better things to hear then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, nodes: Sequence[ShownNode]) -> None:
        """``nodes``: all but this one."""
        self._loop = loop
        self._nodes = nodes
        self._status: dict[str, object] = {}
        self._took_s = 0.0  # of processor time, the last time
        self._timer: asyncio.TimerHandle | None = None  # until very many are shown
        self._latest_s = 0.0  # when they are, whatever the state

    def show(self, status: dict[str, object]) -> None:
        """Show this, now or later."""
        self._status = status
        if len(_workers_of(status)) <= MOST_SHOWN:
            step = _newest_step(status)
            for node in self._nodes:
                node.show(status, step)
        elif self._timer is None:
            after_s = max(SHOWN_S, self._took_s / MOST_BUSY)
            self._latest_s = self._loop.time() + after_s + SHOWN_S
            self._timer = self._loop.call_later(after_s, self._show_theirs)

    def _show_theirs(self) -> None:
        if self._status.get("state") in _INTERRUPTED and self._loop.time() < self._latest_s:
            self._timer = self._loop.call_later(AGAIN_S, self._show_theirs)
            return
        self._timer, began_s = None, time.thread_time()
        workers, step = _workers_of(self._status), _newest_step(self._status)
        for node in self._nodes:
            theirs = workers[node.ranks.start : node.ranks.stop]
            node.show({**self._status, "workers": theirs}, step)
        self._took_s = time.thread_time() - began_s


def _workers_of(status: dict[str, object]) -> list[dict[str, object]]:
    workers = status.get("workers")
    return workers if isinstance(workers, list) else []


def _newest_step(status: dict[str, object]) -> int:
    """Of any rank; 0: none."""
    steps = (each.get("step") for each in _workers_of(status))
    return max((step for step in steps if isinstance(step, int)), default=0)
