"""What a training script imports, and the contract between it and the agent.

The script's names are ``TrainState``, ``run``, and MindSpore's names for callbacks. They are looked
up when they are used, because they import torch, and the agent, which imports the contract, must
not. The contract and the checkpoint format, :mod:`worker_hooks.contract` and
:mod:`worker_hooks.storage`, need only the standard library. This package imports nothing of
``agent`` or ``msrun``.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_hooks.adapters.mindspore import (
        ExitByRequest,
        OptTFTWrapper,
        TFTRegister,
        TrainFaultTolerance,
    )
    from worker_hooks.adapters.strategy_file import ParallelStrategy
    from worker_hooks.callbacks.graceful_exit import GracefulExit
    from worker_hooks.callbacks.monitors import LossMonitor, TimeMonitor
    from worker_hooks.callbacks.on_request_exit import OnRequestExit
    from worker_hooks.checkpoint.config import CheckpointConfig
    from worker_hooks.checkpoint.model_checkpoint import ModelCheckpoint
    from worker_hooks.checkpoint.save_plan import CheckpointError
    from worker_hooks.storage.group_info import restore_group_info_list
    from worker_hooks.training.run import run
    from worker_hooks.training.train_state import TrainState

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ExitByRequest",
    "GracefulExit",
    "LossMonitor",
    "ModelCheckpoint",
    "OnRequestExit",
    "OptTFTWrapper",
    "ParallelStrategy",
    "TFTRegister",
    "TimeMonitor",
    "TrainFaultTolerance",
    "TrainState",
    "restore_group_info_list",
    "run",
]

_HOMES = {
    "CheckpointConfig": "checkpoint.config",
    "CheckpointError": "checkpoint.save_plan",
    "ExitByRequest": "adapters.mindspore",
    "GracefulExit": "callbacks.graceful_exit",
    "LossMonitor": "callbacks.monitors",
    "ModelCheckpoint": "checkpoint.model_checkpoint",
    "OnRequestExit": "callbacks.on_request_exit",
    "OptTFTWrapper": "adapters.mindspore",
    "ParallelStrategy": "adapters.strategy_file",
    "TFTRegister": "adapters.mindspore",
    "TimeMonitor": "callbacks.monitors",
    "TrainFaultTolerance": "adapters.mindspore",
    "TrainState": "training.train_state",
    "restore_group_info_list": "storage.group_info",
    "run": "training.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in {"TrainState", "TrainFaultTolerance"}:  # now: a group may be made soon
        import_module(f"{__name__}.distributed.communicators").outlive_peers(os.environ)
        import_module(f"{__name__}.distributed.cut_tensors").install()
    return found
