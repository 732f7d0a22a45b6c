"""Answers a training script's Hello: whether it is guarded, and what it resumes from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.controller import events as ev
from agent.hooks.rank_links import RankLinks
from agent.hooks.services import Services
from agent.records.complete_checkpoint import CompleteCheckpoint, look_until_there
from agent.records.run_record import KeptRecord
from agent.spec.job_spec import DumpSpec
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest
from worker_hooks.storage.find import search


class _Found(NamedTuple):
    """The checkpoint to resume from."""

    path: str = ""  # empty: nothing was ever saved
    step: int = 0
    skipped: tuple[str, ...] = ()  # sentences about what cannot be trusted
    runs: tuple[str, ...] = ()  # that saved it, and those that it resumed, newest first
    refusal: str = ""


class Handshake:
    """The answer to every Hello of an attempt; the same for all ranks."""

    def __init__(
        self,
        spec: DumpSpec,
        record_id: str,
        fallback: Path,
        links: RankLinks,
        kept: KeptRecord,
        services: Services,
    ) -> None:
        """Take the parts.

        Args:
            spec: the times that ranks have to know.
            record_id: the run's: a restart resumes unasked from what the run itself saved.
            fallback: where dumps go when the script's folder cannot be written.
            kept: remembers where the run saves, and what it began from; does file work.
        """
        # what an earlier run saved after the step that this one began from is not its past
        self._own = frozenset({record_id})
        self.lineage = spec.lineage
        """Record ids of the runs that this one resumed, newest first."""
        self.resumed_step = spec.resume_step
        """Of those runs, that this one began from."""
        self._spec = spec
        self._fallback = fallback
        self._links = links
        self._services = services
        self._record = kept
        self._kept: set[str] = set()
        self._attempt = -1
        self._joining = ""  # what newcomers resume from; empty: no rank is replaced
        self._is_searched = False
        self._resume = ""
        self._memory = ""  # where that is, as long as it is not in its folder
        self._refusal = ""
        self._paths: dict[int, str] = {}
        self._breakpoints: dict[int, tuple[Path, str]] = {}
        self.checkpoints: set[str] = set()
        """Where ranks save by themselves, each its part."""
        self._waiting: list[int] = []  # for the search

    def begin(self, attempt: int, resume: str, memory: str = "") -> None:
        """An attempt begins.

        Args:
            resume: the checkpoint that it resumes from, or empty.
            memory: where that is while it is being written; empty: it is written.
        """
        self._attempt = attempt
        self._resume, self._memory = resume, memory
        self._refusal = ""
        self._joining, self._is_searched = "", False
        self._paths.clear()
        self._breakpoints.clear()
        self._waiting.clear()

    def renew(self, attempt: int, path: str, newcomers: Sequence[int]) -> None:
        """Newcomers join the survivors: no checkpoint is newer than what all resume from."""
        self._attempt, self._joining = attempt, path
        self._waiting.clear()
        for rank in newcomers:
            self._paths.pop(rank, None)
            self._breakpoints.pop(rank, None)

    def go_on(self) -> None:
        """All have joined: a rank that says Hello from now on has made a new state."""
        self._joining = ""

    @property
    def resumed(self) -> str:
        """The checkpoint that the ranks of this attempt resume from; or empty."""
        return self._resume

    def place(self, ranks: Sequence[int]) -> str:
        """Where these ranks save to, else where any rank does; empty: nowhere."""
        paths = (self._paths.get(rank, "") for rank in (*ranks, *self._paths))
        return next(filter(None, paths), "")

    def breakpoint(self, ranks: Sequence[int]) -> tuple[Path, str] | None:
        """Folder and prefix of an exception's dump, as these ranks want it, else as any does."""
        wanted = (self._breakpoints.get(rank) for rank in (*ranks, *self._breakpoints))
        return next(filter(None, wanted), None)

    def complete(self, path: str, step: int) -> None:
        """A checkpoint of this run is on the disk: no later attempt begins from an older one."""
        self._record.complete(CompleteCheckpoint(path, step))
        self._services.files.do(self._record.write, lambda _: None)

    def greet(self, hello: protocol.Hello) -> None:
        """Answer a rank, at once unless the newest checkpoint has to be found first."""
        self._paths[hello.rank] = hello.ckpt_save_path
        if hello.checkpoints and hello.breakpoints:
            self._breakpoints[hello.rank] = Path(hello.checkpoints), hello.breakpoints
        if self._joining:
            self._welcome(hello.rank, self._joining)
            return
        if hello.checkpoints:
            self.checkpoints.add(os.path.abspath(hello.checkpoints))
        places = [place for place in (hello.ckpt_save_path, hello.checkpoints) if place]
        for place in dict.fromkeys(places or [str(self._fallback)]):
            self._keep(place)
        is_again = self._attempt > 0 and bool(hello.checkpoints)
        if not self._is_due(bool(places) and hello.wants_resume, is_again):
            self._welcome(hello.rank, self._resume)
            return
        if self._refusal:
            self.refuse((hello.rank,), self._refusal)
            return
        self._waiting.append(hello.rank)
        if len(self._waiting) == 1:
            attempt, folders = self._attempt, (*map(Path, places), self._fallback)
            resume, memory, own = self._resume, self._memory, self._own
            newer = partial(_newer, folders, resume, memory or resume, own)
            find = newer if is_again else partial(_newest, folders)
            find = partial(_present, self._record.present.complete, find)
            self._services.files.do(find, lambda found: self._answer(attempt, found))

    def _is_due(self, is_asked: bool, is_again: bool) -> bool:
        """Whether a rank has to wait for a search: for what is newer, or for anything at all."""
        if is_again:
            return not self._is_searched
        return is_asked and not self._resume

    def _keep(self, place: str) -> None:
        if place not in self._kept:
            self._kept.add(place)
            self._services.files.do(lambda: self._record.add_place(place), lambda _: None)

    def refuse(self, ranks: Sequence[int], why: str) -> None:
        """Refuse these ranks; each exits on its own."""
        for rank in ranks:
            self._welcome(rank, refusal=why)

    def _answer(self, attempt: int, found: _Found | Exception) -> None:
        """Answer the ranks that wait for the newest checkpoint."""
        if attempt != self._attempt:
            return
        if isinstance(found, Exception):
            found = _Found(refusal=f"the checkpoints cannot be searched: {found}")
        for sentence in found.skipped:
            self._services.say(sentence)
        waiting, self._waiting = tuple(self._waiting), []
        is_new = found.path != self._resume
        self._memory = "" if is_new else self._memory
        self._resume, self._refusal, self._is_searched = found.path, found.refusal, True
        if found.runs and found.runs[0] not in self._own:
            self.lineage = tuple(dict.fromkeys((*found.runs, *self.lineage)))
            self.resumed_step = found.step
            lineage, step = self.lineage, found.step
            self._services.files.do(lambda: self._record.resumed(lineage, step), lambda _: None)
        if found.refusal:
            self._services.post(ev.StartRefused(attempt, found.refusal, waiting))
            return
        for rank in waiting:
            self._welcome(rank, found.path)
        if found.path and is_new:
            self._services.post(ev.CheckpointFound(attempt, found.path, found.step))

    def _welcome(self, rank: int, resume: str = "", refusal: str = "") -> None:
        is_there = bool(self._memory) and resume == self._resume and not self._joining
        welcome = protocol.Welcome(
            resume=self._memory if is_there else resume,
            folder=resume if is_there else "",
            refusal=refusal,
            fallback=str(self._fallback),
            update_grace_s=self._spec.update_grace_s,
            stall_s=self._spec.stall_s,
            is_barred=bool(self._joining),
            lineage=":".join(self.lineage),
            resumed_step=self.resumed_step,
        )
        self._links.send(rank, welcome)


