"""The options for stopping, saving and recovering: times, places, and what follows a failure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import NamedTuple

from agent.spec.job_spec import CopyMode, DumpSpec, ReplaceSpec, Timeouts, UsageError
from agent.spec.timeouts import TimeoutLadder, TimeoutRung, derive, exit_times
from msrun.options.logs import folder
from msrun.options.settings import Setting, Settings, bounded
from msrun.options.table import BY_DEST
from worker_hooks.contract import env


class RecoveryOptions(NamedTuple):
    """How long msrun waits, and how it dumps."""

    timeouts: Timeouts
    dump: DumpSpec


def recovery_options(settings: Settings, environ: Mapping[str, str]) -> RecoveryOptions:
    """The checked times and places.

    Raises:
        UsageError: times contradict each other, or a value is invalid.
    """
    grace = _grace(settings, environ)
    freeze, scheduler = _rung(settings, "freeze_timeout"), _rung(settings, "scheduler_grace")
    ladder = derive(
        freeze,
        _rung(settings, "update_grace"),
        _rung(settings, "dump_timeout"),
        None if grace is None else TimeoutRung(float(grace.text), grace.shown),
        scheduler,
    )
    exit_s, asked_exit_s = exit_times(ladder, _rung(settings, "grace"), freeze, scheduler)
    start = settings.integer("cluster_time_out")
    if start == 0:
        shown = settings.of("cluster_time_out").shown
        raise UsageError(f"{shown} must be above 0, or negative to set no bound")
    timeouts = Timeouts(
        start_s=None if start is None or start < 0 else float(start),
        grace_s=ladder.grace_s,
        scheduler_s=ladder.scheduler_s,
        exit_s=exit_s,
        asked_exit_s=asked_exit_s,
        hang_s=_hang(settings),
    )
    return RecoveryOptions(timeouts, _dump(settings, ladder, environ))


def _grace(settings: Settings, environ: Mapping[str, str]) -> Setting | None:
    """The stop grace from torchrun's option or its variable; ``None``: neither is set."""
    setting = settings.given.get("shutdown_timeout")
    inherited = environ.get(env.SHUTDOWN_TIMEOUT)
    if setting is None and inherited:
        setting = Setting(inherited, env.SHUTDOWN_TIMEOUT)
    if setting is not None:
        bounded(setting, BY_DEST["shutdown_timeout"])
    return setting


def _hang(settings: Settings) -> float | None:
    """Seconds until a rank without progress counts as hung; ``None``: by its pace; 0: never."""
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


def _rung(settings: Settings, dest: str) -> TimeoutRung | None:
    seconds = settings.seconds(dest)
    return None if seconds is None else TimeoutRung(seconds, settings.of(dest).shown)


def _dump(settings: Settings, ladder: TimeoutLadder, environ: Mapping[str, str]) -> DumpSpec:
    return DumpSpec(
        audit=_audit(settings.of("audit")),
        update_grace_s=ladder.update_grace_s,
        freeze_s=ladder.freeze_s,
        stall_s=ladder.stall_s,
        split=settings.boolean("dump_split"),
        fallback=folder(fallback) if (fallback := settings.of("dump_fallback")).text else None,
        keep=settings.integer("keep_dumps") or 0,
        recover_arg=settings.text("recover_arg") if "recover_arg" in settings.given else None,
        is_strict=settings.boolean("strict"),
        restarts_explicit="max_restarts" in settings.given,
        ttp=_ttp(environ),
        copies=CopyMode(settings.of("protect_memory").text),
        copy_every=settings.integer("protect_every") or 0,
    )


def _audit(setting: Setting) -> float:
    """A share of the time, from 0 to 1."""
    try:
        share = float(setting.text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{setting.shown} must be a share of the time from 0 to 100, such as 0.5%")
    return share


def _ttp(environ: Mapping[str, str]) -> bool:
    """MindSpore's switch for dumps; on unless it says otherwise."""
    text = environ.get(env.ENABLE_TFT, "")
    try:
        return env.tft_features(text).get("TTP", True)
    except ValueError as error:
        raise UsageError(f"{env.ENABLE_TFT}={text} {error}") from None


_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})

