"""Hugging Face's Trainer: ``trainer = protect(Trainer(...))``, and ``trainer.train()`` as before.

The trainer's own loop runs inside ``run(train, state)``, and is entered again after a replacement
or restart at the step that follows the newest commit. The commit is made as the step ends, in front
of what the trainer does then: it logs, evaluates and saves. That belongs to the step that follows,
and is done again where training continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import operator
import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, __version__
from transformers import trainer as trainer_module
from transformers.trainer_callback import ExportableState

from worker_hooks.adapters.accelerate import why_not as why_not_accelerate
from worker_hooks.adapters.tested_versions import check_version
from worker_hooks.callbacks.graceful_exit import GracefulExit
from worker_hooks.training.run import run
from worker_hooks.training.train_state import TrainState

log = logging.getLogger("msrun")

FOLDER = "msrun_checkpoints"
HERE = "msrun"  # in place of a checkpoint of the trainer's own: what it holds is restored already
LAYERWISE = ("lomo", "adalomo", "layerwise")
KEEPS_NOTHING = (
    "callback %s has values that begin anew after a replacement or resume: make it an "
    "ExportableState, too, as EarlyStoppingCallback is"
)
_TIMES = ("_runtime", "_per_second", "_time")
"""The ends of names in the log whose values are each rank's own; a new rank lacks them."""

_NOT_PROGRESS = {  # of the trainer's state: what the process is, and settings
    *("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"),
    *("trial_name", "trial_params", "stateful_callbacks", "log_history", "train_batch_size"),
    *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"),
}


def protect(trainer: Trainer, ckpt_save_path: str | os.PathLike[str] | None = None) -> Trainer:
    """The same trainer, whose ``train()`` loses no step when a rank dies.

    Args:
        trainer: has not trained yet.
        ckpt_save_path: the folder dumps are written to; default: one in its ``output_dir``.

    Raises:
        ImportError: this version of transformers or accelerate was not tested.
        TypeError: this is no Trainer.
        ValueError: it trains in a way that cannot be protected.
    """
    check_version("transformers", __version__)
    if not isinstance(trainer, Trainer):
        raise TypeError(f"protect() takes your Trainer, not {type(trainer).__name__}")
    if why := why_not(trainer):
        raise ValueError(f"msrun cannot protect this training: {why}")
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_ProtectedLoop, kind), {"__module__": kind.__module__})
    folder = ckpt_save_path or os.path.join(trainer.args.output_dir, FOLDER)
    vars(trainer)["protection"] = TrainerProtection(trainer, folder)
    return trainer


def why_not(trainer: Trainer) -> str:
    """Why training with this trainer cannot be protected; empty: it can."""
    args = trainer.args
    if isinstance(trainer, _ProtectedLoop):
        return "protect() was called before"
    if why := why_not_accelerate(trainer.accelerator):
        return why
    if args.n_gpu > 1:
        return "DataParallel is not supported: start one rank for each GPU"
    if any(each in str(args.optim) for each in LAYERWISE):
        return f"{args.optim} updates within backward"
    for name in ("auto_find_batch_size", "torch_compile"):
        if getattr(args, name):
            return f"{name} is not supported"
    return ""


