"""From an attempt's ended workers to the failure report: what they left, which was first, why."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from agent.cause import Cause, find_cause
from agent.evidence import WorkerEnd, gather
from agent.hints import hint
from agent.oom import OomCounters, read_counters
from agent.report import Report
from agent.worker import Worker
from worker_hooks.protocol import WorkerOrder


class Coroner:
    """Looks at what an attempt left, before the next attempt or the end."""

    def __init__(self, host: str, script: str, interpreter: str, ids: dict[str, str]) -> None:
        self._host = host
        self._script = script
        self._interpreter = interpreter
        self._ids = ids
        self._counters: OomCounters = read_counters()

    def examine(self, workers: Sequence[Worker], orders: Sequence[WorkerOrder]) -> Report | None:
        """The report of a failed attempt; ``None`` if no process failed by itself."""
        now = read_counters()
        kills, self._counters = now.kills_since(self._counters), now
        ended = [
            gather(self._end(worker, order), kills)
            for worker, order in zip(workers, orders, strict=True)
            if worker.pid and worker.exit_code not in {None, 0}
        ]
        cause: Cause | None = find_cause(ended)
        if cause is None:
            return None
        return Report(cause, self._script, hint(cause.root, self._interpreter), self._ids)

    def _end(self, worker: Worker, order: WorkerOrder) -> WorkerEnd:
        assert worker.exit_code is not None
        assert worker.ended_at is not None
        code = worker.exit_code
        error_file = order.environ["TORCHELASTIC_ERROR_FILE"]
        return WorkerEnd(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            host=self._host,
            exit_code=code if code >= 0 else None,
            signal=signal.Signals(-code) if code < 0 else None,
            at_epoch_s=worker.ended_at,
            order=worker.order,
            stopped_by_us=worker.told,
            error_file=Path(error_file) if error_file else None,
            log=Path(order.stderr) if order.stderr else None,
            attempt=worker.attempt,
        )
