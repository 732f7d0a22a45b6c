"""Makes the failure report from an attempt's ended workers: evidence, root cause, hint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGUSR1, SIGUSR2
from typing import Any

from agent.failure.device_faults import describe_xid, is_fault, worst
from agent.failure.evidence import Evidence, WorkerEnd, gather
from agent.failure.hints import SHELL_SIGNAL_BASE, hint, is_for_memory
from agent.failure.report import Report, as_json, headline, outer_error, render
from agent.failure.resume_advice import ResumeAdvice
from agent.failure.resume_advice import as_json as closing_json
from agent.failure.root_cause import find_cause, last_words
from agent.machine.oom_kills import OomCounters, read_counters
from agent.machine.xid_log import Xid, XidLog
from agent.records.journal import Journal
from agent.spec.run_facts import RunFacts
from agent.text.sanitize import encodable, sanitized
from agent.text.wording import WORDS_CHARS
from agent.workers.worker import Worker
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import AGENT_ERROR_FILE
from worker_hooks.contract.protocol import WorkerOrder

FORWARDED = frozenset({SIGUSR1, SIGUSR2})  # from msrun's own sender; they are not meant to end


class PostMortem:
    """Examines what an attempt left before the next one begins, and reports the last one."""

    def __init__(self, facts: RunFacts, counters: OomCounters, xids: XidLog) -> None:
        """Nothing is examined yet.

        Args:
            counters: the kernel's counters when it began.
            xids: what NVIDIA's driver reported since then.
        """
        self._facts = facts
        self._counters = counters
        self._xids = xids
        self._report: Report | None = None
        self.memory_hint = ""  # that what was examined last died for lack of memory
        self.driver_report = ""  # what NVIDIA's driver reported of it, as a sentence
        self._newest: tuple[int | None, str, int] = (None, "", 0)  # exit code, last line, step

    def evidence(self, workers: Sequence[Worker]) -> list[Evidence]:
        """What these workers, of one attempt and of this node, left when they ended."""
        now = read_counters()
        kills, elsewhere = now.kills_since(self._counters), now.kills_elsewhere(self._counters)
        self._counters = now
        orders = {began: self._facts.plan(began) for began in {one.began for one in workers}}
        return [
            gather(self._end(worker, orders[worker.began][worker.local_rank]), kills, elsewhere)
            for worker in workers
            if worker.pid and worker.exit_code is not None
        ]

    def examine(self, workers: tuple[Worker, ...], others: Sequence[Evidence] = ()) -> str | None:
        """Find the root cause of an attempt; one sentence, if a process failed by itself.

        ``others``: what other nodes found of theirs.
        """
        cause = find_cause([*self.evidence(workers), *others])
        self._report, self.memory_hint, self.driver_report = None, "", ""
        if cause is None:
            return None
        if any(worker.rank == cause.root.end.rank for worker in workers):
            self.driver_report = self._driver_report(cause.root.end)  # this machine's driver
        program = self._facts.spec.program
        known = hint(cause.root, program.interpreter)
        if known is not None and is_for_memory(cause.root):
            self.memory_hint = f"rank {cause.root.end.rank} was {known}"
        again = self._met_again(cause.root, workers)
        why = "; ".join(filter(None, (known, self.driver_report, again))) or None
        self._report = Report(cause, program.name, why, self._facts.ids)
        return headline(cause.root.end).removeprefix("msrun: ")

    def blame_reason(self) -> None:
        """What was found is the consequence of something else, which the reason says."""
        self._report = None

    def _met_again(self, root: Evidence, workers: tuple[Worker, ...]) -> str:
        """That the last failure was the same: one exit code, one last line, one step."""
        step = max((worker.beat.step for worker in workers if worker.beat is not None), default=0)
        was, self._newest = self._newest, (root.end.exit_code, _last_line(root), step)
        is_same = was == self._newest and all(self._newest[:2])
        return "the failure before it was the same, at the same step" * is_same

    def last_words(self, worker: Worker) -> str:
        """The last line that an ended worker wrote about its failure; empty: none is known."""
        order = self._facts.plan(worker.began)[worker.local_rank]
        return _last_line(gather(self._end(worker, order)))

    def device_fault(self, worker: Worker) -> str:
        """How the device of an ended worker failed, as CUDA or the driver says; empty: it did not.

        Reports of the driver count if they are about this very process.
        """
        order = self._facts.plan(worker.began)[worker.local_rank]
        if said := gather(self._end(worker, order)).device_fault:
            return said
        xid = worst(self._xids.of_process(worker.pid))
        return _quoted(xid) if xid is not None and is_fault(xid) else ""

    def _driver_report(self, end: WorkerEnd) -> str:
        """What NVIDIA's driver reported about a rank, else about nobody, on its host."""
        own, news = worst(self._xids.of_process(end.pid)), self._xids.news_of_host()
        if own is not None:
            return f"the driver reported {_quoted(own)}"
        other = worst(news)
        return "" if other is None else f"on this host, the driver reported {_quoted(other)}"

    @property
    def found(self) -> bool:
        """Whether the last attempt has a root cause."""
        return self._report is not None

    def tell(
        self,
        reason: str,
        environ: Mapping[str, str],
        journal: Journal,
        closing: ResumeAdvice | None = None,
    ) -> str:
        """Write the report for programs and return it for people.

        Args:
            reason: the controller's; reported if no process failed by itself.
            environ: of msrun; under another launcher its error file is written, too.
            closing: what is saved of the job; ``None``: there was nothing to save.
        """
        if self._report is None:
            text, content = f"msrun: {reason}", {**self._facts.ids, "root": None, "reason": reason}
        else:
            text, content = render(self._report), as_json(self._report)
            _write_outer_error(environ.get(AGENT_ERROR_FILE), outer_error(self._report.cause))
        if closing is not None:
            content |= closing_json(closing)
        journal.log(text)
        journal.replace(self._facts.layout.failure, content, durable=True)
        return text

    def _end(self, worker: Worker, order: WorkerOrder) -> WorkerEnd:
        assert worker.exit_code is not None
        assert worker.ended_at is not None
        code = worker.exit_code
        error_file = order.environ[AGENT_ERROR_FILE]
        return WorkerEnd(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            host=self._facts.host,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            at_epoch_s=worker.ended_at,
            order=worker.order,
            stopped_by_us=worker.was_stopped,
            error_file=Path(error_file) if error_file else None,
            log=self._log(worker, order),
            attempt=worker.attempt,
            hung=worker.hung if worker.signals.keys() - FORWARDED else "",
            ended_for=_ended_for(worker),
            amid=worker.amid,
            told=self._told(worker),
        )

    def _told(self, worker: Worker) -> str:
        """What was appended to its arguments, if the user did not give it."""
        spec = self._facts.spec
        argument = spec.dump.recover_arg if worker.resumes else ""
        return "" if not argument or argument in spec.program.args else argument

    def _log(self, worker: Worker, order: WorkerOrder) -> Path | None:
        """Its log; the file has another name if the rank has been replaced."""
        layout, log = self._facts.layout, Path(order.stderr)
        if worker.is_replaced and log == layout.worker_log(worker.rank):
            return layout.earlier_worker_log(worker.rank, worker.attempt)
        return log if order.stderr else None


def _ended_for(worker: Worker) -> str:
    """Why msrun sent the signal that ended a worker, perhaps behind a shell; empty: it did not."""
    code = worker.exit_code or 0
    return worker.signals.get(-code if code < 0 else code - SHELL_SIGNAL_BASE, "")


def _quoted(xid: Xid) -> str:
    return encodable(sanitized(describe_xid(xid))[:WORDS_CHARS])


def _last_line(evidence: Evidence) -> str:
    lines = last_words(evidence).strip().splitlines()
    return encodable(lines[-1][:WORDS_CHARS]) if lines else ""


def _write_outer_error(path: str | None, content: dict[str, Any]) -> None:
    if path:
        try:
            write_atomic(Path(path), json.dumps(content).encode(), durable=False)
        except OSError:
            return  # the outer launcher will report without it