class TrainerProgress:
    """How far a trainer is, as a registered object; the same on all ranks."""

    def __init__(self, trainer: Any) -> None:
        """``trainer``: a ``Trainer``."""
        self._trainer = trainer
        self.saved: dict[str, Any] = {}  # of the commit at which training continues
        self.epoch = self.batch = 0  # of the newest commit
        self.tail: dict[str, Any] = {}  # what the trainer logs of this step
        self._entries: list[Any] = []  # of the log, with this rank's times
        self._texts: list[str] = []  # the same without
        self._history = "[]"

    def state_dict(self) -> dict[str, Any]:
        """All that the trainer counts, and what its callbacks count."""
        trainer = self._trainer
        state = trainer.state
        fields = {each.name for each in dataclasses.fields(state)} - _NOT_PROGRESS
        self._read(state.log_history)
        return {
            "state": {name: getattr(state, name) for name in sorted(fields)},
            "log_history": self._history,
            "logged": getattr(trainer, "_globalstep_last_logged", 0),
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "first": getattr(trainer, "_initial_global_step", 0),
            "first_tokens": getattr(trainer, "_initial_num_input_tokens_seen", 0),
            "callbacks": [
                json.dumps(each.state(), default=_plain) for each in _exportable(trainer)
            ],
            "epoch": self.epoch,
            "batch": self.batch,
            "tail": self.tail,
        }

    def _read(self, history: list[dict[str, Any]]) -> None:
        """Only what is new is read, as this is done in each step."""
        count = len(history)
        if count == len(self._entries) and all(map(operator.is_, history[-1:], self._entries[-1:])):
            return
        if history[: len(self._entries)] != self._entries:
            self._texts = []
        self._texts += [
            json.dumps(_timeless(each), default=_plain) for each in history[len(self._texts) :]
        ]
        self._entries, self._history = history[:], f"[{','.join(self._texts)}]"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Training will continue here."""
        self.saved = dict(state)
        self.epoch, self.batch, self.tail = state["epoch"], state["batch"], state["tail"]

    def apply(self) -> None:
        """Set the trainer to it."""
        trainer, saved = self._trainer, self.saved
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        history = json.loads(saved["log_history"])
        mine = self._entries[: len(history)]  # of a rank that lives on
        trainer.state.log_history = mine if [*map(_timeless, mine)] == history else history
        trainer._globalstep_last_logged = saved["logged"]  # noqa: SLF001
        trainer._total_loss_scalar = saved["total_loss"]  # noqa: SLF001
        trainer._initial_global_step = saved["first"]  # noqa: SLF001
        trainer._initial_num_input_tokens_seen = saved["first_tokens"]  # noqa: SLF001
        for each, text in zip(_exportable(trainer), saved["callbacks"], strict=True):
            of_callback = json.loads(text)
            values = of_callback["args"] if each is trainer.control else of_callback["attributes"]
            for name, value in values.items():
                setattr(each, name, value)


class TrainerProtection:
    """Runs a trainer's loop, and knows where in it training continues."""

    def __init__(self, trainer: Any, folder: str | os.PathLike[str]) -> None:
        """Nothing is protected before the trainer trains. ``trainer``: a ``Trainer``."""
        self._trainer, self._folder = trainer, folder
        self._progress = TrainerProgress(trainer)
        self._state: TrainState | None = None
        self._loader: Any = None
        self._epochs: Iterator[int] = iter(())
        self._batches: Any = iter(())
        self._has_none_left = False  # the trainer's loop over this epoch has no step to make
        self._of_epoch: dict[str, Any] = {}  # what the trainer's loop over batches was given
        self._flops = 0.0  # of the present micro-batch
        self._noted: torch.Tensor | None = None  # its loss
        trainer.add_callback(_EpochEnd(self))

    @property
    def state(self) -> TrainState:
        """The state that is protected; there is one as soon as the trainer trains."""
        assert self._state is not None
        return self._state

    def train(self, loop: Any, kwargs: dict[str, Any]) -> Any:
        """Run the trainer's loop so that it can be entered again.

        Raises:
            ValueError: it cannot be.
        """
        trainer = self._trainer
        if self._state is not None:
            raise ValueError("msrun protects one call of train() in a script")
        if kwargs.get("trial") is not None:
            raise ValueError("msrun cannot protect a hyperparameter search")
        self._state = self._make_state()
        if kwargs.get("resume_from_checkpoint") and not self.state.step:
            raise ValueError(
                "msrun resumes by itself: call train() without resume_from_checkpoint; to begin "
                "with the weights of a checkpoint, load the model from it"
            )
        kwargs["resume_from_checkpoint"] = None
        backward = trainer.accelerator.backward

        def noted_backward(loss: torch.Tensor, **options: Any) -> None:
            self._note(loss)
            backward(loss, **options)

        trainer.accelerator.backward = noted_backward  # the loss in front of it

        def train(_: TrainState) -> Any:
            trainer.model_wrapped = trainer.model  # not the DDP of the group that is left
            self._epochs, self._has_none_left = iter(()), False
            return loop(**kwargs)

        try:
            return run(train, self.state)
        finally:
            del trainer.accelerator.backward

    def _make_state(self) -> TrainState:
        trainer = self._trainer
        *_, max_steps = trainer.set_initial_training_values(trainer.args, self.loader())
        optimizer = trainer.create_optimizer()
        optimizer = trainer.optimizer if optimizer is None else optimizer
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        trainer._created_lr_scheduler = False  # noqa: SLF001  else the loop makes another one
        trainer.state.max_steps = max_steps
        self._say_unsaved()
        return TrainState(
            model=trainer.model,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            trainer=self._progress,
            ckpt_save_path=self._folder,
            callbacks=[_Armed(self)],
        )

    def _say_unsaved(self) -> None:
        for each in self._trainer.callback_handler.callbacks:
            is_theirs = type(each).__module__.startswith("transformers.")
            if not is_theirs and not isinstance(each, ExportableState | _EpochEnd) and vars(each):
                log.warning(KEEPS_NOTHING, type(each).__name__)

    # --- what the loop asks -----------------------------------------------------------------------

    def loader(self) -> Any:
        """The one loader of the training; it and its workers outlive a replacement."""
        if self._loader is None:
            self._loader = self._trainer.make_train_dataloader()
        return self._loader

    def batches(self) -> Iterator[Any]:
        """The batches of this epoch that are still to be trained."""
        if self._has_none_left:
            self._has_none_left = False
            return iter(())
        batches = self.state.batches(self.loader())
        self._batches = batches
        return batches

    def place(self) -> int:
        """The trainer has made its own state: set it; return the epoch in which it continues."""
        if self._progress.saved:
            self._progress.apply()
        return self._progress.epoch

    def epoch(self, run_epoch: Any, given: dict[str, Any]) -> None:
        """Run an epoch, or the rest of it."""
        if given["epoch"] == given["epochs_trained"]:
            self._epochs = self.state.epochs(self._trainer.state.num_train_epochs)
        assert next(self._epochs) == given["epoch"]
        self._of_epoch = given
        trainer = self._trainer
        saved: dict[str, Any] = self._progress.saved
        if not saved or given["epoch"] != saved["epoch"]:
            run_epoch(**given)
            return
        control = trainer.control
        self._progress.apply()
        trained = saved["batch"]
        is_over = control.should_training_stop or control.should_epoch_stop
        if is_over:  # the loop is not to make another step
            steps, each = given["num_update_steps_per_epoch"], trainer.args
            trained = steps * each.gradient_accumulation_steps
        if is_over or trained >= given["steps_in_epoch"]:
            next(self.batches(), None)  # restores the state, and does what follows the step
            self._has_none_left = True
        given |= {"resume_from_checkpoint": HERE, "steps_trained_in_current_epoch": trained}
        with _no_skipping():
            run_epoch(**given)

    def catch_up(self) -> None:
        """Where training continues everything is as of the commit: do what follows that step."""
        if not self._progress.saved:
            return
        self._progress.apply()
        trainer, given = self._trainer, self._of_epoch
        loss, trainer.current_flos = self.state.own.trainer
        trainer._tr_loss.fill_(loss)  # noqa: SLF001
        self._progress.saved = {}
        names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
        trainer.end_step(
            tr_loss=trainer._tr_loss,  # noqa: SLF001
            **{name: given[name] for name in names},
            **self._progress.tail,
        )

    def micro_batch(self, train_step: Any, args: tuple[Any, ...], flops: float) -> Any:
        """Forward and backward; before a peer can have its gradients, this rank's sums are known.

        The trainer adds to them only behind backward, where they would be lost with the rank.
        """
        self._flops, self._noted = flops, None
        loss = train_step(*args)
        noted: Any = self._noted
        if noted is None or not torch.equal(noted, loss):
            self._note(loss)  # a training step of the script's own
        return loss

    def _note(self, loss: torch.Tensor) -> None:
        trainer = self._trainer
        self._noted = loss = loss.detach()
        total = trainer._tr_loss.clone()  # noqa: SLF001
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            since = trainer.state.global_step - trainer._globalstep_last_logged  # noqa: SLF001
            total += total / (1 + since)
        else:
            total += loss
        self.state.own.trainer = [total.item(), trainer.current_flos + self._flops]

    def commit(self, tail: dict[str, Any]) -> dict[str, Any]:
        """The step is over, and what follows it begins: commit, unless this was done.

        Returns:
            What the trainer logs of the step, which its loop does not know where it continues.

        Raises:
            GracefulExit: the job exits on request.
        """
        progress = self._progress
        if all(value is None for value in tail.values()):
            tail = progress.tail
        progress.tail, progress.epoch, progress.batch = tail, self.state.epoch, self.state.batch
        if self.state.should_exit:
            raise GracefulExit
        return tail

    def end_epoch(self, *, is_over: bool) -> None:
        """The trainer knows how many batches there are, and does not ask for more."""
        if not is_over:
            self._batches.close()
            return
        for _ in self._batches:
            raise RuntimeError("the loader has more batches than its length says")

    def finish(self) -> None:
        """Training is over."""
        self.state.finish()


