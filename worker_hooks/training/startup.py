"""The start of a training: what its callbacks want, and the first exchange with the agent."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from worker_hooks.callbacks.protocol import CallbackList
from worker_hooks.contract.env import ENABLE_TFT, RankEnv, tft_features
from worker_hooks.distributed import communicators
from worker_hooks.drill.observer import StepObserver
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.guard.guard import Guard, StartupOptions
from worker_hooks.recovery import agent_lost, resume
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.training import torch_names

log = logging.getLogger("msrun")

ENDED_BY_TORCH = (
    "when a rank dies, torch's NCCL watchdog may end the others before their state is saved: {}"
)

UNREAD = "what ranks leave in their memory when they are killed cannot be read: {}"
ON_DEVICE = "the script uses an accelerator"
AMID_UPDATE = (
    "if all ranks that hold a part of the state are killed amid an update, training goes on from "
    "an older copy: %s"
)


def read_env(environ: Mapping[str, str]) -> tuple[RankEnv, tuple[StepObserver, ...]]:
    """Who this process is, and what observes its steps: nothing, unless this is a drill.

    Raises:
        ValueError: the drill's plan is unreadable.
        OSError: the drill's folder cannot be written.
    """
    env = RankEnv.read(environ)
    plan = DrillPlan.decode(env.drill)
    if plan is None:
        return env, ()
    from worker_hooks.drill.inject import FaultInjector
    from worker_hooks.drill.trace import TrainingTrace

    injector, trace = FaultInjector.of(plan, env), TrainingTrace(plan, env)
    observers = (trace,) if injector is None else (injector, trace)
    return env._replace(save_to=plan.ckpt), observers


def options_of(
    callbacks: CallbackList, ckpt_save_path: str | os.PathLike[str] | None, env: RankEnv
) -> StartupOptions:
    """What the callbacks want; a folder that the script itself gives precedes theirs."""
    own = os.path.abspath(ckpt_save_path) if ckpt_save_path else ""
    options = StartupOptions(
        ckpt_save_path=env.redirected(own or callbacks.ckpt_save_path),
        exit_file=callbacks.exit_file,
        exit_signals=callbacks.exit_signals,
        checkpoints=callbacks.checkpoints,
        breakpoints=callbacks.breakpoints,
    )
    # a drill must not resume from the user's own checkpoints
    return options._replace(checkpoints=(), breakpoints="") if env.save_to else options


def connect(
    options: StartupOptions,
    env: RankEnv,
    source: CommittedState,
    observers: Sequence[StepObserver],
    *,
    wants_resume: bool,
) -> tuple[Guard, Path | None]:
    """Have the agent guard this state, if there is an agent; say once a run if nothing guards it.

    Returns:
        The guard, and the checkpoint to resume from.

    Raises:
        SystemExit: the agent refuses, exit code 2; or ``--strict`` does, because of torch.
        ValueError: another state of this process is guarded, or a switch is unreadable.
    """

    def before_dump() -> None:
        for observer in observers:
            observer.dump_begins()

    guard = Guard(
        env,
        source,
        options,
        before_dump=before_dump,
        when_agent_died=agent_lost.save_without_agent,
    )
    is_wanted = is_tft_enabled(os.environ)
    welcome = guard.greet(wants_resume=wants_resume) if is_wanted else None
    if guard.is_on:
        guard.promise_nothing(torch_names.why_nothing_is_promised())
        ends = communicators.why_peers_end_it(os.environ) if env.world_size > 1 else ""
        if ends and env.rank == 0:
            guard.say_unprotected(ENDED_BY_TORCH.format(ends), is_refused=env.is_strict)
    if env.rank == 0:
        _warn_unguarded(guard, is_wanted=is_wanted)
    places = list(filter(None, (options.ckpt_save_path, *options.checkpoints)))
    if welcome is not None:
        found, is_said = Path(welcome.resume) if welcome.resume else None, bool(places)
    else:
        found, is_said = resume.newest_checkpoint(*places) if wants_resume else None, False
    if wants_resume and found is None and not is_said and env.rank == 0:
        where = f"in {' and '.join(places)}" if places else "(no ckpt_save_path says where it is)"
        log.warning("there is nothing to resume %s: training begins anew", where)
    return guard, found


def keep_memory(committed: CommittedState, guard: Guard) -> None:
    """Have this process's memory outlive it, if that is wanted and possible."""
    if not (guard.env.keeps_memory and guard.is_on):
        return
    from worker_hooks.kept.by_default import COPY_SHARE, why_not_by_default

    is_asked = guard.env.keeps_memory != "auto"
    # a keeper would hold an accelerator's memory, too
    is_on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    guard.not_kept_why = ON_DEVICE if is_on_device else ""
    if not is_asked and not is_on_device:
        guard.not_kept_why = why_not_by_default(os.environ)
    if guard.not_kept_why:
        return
    from worker_hooks.kept.state_mapper import StateMapper
    from worker_hooks.kept.tensor_chain import UnknownTensorLayoutError

    def say(why: str) -> None:
        if not is_asked:
            guard.report_notes(0.0, 0.0, why[:500])
        elif guard.env.rank == 0:
            guard.say_unprotected(UNREAD.format(why), is_refused=False)

    tell_cost = None if is_asked else guard.report_notes
    told = guard.why_unsafe, say, (guard.agent_pid, guard.env.forkserver), tell_cost
    try:
        committed.kept = StateMapper(committed.pieces, *told)
    except (OSError, UnknownTensorLayoutError) as error:
        guard.not_kept_why = str(error)
    else:
        if is_asked:
            committed.changes.keep_all(AMID_UPDATE)
        else:
            committed.changes.keep_all("", COPY_SHARE)


def _warn_unguarded(guard: Guard, *, is_wanted: bool) -> None:
    if not is_wanted:
        log.warning("TrainState: this run is not protected: %s says so", ENABLE_TFT)
    elif guard.welcome is None and not guard.env.hooks:
        log.warning("TrainState: not running under msrun, so this run is not protected")
    elif guard.welcome is None:
        log.warning("TrainState: this state is not protected: its rank has another one")
    elif guard.is_on and not guard.env.audit:
        log.warning("TrainState: --audit=0: changes that torch does not count are not noticed")
    elif not guard.options.ckpt_save_path:
        log.warning("TrainState: no ckpt_save_path: what is saved goes to the run's log folder")


def is_tft_enabled(environ: Mapping[str, str]) -> bool:
    """Whether state is to be saved: unless ``MS_ENABLE_TFT`` says ``{TTP:0}``.

    An unset variable means yes, because a script with a ``TrainState`` has asked for it.
    ``MINDIO_FOR_MINDSPORE`` is not read.

    Raises:
        ValueError: the variable has another form.
    """
    text = environ.get(ENABLE_TFT, "")
    try:
        return tft_features(text).get("TTP", True)
    except ValueError as error:
        raise ValueError(f"{ENABLE_TFT}={text} {error}") from None
