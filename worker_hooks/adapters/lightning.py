"""Lightning's Trainer: ``Trainer(..., callbacks=[Protect()])``, and ``trainer.fit(...)`` as before.

The survivors of a death save the step, and all ranks are restarted from it. The commit is made as
a batch is over, in front of the validation that may follow, which belongs to the next step: it is
done again where training continues.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.adapters.tested_versions import check_version
from worker_hooks.callbacks.graceful_exit import GracefulExit
from worker_hooks.training.train_state import TrainState

log = logging.getLogger("msrun")

FOLDER = "msrun_checkpoints"
STRATEGIES = (DDPStrategy, SingleDeviceStrategy)
AVERAGING = {"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"}
RESTARTED = "trains in Lightning's loop, which cannot be entered twice"
CHECKPOINT = "fit(ckpt_path=...) is not supported, as msrun resumes by itself"
METRICS = (
    "%s is logged in training as a metric object: after a restart amid an epoch it lacks the steps "
    "before; log its value instead"
)
_LOGGED = (  # what self.log() was given, by its names
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "metric_attribute"),
)


class Protect(Callback):
    """Protects one call of ``fit``; the last of the callbacks but for checkpoints."""

    def __init__(self, ckpt_save_path: str | os.PathLike[str] | None = None) -> None:
        """Take the folder for dumps; default: one in ``default_root_dir``.

        Raises:
            ImportError: this version of lightning was not tested.
        """
        check_version("lightning", lightning.__version__)
        self._folder = ckpt_save_path
        self._fit: FitProtection | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be protected.

        Raises:
            ValueError: this cannot be, for the reason in its text.
        """
        if stage == "fit" and (why := why_not(trainer, pl_module)):
            raise ValueError(f"msrun cannot protect this training: {why}")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizers and schedulers are there, and no batch is loaded yet.

        Raises:
            ValueError: there was another ``fit``, or this one has loaded a checkpoint.
        """
        if trainer.ckpt_path is not None:  # known only now
            raise ValueError(f"msrun cannot protect this training: {CHECKPOINT}")
        if self._fit is not None:
            raise ValueError("msrun protects one call of fit() in a script")
        folder = self._folder or os.path.join(trainer.default_root_dir, FOLDER)
        self._fit = FitProtection(trainer, pl_module, folder)

    def on_train_start(self, *_: Any) -> None:
        """Epochs that are over are not trained again."""
        self._protection.begin()

    def on_before_backward(self, *_: Any) -> None:
        """Before a peer can have this rank's gradients, what it has logged is known."""
        self._protection.note_results(is_commit=False)

    def on_train_epoch_end(self, *_: Any) -> None:
        """No more batches are asked for."""
        self._protection.end_epoch()

    def on_train_end(self, *_: Any) -> None:
        """Training is over."""
        self._protection.state.finish()

    def on_exception(self, _: Any, __: Any, exception: BaseException) -> None:
        """Hold the state where it is: the trainer would take it from its device."""
        if self._fit is not None and isinstance(exception, Exception):
            self._fit.state.hold(exception)

    @property
    def _protection(self) -> FitProtection:
        assert self._fit is not None
        return self._fit


def why_not(trainer: Any, module: Any) -> str:
    """Why fitting with this trainer cannot be protected; empty: it can."""
    strategy = trainer.strategy
    if type(strategy) not in STRATEGIES:
        return f"{type(strategy).__name__} is not supported, DDPStrategy is"
    if type(strategy.launcher).__name__ == "_MultiProcessingLauncher":
        return "ddp_spawn and ddp_fork are not supported, ddp is"
    if trainer.reload_dataloaders_every_n_epochs:
        return "reload_dataloaders_every_n_epochs is not supported"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "a training_step that takes a dataloader_iter is not supported"
    if not module.automatic_optimization:
        return "automatic_optimization=False is not supported"
    for each in trainer.callbacks:
        if {base.__name__ for base in type(each).__mro__} & AVERAGING:
            return f"{type(each).__name__} is not supported"
    return ""


