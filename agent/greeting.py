"""Answers a training script's first word: whether it is guarded, and what it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.links import Links
from agent.scribe import Scribe
from agent.spec import DumpSpec
from worker_hooks import manifest as manifests
from worker_hooks import protocol


class _Found(NamedTuple):
    """What can be gone on from."""

    path: str = ""  # empty: nothing was ever saved
    skipped: tuple[str, ...] = ()  # sentences about what cannot be trusted
    refusal: str = ""


class Greeting:
    """What the ranks of an attempt are told at their Hello; the same to all of them."""

    def __init__(
        self,
        spec: DumpSpec,
        fallback: Path,
        links: Links,
        scribe: Scribe,
        say: Callable[[str], None],
        keep_place: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            spec: the times that ranks are told.
            fallback: where dumps go when the script's folder cannot be written.
            links: carry the answers.
            scribe: does the file work.
            say: tells people one sentence.
            keep_place: remembers a folder that the run saves into; does file work.
        """
        self._spec = spec
        self._fallback = fallback
        self._links = links
        self._scribe = scribe
        self._say = say
        self._keep_place = keep_place
        self._kept: set[str] = set()
        self._attempt = -1
        self._resume = ""
        self._paths: dict[int, str] = {}
        self._waiting: list[int] = []  # for the search

    def begin(self, attempt: int, resume: str) -> None:
        """An attempt begins; ``resume``: the checkpoint it goes on from, or empty."""
        self._attempt = attempt
        self._resume = resume
        self._paths.clear()
        self._waiting.clear()

    def place(self, ranks: Sequence[int]) -> str:
        """Where these ranks save to, else where any rank does; empty: nowhere."""
        paths = (self._paths.get(rank, "") for rank in (*ranks, *self._paths))
        return next(filter(None, paths), "")

    def greet(self, hello: protocol.Hello) -> None:
        """Answer a rank, at once unless the newest checkpoint has to be found first."""
        path = hello.ckpt_save_path
        self._paths[hello.rank] = path
        if path and path not in self._kept:
            self._kept.add(path)
            self._scribe.do(lambda: self._keep_place(path), lambda _: None)
        if self._resume or not (path and hello.wants_resume):
            self._welcome(hello.rank, _Found(self._resume))
            return
        self._waiting.append(hello.rank)
        if len(self._waiting) == 1:
            attempt, folders = self._attempt, (Path(path), self._fallback)
            self._scribe.do(lambda: _search(folders), lambda found: self._answer(attempt, found))

    def _answer(self, attempt: int, found: _Found | Exception) -> None:
        """To ranks that ask by themselves for the newest checkpoint."""
        if attempt != self._attempt:
            return
        if isinstance(found, Exception):
            found = _Found(refusal=f"the checkpoints cannot be looked at: {found}")
        for sentence in (*found.skipped, *filter(None, [found.refusal])):
            self._say(sentence)
        waiting, self._waiting = self._waiting, []
        self._resume = found.path
        for rank in waiting:
            self._welcome(rank, found)

    def _welcome(self, rank: int, found: _Found) -> None:
        fallback, times = str(self._fallback), (self._spec.update_grace_s, self._spec.stall_s)
        self._links.send(rank, protocol.Welcome(found.path, found.refusal, fallback, *times))


def _search(folders: Sequence[Path]) -> _Found:
    skipped: list[str] = []
    offered = manifests.candidates_of(folders)
    newest = manifests.newest_of(offered, skipped.append)
    if newest is not None:
        return _Found(str(newest[0]), tuple(skipped))
    if offered:
        refusal = f"no checkpoint in {folders[0]} can be trusted: move them away to begin anew"
        return _Found("", tuple(skipped), refusal)
    return _Found()
