"""The workers' output: files made before they start, and shown on the console while they grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from agent.records import worker_files
from agent.records.journal import Journal
from agent.records.log_view import LogView
from agent.records.tail import Tail
from agent.spec.job_spec import JobSpec, Std
from worker_hooks.contract.layout import RunLayout, held
from worker_hooks.contract.protocol import WorkerOrder

TORCHRUN_PREFIX = "[${role_name}${local_rank}]:"
PREFIX = "[rank ${rank}]: "
STREAMS = (("stdout", Std.OUT, 1), ("stderr", Std.ERR, 2))


class WorkerOutput:
    """Files and views of one run."""

    def __init__(
        self, spec: JobSpec, layout: RunLayout, journal: Journal, progress: Callable[[str], None]
    ) -> None:
        """``progress`` shows a line on a terminal that the next one replaces."""
        self._spec = spec
        self._layout = layout
        self._journal = journal
        self._tail = Tail(journal.trouble)
        self._next_logs: dict[int, int] = {}  # rank -> descriptor of its replacement's log
        self.progress = progress

    def begin(self, attempt: int, orders: Sequence[WorkerOrder]) -> None:
        """Keep the past attempt's files, make new ones and show them as they grow."""
        self.make(attempt, orders)
        self._show(attempt, orders, None)

    def make(self, attempt: int, orders: Sequence[WorkerOrder]) -> None:
        """Keep the files that these ranks had in the past attempt and make new ones for them."""
        if self._spec.logs.disabled:
            return
        if attempt > 0:
            worker_files.keep(self._layout, attempt - 1, orders)
        for order in orders:
            if order.rank in self._next_logs:
                worker_files.rename_next(self._layout, order.rank, self._journal.trouble)
        worker_files.make(orders, self._journal.trouble)

    def make_next(self, orders: Sequence[WorkerOrder]) -> tuple[WorkerOrder, ...]:
        """Make files for replacements while the dead ranks' files have the names.

        :meth:`make` gives the new files those names.

        Returns:
            The orders, with paths that are valid until :meth:`close_next`; without those whose
            files cannot be made.
        """
        self.close_next()
        if self._spec.logs.disabled:
            return tuple(orders)
        logs = {order.rank: str(self._layout.worker_log(order.rank)) for order in orders}
        wanted = [one.rank for one in orders if logs[one.rank] in {one.stdout, one.stderr}]
        opened = worker_files.open_next(self._layout, wanted, self._journal.trouble)
        self._next_logs = dict(opened)
        paths = {logs[rank]: held(file) for rank, file in self._next_logs.items()}
        made = tuple(
            order._replace(
                stdout=paths.get(order.stdout, order.stdout),
                stderr=paths.get(order.stderr, order.stderr),
            )
            for order in orders
            if order.rank in self._next_logs or order.rank not in wanted
        )
        worker_files.make_folders(made, self._journal.trouble)
        return made

    def discard(self, orders: Sequence[WorkerOrder]) -> None:
        """Remove the files of cancelled replacements: others will write to the same names."""
        if not self._spec.logs.disabled:
            worker_files.remove(self._layout, orders)

    def close_next(self) -> None:
        """Close the next logs: each writer has opened its own by now, or never will."""
        for rank, file in self._next_logs.items():
            os.close(file)
            worker_files.remove_next(self._layout, rank)
        self._next_logs = {}

    def add(self, attempt: int, orders: Sequence[WorkerOrder]) -> None:
        """Also show the replacements' files, which were made, as they grow."""
        self._show(attempt, orders, frozenset(order.rank for order in orders))

    def _show(
        self, attempt: int, orders: Sequence[WorkerOrder], ranks: frozenset[int] | None
    ) -> None:
        if self._spec.logs.disabled:
            return
        views: dict[Path, LogView] = {}
        first = self._spec.first_rank
        for order in orders:
            local_rank = order.rank - first
            for name, stream, fd in STREAMS:
                path = Path(getattr(order, name))
                for view in self._views(attempt, local_rank, order.rank, name, stream, fd, path):
                    views.setdefault(path, view)
        self._tail.follow(list(views.values()), ranks)

    def _views(
        self,
        attempt: int,
        local_rank: int,
        rank: int,
        name: str,
        stream: Std,
        fd: int,
        path: Path,
    ) -> list[LogView]:
        logs = self._spec.logs
        teed = bool(logs.tee.get(local_rank, Std.NONE) & stream)
        redirected = bool(logs.redirects.get(local_rank, Std.NONE) & stream)
        words = logs.duplicate_stdout_filters if fd == 1 else logs.duplicate_stderr_filters
        filtered = self._layout.filtered(attempt, name) if words and logs.torchrun_tree else None
        if filtered is not None:
            worker_files.make_file(filtered, self._journal.trouble)
        shown = (teed or not redirected) and self._is_shown(local_rank, rank)
        if not shown and not (teed and filtered):
            return []
        return [
            LogView(
                path=path,
                fd=fd if shown else -1,
                prefix=self._prefix(local_rank, rank, teed=teed),
                filters=tuple(word.encode() for word in words) if teed and filtered else (),
                filtered=filtered if teed else None,
                rank=rank,
                folds=not teed and logs.prefix_template is None and self._spec.nproc > 1,
            )
        ]

    def _is_shown(self, local_rank: int, rank: int) -> bool:
        logs = self._spec.logs
        by_filter = logs.local_ranks_filter is None or local_rank in logs.local_ranks_filter
        return by_filter and (logs.tail is None or rank in logs.tail)

    def _prefix(self, local_rank: int, rank: int, *, teed: bool) -> bytes | None:
        template = self._spec.logs.prefix_template
        if template is None:
            if teed:
                template = TORCHRUN_PREFIX
            elif self._spec.nproc == 1:
                return None  # one worker: its output unchanged, prompts and progress bars too
            else:
                template = PREFIX
        values = {"role_name": self._spec.role, "rank": rank, "local_rank": local_rank}
        return Template(template).safe_substitute(values).encode()

    def hush(self) -> None:
        """Show what has been written by now, and nothing that is written later."""
        self._tail.hush()

    def close(self, patience_s: float) -> bool:
        """Show the rest; False if the console accepted nothing for ``patience_s``."""
        return self._tail.close(patience_s)