class FitProgress:
    """How far a fit is, as a registered object; the same on all ranks."""

    def __init__(self, trainer: Any) -> None:
        """``trainer``: a ``Trainer``."""
        self._trainer = trainer
        self.saved: dict[str, Any] = {}  # of the commit at which training continues
        self.batch = 0  # batches of the epoch, at the newest commit

    def state_dict(self) -> dict[str, Any]:
        """What the loops and the callbacks count."""
        trainer = self._trainer
        loop = trainer.fit_loop.state_dict()
        for part in ("", "epoch_loop.", "epoch_loop.val_loop."):
            loop.pop(f"{part}state_dict.combined_loader", None)
        return {
            "loop": json.dumps(loop),
            "should_stop": trainer.should_stop,
            "batch": self.batch,
            "callbacks": {each.state_key: state for each, state in _states(trainer)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Training will continue here."""
        self.saved = dict(state)
        self.batch = state["batch"]


class FitProtection:
    """Feeds a trainer's loop, and knows where in it training continues."""

    def __init__(self, trainer: Any, module: Any, folder: str | os.PathLike[str]) -> None:
        """Register the state, and restore it if this run resumes.

        ``trainer``: a ``Trainer`` whose strategy is set up.
        """
        self._trainer, self._module = trainer, module
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = FitProgress(trainer)
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        self.state = TrainState(
            model=module,
            optimizer=list(trainer.optimizers),
            scheduler=schedulers or None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            fit=self._progress,
            ckpt_save_path=folder,
            callbacks=[_Armed(self)],
        )
        self.state.exclude_replacement(RESTARTED)
        self.state.ignore("_trainer")  # a module's: of what is in there this saves what counts
        self._epochs: Iterator[int] = self.state.epochs(sys.maxsize)
        self._loader: Any = None
        self._batches: Any = None
        self._keys: tuple[Any, ...] = ()  # of what is logged
        self._described = "[]"  # that as text
        self._noted: tuple[str, torch.Tensor] | None = None
        self._said: set[str] = set()
        self._process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = self._feed
        self._end_batch = self._epoch_loop.on_advance_end
        self._epoch_loop.on_advance_end = self._commit

    # --- the data ---------------------------------------------------------------------------------

    def _feed(self, dataloader: Any) -> Any:
        """In the strategy's place: the training's loader becomes one that continues."""
        dataloader = self._process(dataloader)
        if not self._trainer.training:
            return dataloader
        if self._loader is not None:
            raise ValueError("msrun cannot protect this training: it has several loaders")
        if sized_len(dataloader) is None:
            raise ValueError("msrun cannot protect this training: its loader has no length")
        self._loader = dataloader
        return _FedLoader(dataloader, self)

    def batches(self) -> Iterator[Any]:
        """The batches of the next epoch that are still to be trained."""
        next(self._epochs)
        self._batches = self.state.batches(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except (StopIteration, _EpochOverError):
                return
            yield batch

    def end_epoch(self) -> None:
        """The trainer knows how many batches there are, and does not ask for the end."""
        batches, self._batches = self._batches, None
        if batches is None:
            return
        limit = self._trainer.num_training_batches
        if self.state.batch < limit or limit != len(self._loader):
            batches.close()  # it was left, or is limited
            return
        for _ in batches:
            raise RuntimeError("the loader has more batches than its length says")

    # --- where training continues -----------------------------------------------------------------

    def begin(self) -> None:
        """The loop begins: let it do so in the epoch that continues."""
        saved = self._progress.saved
        if not saved:
            return
        loop, counted = self._trainer.fit_loop, json.loads(saved["loop"])
        done = counted["epoch_progress"]["current"]["processed"]
        for each in (loop.epoch_progress.total, loop.epoch_progress.current):
            each.ready = each.started = each.processed = each.completed = done
        # whether training is over is asked before the last validation is done again
        progress = self._epoch_loop.automatic_optimization.optim_progress
        steps = counted["epoch_loop.automatic_optimization.optim_progress"]
        if self._epoch_loop.max_steps in {-1, None} or (
            steps["optimizer"]["step"]["total"]["completed"] < self._epoch_loop.max_steps
        ):
            progress.load_state_dict(steps)

    def catch_up(self) -> None:
        """All is as of the commit now: set the loop to it, and do what follows that batch.

        Raises:
            _EpochOverError: no batch of this epoch is left.
        """
        saved, self._progress.saved = self._progress.saved, {}
        if not saved:
            return
        trainer, epoch_loop = self._trainer, self._epoch_loop
        epoch_loop.load_state_dict(json.loads(saved["loop"]), "epoch_loop.")
        epoch_loop.restarting = False  # everything is as if it had never been left
        for loop in (epoch_loop, epoch_loop.val_loop):
            loop.on_iteration_done()
        trainer.should_stop = saved["should_stop"]
        for each in trainer.callbacks:
            if each.state_key in saved["callbacks"]:
                each.load_state_dict(saved["callbacks"][each.state_key])
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
        fetcher.fetched = epoch_loop.batch_progress.current.ready
        self._restore_results()
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            # as behind a training's forward: the next one, of a validation, sends buffers around
            trainer.strategy.model.require_forward_param_sync = True
        # its log may have died before it was written; a line that was is written once more
        trainer._logger_connector.update_train_step_metrics()  # noqa: SLF001
        self._end_batch(fetcher)
        if epoch_loop.done:
            raise _EpochOverError

    def _commit(self, data_fetcher: Any) -> None:
        """In place of the epoch loop's own end of a batch.

        Raises:
            GracefulExit: the job exits on request.
        """
        self.note_results(is_commit=True)
        self._progress.batch = self.state.batch
        if self.state.should_exit:
            raise GracefulExit
        self._end_batch(data_fetcher)

    # --- what is logged ---------------------------------------------------------------------------

    def note_results(self, *, is_commit: bool) -> None:
        """Keep the sums of what the script logs in this epoch, which are each rank's own.

        ``is_commit``: the batch is over: what was logged behind backward is not known yet.
        """
        results = self._epoch_loop._results  # noqa: SLF001
        present = [each for each in results.values() if not each.has_reset]
        self._say_metrics(each for each in present if not each.is_tensor)
        sums = [each for each in present if each.is_tensor]
        keys = tuple((id(each), each.value.dtype) for each in sums)
        if keys != self._keys:
            self._keys = keys
            self._described = json.dumps([_described(each) for each in sums])
        values: list[Any] = []
        for each in sums:
            newest = each._forward_cache if each.meta.on_step else 0  # noqa: SLF001
            values += [each.value, getattr(each, "cumulated_batch_size", 0), newest]
        noted = self._described, _as_one(values)
        before, self._noted = self._noted, noted
        is_same = before is not None and before[0] == noted[0] and torch.equal(before[1], noted[1])
        if is_commit and is_same:
            return
        self.state.own.logged = list(noted)
        if not is_commit:
            connector = self._trainer._logger_connector  # noqa: SLF001
            kept = connector._callback_metrics | connector._logged_metrics  # noqa: SLF001
            named = {name: _dtype(each) for name, each in kept.items()}
            self.state.own.metrics = [json.dumps(named), _as_one([*kept.values()])]

    def _say_metrics(self, objects: Iterator[Any]) -> None:
        for each in objects:
            if each.meta.name not in self._said and self.state.rank == 0:
                log.warning(METRICS, each.meta.name)
            self._said.add(each.meta.name)

    def _restore_results(self) -> None:
        results = self._epoch_loop._results  # noqa: SLF001
        device, own = self._module.device, self.state.own
        own.setdefault(logged=["[]", torch.zeros(0)], metrics=["{}", torch.zeros(0)])
        described, values = own.logged
        for number, (logged, how) in enumerate(json.loads(described)):
            dtype = getattr(torch, how.pop("dtype"))
            results.log(
                **logged,
                **how,
                value=torch.zeros((), device=device),
                batch_size=1,
                sync_dist_fn=self._trainer.strategy.reduce,
            )
            metric = results[f"{logged['fx']}.{logged['name']}"]
            value, count, newest = values[3 * number : 3 * number + 3].to(device)
            metric.value, metric._computed = value.to(dtype), None  # noqa: SLF001
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = count.to(torch.int64)
            if metric.meta.on_step:
                metric._forward_cache = newest.to(dtype)  # noqa: SLF001
        connector = self._trainer._logger_connector  # noqa: SLF001
        named, kept = own.metrics
        for (name, dtype), value in zip(json.loads(named).items(), kept, strict=True):
            connector._callback_metrics[name] = value.to(device, getattr(torch, dtype))  # noqa: SLF001
        connector._first_loop_iter = False  # noqa: SLF001


class _EpochOverError(Exception):
    """The epoch has no batch left."""


class _Armed:
    """Tells that the state is restored, in front of the first batch."""

    def __init__(self, protection: FitProtection) -> None:
        self._protection = protection

    def armed(self, _: TrainState) -> None:
        self._protection.catch_up()


class _FedLoader:
    """The training's loader, which hands out the batches that are still to be trained."""

    def __init__(self, loader: Any, protection: FitProtection) -> None:
        self._loader, self._protection = loader, protection

    def __iter__(self) -> Iterator[Any]:
        return self._protection.batches()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in {"state_dict", "load_state_dict"}:
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function


def _states(trainer: Any) -> list[tuple[Any, Any]]:
    """The callbacks that have a state, and it; but for times, which are each rank's own."""
    found = [(each, each.state_dict()) for each in trainer.callbacks if not isinstance(each, Timer)]
    return [(each, state) for each, state in found if state]


def _described(metric: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the script logs a value, as JSON can hold it."""
    meta = metric.meta
    how = {
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "dtype": _dtype(metric.value),
    }
    return {name: getattr(meta, name) for name in _LOGGED}, how


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_one(values: list[Any]) -> torch.Tensor:
    """Numbers in one tensor: exact, and a device is waited for once."""
    numbers = [torch.as_tensor(each, dtype=torch.float64).reshape(()) for each in values]
    return torch.stack(numbers).cpu() if numbers else torch.zeros(0, dtype=torch.float64)
