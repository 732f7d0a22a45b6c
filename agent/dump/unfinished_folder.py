"""The folder of a dump that is being written, until it is complete or given up. File work."""

from __future__ import annotations

import shutil

from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import commit


class AbandonedError(Exception):
    """The dump was given up meanwhile."""


class UnfinishedFolder:
    """One folder. All but ``abandon`` is called in the scribe's thread only."""

    def __init__(self, layout: DumpLayout) -> None:
        """Nothing is there yet."""
        self._layout = layout
        self._is_begun = False
        self._is_abandoned = False

    def begin(self) -> None:
        """Make the folder; what an interrupted dump left there is removed.

        Raises:
            OSError: the place cannot be written to.
        """
        commit.make_folder(self._layout)
        self._is_begun = True

    def check(self) -> None:
        """Go on only if it was not given up.

        Raises:
            AbandonedError: it was.
        """
        if self._is_abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        """Let nothing more be written; called in the loop, before :meth:`remove` is ordered."""
        self._is_abandoned = True

    def remove(self) -> None:
        """Remove what was written."""
        if self._is_begun:
            shutil.rmtree(self._layout.unfinished, ignore_errors=True)
