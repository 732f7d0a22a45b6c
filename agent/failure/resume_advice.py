"""The last lines of a job that did not succeed: what is saved of it, and what to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agent.controller.protection import cure_of
from agent.records import run_record
from agent.records.run_record import Record
from agent.text.sanitize import sanitized
from worker_hooks.storage.find import Verify, search_of_run
from worker_hooks.storage.manifest import read

OTHER_NODES = "start the other nodes with the line that started them{}, and this one with the next:"
ELSEWHERE = ", but with {} and without --node-rank"


class KeptCheckpoint(NamedTuple):
    """A checkpoint that the job can resume from."""

    step: int
    world_size: int
    path: str


class ResumeAdvice(NamedTuple):
    """The parts of the advice; an empty text is left out.

    ``lost``: why the newest step is not in ``kept``. ``gave_up``: why restarts were left unused.
    ``not_replaced``: why all ranks stopped although some could have been replaced.
    """

    kept: KeptCheckpoint | None
    lost: str
    command: str  # that resumes the job
    gave_up: str = ""
    not_replaced: str = ""
    has_other_nodes: bool = False
    meets_at: tuple[str, ...] = ()  # options, where this node is not the one that its line means

    @property
    def text(self) -> str:
        """The advice for people; the last line is what to type."""
        return "\n".join(f"msrun: {line}" for line in _lines(self))


def resume_advice(
    saved: str | None,
    lost: str,
    record: Record,
    environ: Mapping[str, str],
    *,
    is_away: bool,
    gave_up: str = "",
    not_replaced: str = "",
    has_other_nodes: bool = False,
    meets_at: tuple[str, int] | None = None,
) -> ResumeAdvice:
    """Find out what is saved.

    Args:
        saved: the checkpoint folder that is known to be the newest, if any.
        lost: why the newest step is not in it, as text.
        is_away: the command was typed in another folder than the run's.
        gave_up: why restarts were left unused, as text.
        not_replaced: why ranks were not replaced that could have been, as text.
        has_other_nodes: the job runs on several nodes.
        meets_at: this node has taken the part of another one: host and port for all that resume.
    """
    there: tuple[str, ...] = ()
    if meets_at is not None:
        there = f"--master-addr={meets_at[0]}", f"--master-port={meets_at[1]}"
    kept = (_kept(saved) if saved else None) or newest_checkpoint(record)
    command = "" if kept is None else _command(record, kept, environ, there, is_away=is_away)
    return ResumeAdvice(
        kept=kept,
        lost=lost,
        command=command,
        gave_up=gave_up,
        not_replaced=not_replaced,
        has_other_nodes=has_other_nodes,
        meets_at=there,
    )


def _kept(path: str) -> KeptCheckpoint | None:
    try:
        manifest = read(Path(path))
    except ValueError:
        return None
    if manifest.is_disputed:  # nobody resumes from it
        return None
    return KeptCheckpoint(manifest.step, manifest.world_size, path)


def newest_checkpoint(record: Record) -> KeptCheckpoint | None:
    """The newest checkpoint that the run can resume from; checked by sizes only."""
    lineage, folders = (record.saves_as, *record.lineage), map(Path, record.checkpoints)
    found = search_of_run(folders, lineage, record.resumed_step, verify=Verify.QUICK)
    newest = found.newest
    if newest is None:
        return None
    return KeptCheckpoint(newest.manifest.step, newest.manifest.world_size, str(newest.path))


def _command(
    record: Record,
    kept: KeptCheckpoint,
    environ: Mapping[str, str],
    there: tuple[str, ...],
    *,
    is_away: bool,
) -> str:
    """``msrun --resume``, with the run's id where the bare command would mean another run.

    Without a record of the run, the full command line that resumes from the folder.
    """
    known = list(run_record.records(environ))
    if not any(one.checkpoints for one in known if one.record_id == record.record_id):
        return shlex.join(("msrun", f"--resume={os.path.dirname(kept.path)}", *record.argv[1:]))
    is_newest = all(other.started <= record.started or other.cwd != record.cwd for other in known)
    which = () if is_newest and not is_away else (record.record_id,)
    first = ("--node-rank=0", *there) if there else ()
    return shlex.join(("msrun", *first, "--resume", *which))


def _lines(closing: ResumeAdvice) -> Iterator[str]:
    kept = closing.kept
    if closing.not_replaced:
        cure = cure_of(closing.not_replaced)
        yield f"not replaced: {sanitized(closing.not_replaced)}{f'; {cure}' if cure else ''}"
    if closing.gave_up:
        yield f"gave up: {sanitized(closing.gave_up)}"
    if closing.lost:
        none = "" if kept else "; no older checkpoint remains"
        yield f"lost: {sanitized(closing.lost)}{none}"
    if kept is not None:
        ranks = "1 rank" if kept.world_size == 1 else f"{kept.world_size} ranks"
        name = "older checkpoint" if closing.lost else "saved"
        yield f"{name}: step {kept.step}, {ranks}, {sanitized(kept.path)}"
        if closing.has_other_nodes:
            elsewhere = ELSEWHERE.format(" ".join(closing.meets_at)) if closing.meets_at else ""
            yield OTHER_NODES.format(elsewhere)
        yield f"to resume: {closing.command}"


def as_json(closing: ResumeAdvice) -> dict[str, Any]:
    """For programs: a part of ``failure.json``."""
    kept = None if closing.kept is None else {**closing.kept._asdict(), "command": closing.command}
    why = {"lost": closing.lost, "gave_up": closing.gave_up, "not_replaced": closing.not_replaced}
    return {"saved": kept, **{key: words or None for key, words in why.items()}}
