"""Hugging Face's Accelerate: the loop is the script's, the count of its micro-batches is not.

state = protect(accelerator, model=net, optimizer=opt, scheduler=sched, ckpt_save_path="...")
def train(state):
model, optimizer, loader = accelerator.prepare(net, opt, loader)
for epoch in state.epochs(5):
for batch in state.batches(loader):
with accelerator.accumulate(model):
...
run(train, state)
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, __version__
from accelerate.utils import DistributedType

from worker_hooks.adapters.tested_versions import check_version
from worker_hooks.training.train_state import TrainState

PLAIN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def protect(accelerator: Accelerator, **objects: Any) -> TrainState:
    """A ``TrainState`` for a script that trains with this accelerator.

    Args:
        accelerator: the one that prepares the model; its count of micro-batches is saved, and its
            gradient scaler, if it has one.
        objects: as ``TrainState`` takes them; models and optimizers that are not prepared yet.

    Raises:
        ImportError: this version of accelerate was not tested.
        TypeError: this is no accelerator, or as ``TrainState`` raises it.
        ValueError: it trains in a way that cannot be protected, or as ``TrainState`` raises it.
    """
    check_version("accelerate", __version__)
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"protect() takes your Accelerator, not {type(accelerator).__name__}")
    if why := why_not(accelerator):
        raise ValueError(f"msrun cannot protect this training: {why}")
    progress = AccelerateProgress(accelerator)
    callbacks = (*objects.pop("callbacks", ()), progress)
    if accelerator.scaler is not None:
        objects.setdefault("scaler", accelerator.scaler)
    return TrainState(**objects, callbacks=callbacks, accelerator=progress)


def why_not(accelerator: Accelerator) -> str:
    """Why training with this accelerator cannot be protected; empty: it can."""
    kind = accelerator.distributed_type
    if kind not in PLAIN:
        return f"accelerate's {kind.value} is not supported, DDP is"
    if (parallelism := accelerator.parallelism_config) is not None:
        return f"{type(parallelism).__name__} is not supported, DDP is"
    if accelerator.dataloader_config.use_stateful_dataloader:
        return "use_stateful_dataloader is not supported: leave it out, as msrun saves the place"
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return (
            "automatic_checkpoint_naming refuses a folder that is there already, and a step that "
            "is repeated saves again: give save_state() a folder's name"
        )
    return ""


class AccelerateProgress:
    """What an accelerator counts, as a registered object; lets go of what it has prepared."""

    def __init__(self, accelerator: Accelerator) -> None:
        """``accelerator``: of the script."""
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Micro-batches of the step under way."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self._accelerator.step = state["step"]

    def rejoined(self, _: TrainState) -> None:
        """The training function is entered again: what it prepared belongs to the old group."""
        step = self._accelerator.step
        self._accelerator.free_memory()
        self._accelerator.step = step
