"""What a training script imports, and the contract between it and the agent.

The script's side: ``TrainState``, ``run``, and MindSpore's names for callbacks. They are looked up
when they are asked for, because they import torch and the agent, which imports the contract, must
not. The contract has four faces: :mod:`worker_hooks.env` (what a worker is told),
:mod:`worker_hooks.protocol` (what it says), :mod:`worker_hooks.page` (what outlives it) and
:mod:`worker_hooks.layout` (where it writes); they need only the standard library.
This package imports nothing of ``agent`` or ``msrun``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_hooks.callbacks import LossMonitor, TimeMonitor
    from worker_hooks.checkpoint.config import CheckpointConfig
    from worker_hooks.checkpoint.model_checkpoint import ModelCheckpoint
    from worker_hooks.checkpoint.order import CheckpointError
    from worker_hooks.departure import GracefulExit
    from worker_hooks.entry import run
    from worker_hooks.exit_by_request import ExitByRequest
    from worker_hooks.on_request_exit import OnRequestExit
    from worker_hooks.state import TrainState
    from worker_hooks.tft import OptTFTWrapper, TFTRegister, TrainFaultTolerance

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ExitByRequest",
    "GracefulExit",
    "LossMonitor",
    "ModelCheckpoint",
    "OnRequestExit",
    "OptTFTWrapper",
    "TFTRegister",
    "TimeMonitor",
    "TrainFaultTolerance",
    "TrainState",
    "run",
]

_HOMES = {
    "CheckpointConfig": "checkpoint.config",
    "CheckpointError": "checkpoint.order",
    "ModelCheckpoint": "checkpoint.model_checkpoint",
    "ExitByRequest": "exit_by_request",
    "GracefulExit": "departure",
    "LossMonitor": "callbacks",
    "OnRequestExit": "on_request_exit",
    "TimeMonitor": "callbacks",
    "OptTFTWrapper": "tft",
    "TFTRegister": "tft",
    "TrainFaultTolerance": "tft",
    "TrainState": "state",
    "run": "entry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
