"""What the options say about stopping, saving and going on: the times and the places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import DumpSpec, Timeouts, UsageError
from agent.spec.timeouts import Ladder, Rung, derive, exit_times
from msrun.options.logs import folder
from msrun.options.settings import Setting, Settings, bounded
from msrun.options.table import BY_DEST
from worker_hooks.contract import env


class Guard(NamedTuple):
    """How long msrun waits, and how it saves."""

    timeouts: Timeouts
    dump: DumpSpec


def guard(settings: Settings, environ: Mapping[str, str]) -> Guard:
    """The checked times and places.

    Raises:
        UsageError: times that are out of order, or a value that cannot be meant.
    """
    grace = _grace(settings, environ)
    freeze, scheduler = _rung(settings, "freeze_timeout"), _rung(settings, "scheduler_grace")
    ladder = derive(
        freeze,
        _rung(settings, "update_grace"),
        _rung(settings, "dump_timeout"),
        None if grace is None else Rung(float(grace.text), grace.shown),
        scheduler,
    )
    exit_s, asked_exit_s = exit_times(ladder, _rung(settings, "grace"), freeze, scheduler)
    start = settings.integer("cluster_time_out")
    if start == 0:
        shown = settings.of("cluster_time_out").shown
        raise UsageError(f"{shown} must be above 0, or negative for no bound")
    timeouts = Timeouts(
        start_s=None if start is None or start < 0 else float(start),
        grace_s=ladder.grace_s,
        scheduler_s=ladder.scheduler_s,
        exit_s=exit_s,
        asked_exit_s=asked_exit_s,
        hang_s=_hang(settings),
    )
    return Guard(timeouts, _dump(settings, ladder, environ))


def _grace(settings: Settings, environ: Mapping[str, str]) -> Setting | None:
    """The stop grace that was given, in torchrun's two ways."""
    setting = settings.given.get("shutdown_timeout")
    inherited = environ.get(env.SHUTDOWN_TIMEOUT)
    if setting is None and inherited:
        setting = Setting(inherited, env.SHUTDOWN_TIMEOUT)
    if setting is not None:
        bounded(setting, BY_DEST["shutdown_timeout"])
    return setting


def _hang(settings: Settings) -> float | None:
    """Seconds until a rank without progress hangs; ``None``: as its pace tells; 0: never."""
    setting = settings.of("hang_timeout")
    if setting.text.strip().lower() in {"", "auto"}:
        return None
    try:
        seconds = float(setting.text)
    except ValueError:
        raise UsageError(f"{setting.shown} must be auto, or seconds; 0 for never") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{setting.shown} must be auto, or seconds; 0 for never")
    return seconds


def _rung(settings: Settings, dest: str) -> Rung | None:
    seconds = settings.seconds(dest)
    return None if seconds is None else Rung(seconds, settings.of(dest).shown)


def _dump(settings: Settings, ladder: Ladder, environ: Mapping[str, str]) -> DumpSpec:
    return DumpSpec(
        update_grace_s=ladder.update_grace_s,
        freeze_s=ladder.freeze_s,
        stall_s=ladder.stall_s,
        split=settings.boolean("dump_split"),
        fallback=_fallback(settings.of("dump_fallback")),
        recover_arg=settings.text("recover_arg"),
        restarts_explicit="max_restarts" in settings.given,
        ttp=_ttp(environ),
    )


def _fallback(setting: Setting) -> Path | None:
    return folder(setting) if setting.text else None


def _ttp(environ: Mapping[str, str]) -> bool:
    """MindSpore's switch; nothing said means on."""
    text = environ.get(env.ENABLE_TFT, "")
    try:
        return env.tft_features(text).get("TTP", True)
    except ValueError as error:
        raise UsageError(f"{env.ENABLE_TFT}={text} {error}") from None
