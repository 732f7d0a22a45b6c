"""Requests to end the job: signals, with a note of ``msrun stop`` or without, and a file."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from agent.controller import events as ev
from agent.hooks.exit_files import ExitFiles
from agent.hooks.rank_links import Loop
from agent.launch import signals
from agent.machine.loop_calls import until_closed
from agent.records import stop_note
from agent.spec.job_spec import JobSpec

SHORT = frozenset({signal.SIGTERM, signal.SIGINT})  # a batch system that sends these kills soon


class Requests:
    """Turns every request into an event. Signal handlers only enqueue."""

    def __init__(
        self, spec: JobSpec, notes: Path, began_s: float, say: Callable[[str], None]
    ) -> None:
        """Take the parts; no request is taken before :meth:`attach`, but files are watched.

        Args:
            notes: the folder where ``msrun stop`` leaves its notes.
            began_s: when the run began, in seconds since the epoch.
            say: prints one sentence for people.
        """
        self._spec = spec
        self._notes = notes
        self._say = say
        self._loop: Loop | None = None
        self._files = ExitFiles(began_s, self._on_file, self._on_file_trouble)

    def attach(
        self, loop: Loop, post: Callable[[ev.Event], None], attempt: Callable[[], int]
    ) -> None:
        """Listen on ``loop``.

        Args:
            attempt: the number of the present attempt.
        """
        self._loop = loop
        self._post = post
        self._attempt = attempt
        spec = self._spec
        for signum in signals.stops(spec) | signals.graceful(spec):
            loop.add_signal_handler(signum, self._on_stop, signum)
        for signum in signals.passed_on(spec):
            loop.add_signal_handler(signum, self._on_passed, signum)
        if spec.exit_file is not None:
            self._files.add(str(spec.exit_file), is_early=True)
        signals.release(spec)
        for signum in signals.taken_late():
            loop.call_soon(self._on_stop, signum)

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file, as a training script says."""
        self._files.add(path, is_early=False)

    def close(self) -> None:
        """The job is over: a late signal must not cut off its report."""
        self._files.close()
        loop, self._loop = self._loop, None
        signals.hold(self._spec)
        if loop is not None:
            for signum in signals.all_of(self._spec):
                loop.remove_signal_handler(signum)
        signals.note_late(self._spec)
        signals.release(self._spec)

    def _on_stop(self, signum: int) -> None:
        note = stop_note.take_note(self._notes) if signum == signal.SIGTERM else None
        is_graceful, cluster = signum in signals.graceful(self._spec), self._spec.cluster
        # Ctrl-C and `msrun stop` come from somebody who means the job
        is_of_node = note is None and signum in signals.for_node(self._spec)
        is_patient = is_graceful and signum not in SHORT
        grace_s, why = None, ""
        if note is not None:
            is_patient, grace_s = note.is_graceful, note.grace_s
            why = note.words
        if is_patient and grace_s is None:
            grace_s = self._spec.timeouts.asked_exit_s
        self._post(
            ev.StopRequested(
                signum,
                why,
                grace_s,
                passes=not is_graceful,
                is_now=note is not None and note.is_now,
                node=self._spec.node_rank,
                leaves=is_of_node and cluster is not None and cluster.leaves,
            )
        )

    def _on_passed(self, signum: int) -> None:
        self._post(ev.SignalReceived(signum))

    # --- in the thread that watches -------------------------------------------------------------

    def _on_file(self, why: str) -> None:
        self._later(self._on_request, why)

    def _on_file_trouble(self, sentence: str) -> None:
        self._later(self._say, sentence)

    def _later(self, call: Callable[[str], None], text: str) -> None:
        loop = self._loop
        if loop is not None:
            until_closed(loop.call_soon_threadsafe)(call, text)

    def _on_request(self, why: str) -> None:
        if self._loop is not None:
            self._post(ev.ExitRequestedByFile(self._attempt(), why))
