"""The last words of a job that did not succeed: what is saved of it, and the line to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agent.records import run_record
from agent.records.run_record import Record
from agent.text.sanitize import sanitized
from worker_hooks.storage.find import Verify, search
from worker_hooks.storage.manifest import read


class KeptCheckpoint(NamedTuple):
    """A checkpoint that can be gone on from."""

    step: int
    world_size: int
    path: str


class ResumeAdvice(NamedTuple):
    """What to say.

    ``lost``: why the newest step is not in ``kept``, empty if it is. ``gave_up``: why restarts
    were left unused, empty if none were. ``not_replaced``: why all ranks stopped for the failure of
    some, empty if nobody was to be replaced.
    """

    kept: KeptCheckpoint | None
    lost: str
    command: str  # to go on
    gave_up: str = ""
    not_replaced: str = ""

    @property
    def text(self) -> str:
        """For people; the last line is what to type."""
        return "\n".join(_lines(self))


def resume_advice(
    saved: str | None,
    lost: str,
    record: Record,
    environ: Mapping[str, str],
    *,
    is_away: bool,
    gave_up: str = "",
    not_replaced: str = "",
) -> ResumeAdvice:
    """Look at what remains.

    Args:
        saved: the checkpoint folder that is known to be the newest, if any.
        lost: why the newest step is not in it, in words.
        record: the run's.
        environ: msrun's environment.
        is_away: the person who typed the command is in another folder than the run's.
        gave_up: why restarts were left unused, in words.
        not_replaced: why nobody was replaced who could have been, in words.
    """
    kept = (_kept(saved) if saved else None) or older(record)
    command = "" if kept is None else _command(record, kept, environ, is_away=is_away)
    return ResumeAdvice(
        kept=kept, lost=lost, command=command, gave_up=gave_up, not_replaced=not_replaced
    )


def _kept(path: str) -> KeptCheckpoint | None:
    try:
        manifest = read(Path(path))
    except ValueError:
        return None
    return KeptCheckpoint(manifest.step, manifest.world_size, path)


def older(record: Record) -> KeptCheckpoint | None:
    """The newest checkpoint in the run's folders, whoever saved it; its bytes are not read."""
    newest = search(map(Path, record.checkpoints), verify=Verify.QUICK).newest
    if newest is None:
        return None
    return KeptCheckpoint(newest.manifest.step, newest.manifest.world_size, str(newest.path))


def _command(
    record: Record, kept: KeptCheckpoint, environ: Mapping[str, str], *, is_away: bool
) -> str:
    """``msrun --resume``, with the run's name where that alone would mean another run.

    Where the run could not be remembered, the whole line that goes on without its record.
    """
    known = list(run_record.records(environ))
    if not any(one.checkpoints for one in known if one.record_id == record.record_id):
        return shlex.join(("msrun", f"--resume={os.path.dirname(kept.path)}", *record.argv[1:]))
    is_newest = all(other.started <= record.started or other.cwd != record.cwd for other in known)
    return "msrun --resume" if is_newest and not is_away else f"msrun --resume {record.record_id}"


def _lines(closing: ResumeAdvice) -> Iterator[str]:
    kept = closing.kept
    if closing.not_replaced:
        yield f"not replaced: {sanitized(closing.not_replaced)}"
    if closing.gave_up:
        yield f"gave up: {sanitized(closing.gave_up)}"
    if closing.lost:
        none = "" if kept else "; no older checkpoint remains"
        yield f"lost: {sanitized(closing.lost)}{none}"
    if kept is not None:
        ranks = "1 rank" if kept.world_size == 1 else f"{kept.world_size} ranks"
        name = "older checkpoint" if closing.lost else "saved"
        yield f"{name}: step {kept.step}, {ranks}, {sanitized(kept.path)}"
        yield closing.command


def as_json(closing: ResumeAdvice) -> dict[str, Any]:
    """For programs: a part of ``failure.json``."""
    kept = None if closing.kept is None else {**closing.kept._asdict(), "command": closing.command}
    why = {"lost": closing.lost, "gave_up": closing.gave_up, "not_replaced": closing.not_replaced}
    return {"saved": kept, **{key: words or None for key, words in why.items()}}
