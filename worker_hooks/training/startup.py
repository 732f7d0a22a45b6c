"""What a training's callbacks want of whoever guards it, and the first talk with that one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.callbacks.protocol import breakpoints_of, places_of
from worker_hooks.contract.env import ENABLE_TFT, RankEnv, tft_features
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.guard.guard import Guard, StateSource
from worker_hooks.recovery import agent_lost, resume

log = logging.getLogger("msrun")


class StartupOptions(NamedTuple):
    """Paths are absolute; empty: there is none."""

    ckpt_save_path: str = ""
    exit_file: str = ""  # JSON in which a graceful exit can be asked for
    exit_signals: tuple[int, ...] = ()  # to this process, that ask for one
    places: tuple[str, ...] = ()  # where periodic checkpoints are saved
    breakpoints: str = ""  # the prefix of an exception's, in the first of these places

    @staticmethod
    def of(
        callbacks: Iterable[Any], ckpt_save_path: str | os.PathLike[str] | None, drill: str
    ) -> StartupOptions:
        """Those of the callbacks; a folder that the script names itself comes before theirs.

        Raises:
            ValueError: the drill is unreadable.
        """

        def first(name: str, given: Any = None) -> str:
            offered = (given, *(getattr(callback, name, None) for callback in callbacks))
            path = next(filter(None, offered), None)
            return "" if path is None else os.path.abspath(path)

        signals = {getattr(callback, "exit_signal", None) for callback in callbacks} - {None}
        places = places_of(callbacks)
        found = StartupOptions(
            first("ckpt_save_path", ckpt_save_path),
            first("exit_file"),
            tuple(each for each in signals if each is not None),
            tuple(places),
            breakpoints_of(callbacks, next(iter(places), "")),
        )
        plan = DrillPlan.decode(drill)
        if plan is not None and plan.ckpt:  # the user's own folder is none of a drill's business
            found = found._replace(ckpt_save_path=plan.ckpt, places=(), breakpoints="")
        return found

    def guard(self, told: RankEnv, source: StateSource, at_dump: Callable[[], None]) -> Guard:
        """A guard that knows them; nobody is greeted yet."""
        return Guard(
            told,
            source,
            self.ckpt_save_path,
            at_dump,
            agent_lost.save_without_agent,
            exit_file=self.exit_file,
            exit_signals=self.exit_signals,
            checkpoints=next(iter(self.places), ""),
            breakpoints=self.breakpoints,
        )

    def greet(self, guard: Guard, *, wants_resume: bool) -> Path | None:
        """Let the guard greet the agent, if there is one; the checkpoint to go on from.

        Raises:
            SystemExit: the agent refuses, exit code 2.
            ValueError: another state of this process is guarded, or a switch is unreadable.
        """
        is_wanted = is_tft_enabled(os.environ)
        welcome = guard.greet(wants_resume=wants_resume) if is_wanted else None
        if guard.told.rank == 0:
            self._say(guard, is_guarded=welcome is not None, is_wanted=is_wanted)
        if welcome is None and wants_resume:
            return resume.find(self.ckpt_save_path, *self.places)
        return Path(welcome.resume) if welcome is not None and welcome.resume else None

    def _say(self, guard: Guard, *, is_guarded: bool, is_wanted: bool) -> None:
        """Say once a run what nobody will save."""
        if not is_wanted:
            log.warning("TrainState: nothing guards this run: %s says so", ENABLE_TFT)
        elif not is_guarded and not guard.told.hooks:
            log.warning(
                "TrainState: nothing guards this run; under msrun a dead rank loses nothing"
            )
        elif not is_guarded:
            log.warning("TrainState: nothing guards this state: its rank has another one")
        elif not self.ckpt_save_path:
            log.warning("TrainState: no ckpt_save_path: what is saved goes to the run's log folder")


def is_tft_enabled(environ: Mapping[str, str]) -> bool:
    """Whether state is to be saved: unless ``MS_ENABLE_TFT`` says ``{TTP:0}``.

    Unset means yes, as a script with a ``TrainState`` has asked for it. ``MINDIO_FOR_MINDSPORE``
    may be set and says nothing here.

    Raises:
        ValueError: the variable is written in another way.
    """
    text = environ.get(ENABLE_TFT, "")
    try:
        return tft_features(text).get("TTP", True)
    except ValueError as error:
        raise ValueError(f"{ENABLE_TFT}={text} {error}") from None