class _Armed:
    """Tells that the state is restored, in front of the first batch."""

    def __init__(self, protection: TrainerProtection) -> None:
        self._protection = protection

    def armed(self, _: TrainState) -> None:
        self._protection.catch_up()


class _ProtectedBatches:
    """The trainer's loader, of which it gets the batches that are still to be trained."""

    def __init__(self, protection: TrainerProtection) -> None:
        self._protection = protection

    def __iter__(self) -> Iterator[Any]:
        return self._protection.batches()

    def __len__(self) -> int:
        return len(self._protection.loader())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protection.loader(), name)


class _EpochEnd(TrainerCallback):
    """Tells that no more batches are asked for."""

    def __init__(self, protection: TrainerProtection) -> None:
        self._protection = protection

    def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        is_stopping = control.should_training_stop or control.should_epoch_stop
        self._protection.end_epoch(is_over=not is_stopping)


class _ProtectedLoop(Trainer):
    """A trainer's loop with the places in it that the protection needs."""

    protection: TrainerProtection

    def make_train_dataloader(self) -> Any:
        return super().get_train_dataloader()

    def get_train_dataloader(self) -> Any:
        return self.protection.loader()

    def _inner_training_loop(self, batch_size: Any = None, **kwargs: Any) -> Any:
        kwargs["batch_size"] = batch_size
        return self.protection.train(super()._inner_training_loop, kwargs)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        super()._init_training_state(*args)
        return self.protection.place(), 0

    def _prepare_for_training(self, *args: Any) -> tuple[Any, Any]:
        model, _ = super()._prepare_for_training(*args)
        return model, _ProtectedBatches(self.protection)

    def _run_epoch(self, **given: Any) -> None:
        self.protection.epoch(super()._run_epoch, given)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        flops = float(self.floating_point_ops(inputs))
        given = (model, inputs, *args)
        return self.protection.micro_batch(super().training_step, given, flops)

    def end_step(self, **given: Any) -> None:
        super()._maybe_log_save_evaluate(**given)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        *args: Any,
        learning_rate: Any = None,
    ) -> None:
        tail = {"grad_norm": grad_norm, "learning_rate": learning_rate}
        tail = self.protection.commit(tail)
        rate = tail["learning_rate"]
        super()._maybe_log_save_evaluate(tr_loss, tail["grad_norm"], *args, learning_rate=rate)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != HERE:
            super()._load_rng_state(checkpoint)

    def _finalize_training(self, *args: Any) -> Any:
        self.protection.finish()
        return super()._finalize_training(*args)


@contextlib.contextmanager
def _no_skipping() -> Iterator[None]:
    """Where the trainer would skip what was trained, the batches begin behind it already."""
    names = vars(trainer_module)
    skip, names["skip_first_batches"] = names["skip_first_batches"], lambda loader, _: loader
    try:
        yield
    finally:
        names["skip_first_batches"] = skip


def _timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_TIMES)}


def _plain(value: Any) -> float | str:
    """A number of numpy's or torch's, or anything else that is logged, as JSON can hold it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _exportable(trainer: Any) -> list[Any]:
    found = [*trainer.callback_handler.callbacks, trainer.control]
    return [each for each in found if isinstance(each, ExportableState)]
