"""``--on_failure``: which rungs of the ladder a failure may take, and how often the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent.spec.job_spec import ReplaceSpec, UsageError
from msrun.options.settings import Setting, Settings
from worker_hooks.contract import env

REPLACE, DUMP, RESTART = "replace", "dump", "restart"
RUNGS = (REPLACE, DUMP, RESTART)


class OnFailure(NamedTuple):
    """What follows when a rank fails, each only if what is before it cannot be done."""

    replace: ReplaceSpec
    dumps: bool  # what the survivors hold is saved
    max_restarts: int


def on_failure(settings: Settings, environ: Mapping[str, str]) -> OnFailure:
    """The checked rungs.

    Raises:
        UsageError: a word that is none of them, a wrong order, or restarts that are left out.
    """
    setting = settings.of("on_failure")
    rungs = _rungs(setting)
    restarts = settings.integer("max_restarts") or 0
    if restarts and RESTART not in rungs:
        shown = settings.of("max_restarts").shown
        raise UsageError(
            f"{setting.shown} leaves out the restarts of {shown}: add {RESTART}, or leave out one "
            "of the two"
        )
    is_said = "on_failure" in settings.given
    return OnFailure(_replace(settings, rungs, environ, is_said=is_said), DUMP in rungs, restarts)


def _rungs(setting: Setting) -> tuple[str, ...]:
    words = tuple(word.strip() for word in setting.text.split(","))
    if words != tuple(rung for rung in RUNGS if rung in words):
        raise UsageError(
            f"{setting.shown}: give one or more of {', '.join(RUNGS)}, in this order, each once"
        )
    return words


def _replace(
    settings: Settings, rungs: tuple[str, ...], environ: Mapping[str, str], *, is_said: bool
) -> ReplaceSpec:
    """Whether lost ranks are replaced: as the flag says, else as MindSpore's switch does."""
    most = settings.integer("max_replacements") or 0
    period_s = settings.seconds("replacement_period") or 0.0
    text = environ.get(env.ENABLE_TFT, "")
    features = env.tft_features(text)  # that it can be read was checked with the dump
    why_off = ""
    if REPLACE not in rungs:
        why_off = settings.of("on_failure").shown
    elif not features.get("TTP", True) or not (is_said or features.get("ARF", True)):
        why_off = f"{env.ENABLE_TFT}={text}"
    elif not most:
        why_off = settings.of("max_replacements").shown
    return ReplaceSpec(
        not why_off, f"replacing is off ({why_off})" if why_off else "", most, period_s
    )