_OURS = frozenset({signal.SIGCHLD})  # means that a worker has ended

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})


def graceful_signals(setting: Setting) -> tuple[int, ...]:
    """The numbers of the named signals.

    Raises:
        UsageError: a signal is unknown, or cannot serve as a request.
    """
    words = (word.strip() for word in setting.text.split(","))
    return tuple(dict.fromkeys(_number(word, setting.shown) for word in words if word))


def _number(word: str, shown: str) -> int:
    name = word.upper()
    known = signal.Signals.__members__
    found: int | None = known.get(name) or known.get(f"SIG{name}")
    if found is None and word.isascii() and word.isdigit():
        found = int(word) if int(word) in signal.valid_signals() else None
    if found is None:
        raise UsageError(f"{shown}: {word} is not a signal of this system, such as SIGUSR1 or 10")
    if found in _UNCATCHABLE:
        raise UsageError(f"{shown}: no program can catch {word}: choose another signal")
    if found in _OURS:
        raise UsageError(f"{shown}: msrun needs {word} for itself: choose another signal")
    if found in _FAULTS:
        raise UsageError(f"{shown}: {word} means that a program crashed: choose another signal")
    return int(found)


REPLACE, DUMP, RESTART = "replace", "dump", "restart"

RUNGS = (REPLACE, DUMP, RESTART)


class OnFailure(NamedTuple):
    """What msrun does when a rank fails; each only if the one before it is impossible."""

    replace: ReplaceSpec
    dumps: bool  # the survivors save their state
    max_restarts: int


def on_failure(settings: Settings, environ: Mapping[str, str]) -> OnFailure:
    """The checked rungs.

    Raises:
        UsageError: a word is unknown, the order is wrong, or --max-restarts contradicts them.
    """
    setting = settings.of("on_failure")
    rungs = _rungs(setting)
    restarts = settings.integer("max_restarts") or 0
    if restarts and RESTART not in rungs:
        shown = settings.of("max_restarts").shown
        raise UsageError(
            f"{setting.shown} contradicts {shown}: add {RESTART} to it, or remove one of the two "
            "options"
        )
    replace = _replace(settings, rungs, environ, is_explicit="on_failure" in settings.given)
    return OnFailure(replace, dumps=DUMP in rungs, max_restarts=restarts)


def _rungs(setting: Setting) -> tuple[str, ...]:
    words = tuple(word.strip() for word in setting.text.split(","))
    if words != tuple(rung for rung in RUNGS if rung in words):
        raise UsageError(
            f"{setting.shown}: give one or more of {', '.join(RUNGS)} in this order, each once"
        )
    return words


def _replace(
    settings: Settings, rungs: tuple[str, ...], environ: Mapping[str, str], *, is_explicit: bool
) -> ReplaceSpec:
    """Whether lost ranks are replaced: by --on-failure, else by MindSpore's switch."""
    most = settings.integer("max_replacements") or 0
    period_s = settings.seconds("replacement_period") or 0.0
    text = environ.get(env.ENABLE_TFT, "")
    features = env.tft_features(text)  # `_ttp` has checked that the text is valid
    why_off = ""
    if REPLACE not in rungs:
        why_off = settings.of("on_failure").shown
    elif not features.get("TTP", True) or not (is_explicit or features.get("ARF", True)):
        why_off = f"{env.ENABLE_TFT}={text}"
    elif not most:
        why_off = settings.of("max_replacements").shown
    why = f"replacing is off ({why_off})" if why_off else ""
    return ReplaceSpec(is_on=not why_off, why_off=why, max_replacements=most, period_s=period_s)