def _present(known: CompleteCheckpoint | None, find: Callable[[], _Found]) -> _Found:
    """What is found, unless that is older than what the run is known to have completed."""
    found, is_away = look_until_there(known, find, lambda each: each.step)
    if known is None or not is_away:
        return found
    return _Found(refusal=f"{known.describe()} Once it is back: msrun --resume")


def _newer(folders: Sequence[Path], resume: str, where: str, own: frozenset[str]) -> _Found:
    """The newest checkpoint that the run itself saved after ``resume``; else ``resume``.

    ``where``: that one is, perhaps in memory.
    """
    step = -1
    if resume:
        with contextlib.suppress(ValueError):  # it is gone
            step = manifest.read(Path(where)).step
    found = search(folders, runs=own, above=step)
    remarks = found.remarks if found.has_damaged else ()  # unfinished ones are no news here
    if found.newest is not None:
        return _Found(str(found.newest.path), found.newest.manifest.step, remarks)
    return _Found(resume, step, remarks)


def _newest(folders: Sequence[Path]) -> _Found:
    found = search(folders)
    if found.newest is not None:
        about = found.newest.manifest
        return _Found(str(found.newest.path), about.step, found.remarks, manifest.past(about))
    # what a first save that was killed left behind is no checkpoint that is missed
    if found.has_damaged:
        refusal = f"no checkpoint in {folders[0]} can be trusted: move them away to begin anew"
        return _Found(skipped=found.remarks, refusal=refusal)
    nothing = f"there is nothing to resume in {folders[0]}: training begins anew"
    return _Found(skipped=(*found.remarks, nothing))
