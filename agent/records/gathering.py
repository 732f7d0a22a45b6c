"""What a node shows of its job while the nodes still gather: there is no run, and no folder of it.

The run's record is there already, so that other msrun processes find it; a file beside it says what
is waited for, in the form of ``status.json``. It is gone once the run has a status of its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM
from typing import Self

from agent.records import run_record
from agent.records.stop_note import take_note
from agent.spec.job_spec import JobSpec, StoppedEarlyError, UsageError
from agent.text.wording import signal_name
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import RunLayout

FILE = "gathering.json"
SPARE = "this node waits as a spare: it takes the place of a node that is lost"
WAITS, STOPPED, FAILED = "starting", "stopped", "failed"  # as states of a job


class ShownGathering:
    """What is shown of a job that has not begun; nobody hears if it cannot be written."""

    def __init__(
        self, records: Path, layout: RunLayout, spec: JobSpec, environ: Mapping[str, str]
    ) -> None:
        """Write the record of the run that is to come.

        Args:
            records: the folder of records.
            layout: of the run's files.
            spec: the job.
            environ: msrun's.
        """
        self._host, now_s = socket.gethostname(), time.time()
        record = run_record.record_of(spec, layout, environ, now_s, "")._replace(host=self._host)
        self._folder = records / record.record_id
        self._is_spare = False
        self.leads = False
        """Whether the others come to this node: then none of them waits without it."""
        self._status: dict[str, object] = {
            "record_id": record.record_id,
            "host": self._host,
            "state": WAITS,
            "attempt": 0,
            "max_restarts": spec.max_restarts,
            "reason": None,
            "started": now_s,
            "ended": None,
            "workers": [],
        }
        with contextlib.suppress(OSError):
            run_record.write(records, record)
            self._write()

    def __enter__(self) -> Self:
        """It is shown."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """All are here, and the run shows itself; or what has happened instead."""
        if isinstance(error, UsageError):
            self._end(str(error), is_stopped=isinstance(error, StoppedEarlyError))
        elif error is None:
            with contextlib.suppress(OSError):
                (self._folder / FILE).unlink(missing_ok=True)
        elif isinstance(error, Exception):  # another job follows, with a record of its own
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._end("msrun has ended", is_stopped=False)

    def asked(self, signum: int) -> StoppedEarlyError:
        """Somebody has asked this node's msrun to end: of ``msrun stop`` all nodes are to hear."""
        is_for_all = signum == SIGTERM and take_note(self._folder) is not None
        why = f"stopped by {signal_name(signum)} on {self._host}"
        if self._is_spare:
            return StoppedEarlyError(f"{why}, which waited as a spare node", signum)
        why += " before all nodes were here"
        if not (is_for_all or self.leads):
            why += ": the other nodes go on waiting"
        return StoppedEarlyError(why, signum, is_for_all=is_for_all)

    def wait(self, text: str) -> None:
        """Show what is waited for."""
        self._is_spare = text == SPARE  # the job runs, or will: this node waits beside it
        self._status["reason"] = text
        self._write()

    def _end(self, why: str, *, is_stopped: bool) -> None:
        """The job does not begin."""
        self._status |= {
            "state": STOPPED if is_stopped else FAILED,
            "reason": why,
            "ended": time.time(),
        }
        self._write()

    def _write(self) -> None:
        self._status["updated"] = time.time()
        with contextlib.suppress(OSError):
            content = json.dumps(self._status).encode()
            write_atomic(self._folder / FILE, content, durable=False, private=True)
