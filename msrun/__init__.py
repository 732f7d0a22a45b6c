"""The command line of msrun, and the names that a training script imports.

    from msrun import TrainState, run

The names live in :mod:`worker_hooks` and are looked up when a script asks for them: they import
torch, and the command line must not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_hooks import (
        CheckpointConfig,
        CheckpointError,
        ExitByRequest,
        GracefulExit,
        LossMonitor,
        ModelCheckpoint,
        OnRequestExit,
        OptTFTWrapper,
        TFTRegister,
        TimeMonitor,
        TrainFaultTolerance,
        TrainState,
        run,
    )

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
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import worker_hooks

    return getattr(worker_hooks, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
