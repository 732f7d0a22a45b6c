"""Watches the JSON files in which a graceful exit can be asked for: ``{"GracefulExit": 1}``.

Only a file that was changed after the run began counts, so a request that was met does not stop the
next run. A file system may be slow or gone, so looking has a thread of its own, which exists only
where there is a file to watch; a training step never opens it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from worker_hooks.contract.exit_file import KEY, LOOK_S, Stamp, content_of, stamp_of

_NS = 1_000_000_000


class _File(NamedTuple):
    """What was seen of a file."""

    stamp: Stamp | None  # None: it was not there
    is_doubtful: bool = False  # it was unreadable, perhaps because it is being written
    is_warned: bool = False  # people were warned


class ExitFiles:
    """Watches all such files of a job; callbacks are called in the watching thread."""

    def __init__(
        self, began_s: float, asked: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        """Watch nothing yet.

        Args:
            began_s: when the run began, in seconds since the epoch.
            asked: takes the sentence of a request.
            say: prints one sentence for people.
        """
        self._began_ns = int(began_s * _NS)
        self._asked = asked
        self._say = say
        self._files: dict[str, _File] = {}
        self._new: dict[str, bool] = {}  # path -> whether all that is there now is old
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, path: str, *, is_early: bool) -> None:
        """Watch a file; ``is_early``: no rank was started yet, so its present content is old."""
        with self._lock:
            if path not in self._files:
                self._new.setdefault(path, is_early)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="exit file", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; a look that is stuck in a dead file system is left alone."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(LOOK_S)

    def look(self) -> None:
        """Look at every file once."""
        with self._lock:
            new, self._new = self._new, {}
        for path, is_early in new.items():
            self._files[path] = self._first(path, is_early=is_early)
        for path in [each for each in self._files if each not in new]:
            self._files[path] = self._again(path, self._files[path])

    def _first(self, path: str, *, is_early: bool) -> _File:
        stamp = stamp_of(path)
        if stamp is None:
            return _File(None)
        if not is_early and stamp[3] > self._began_ns:
            return self._again(path, _File(None))
        if _wants_exit(path) is True:
            self._say(
                f"{path} has asked for a graceful exit since before this run began, which is "
                "ignored: change the file to ask again"
            )
        return _File(stamp)

    def _again(self, path: str, seen: _File) -> _File:
        stamp = stamp_of(path)
        if stamp is None or (stamp == seen.stamp and not seen.is_doubtful):
            return seen._replace(stamp=stamp, is_doubtful=False)
        wants = _wants_exit(path)
        if isinstance(wants, bool):
            if wants:
                self._asked(f"{path} asks for it")
            return _File(stamp, is_warned=seen.is_warned)
        if not seen.is_doubtful or stamp != seen.stamp:
            return seen._replace(stamp=stamp, is_doubtful=True)  # it may be half written
        if not seen.is_warned:
            self._say(f"{path} asks for nothing: {wants}")
        return _File(stamp, is_warned=True)


def _wants_exit(path: str) -> bool | str:
    """Whether the file asks for a graceful exit; why it cannot be understood."""
    try:
        content = content_of(path)
    except ValueError as error:
        return str(error)
    if not isinstance(content, dict):
        return f'it must be an object such as {{"{KEY}": 1}}'
    said = content.get(KEY, 0)
    if said not in (0, 1):
        return f'"{KEY}" must be 1 or 0'
    return bool(said)
