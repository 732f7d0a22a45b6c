"""The command line of msrun, and the names that a training script imports.

    from msrun import TrainState, run

and what starts a function in ranks: ``msrun.launch``.

The names live in :mod:`worker_hooks` and are looked up when a script asks for them: they import
torch, and the command line must not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msrun.function.failure import LaunchError
    from msrun.function.launch import launch
    from worker_hooks import (
        CheckpointConfig,
        CheckpointError,
        ExitByRequest,
        GracefulExit,
        LossMonitor,
        ModelCheckpoint,
        OnRequestExit,
        OptTFTWrapper,
        ParallelStrategy,
        TFTRegister,
        TimeMonitor,
        TrainFaultTolerance,
        TrainState,
        restore_group_info_list,
        run,
    )

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ExitByRequest",
    "GracefulExit",
    "LaunchError",
    "LossMonitor",
    "ModelCheckpoint",
    "OnRequestExit",
    "OptTFTWrapper",
    "ParallelStrategy",
    "TFTRegister",
    "TimeMonitor",
    "TrainFaultTolerance",
    "TrainState",
    "launch",
    "restore_group_info_list",
    "run",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "launch":
        from msrun.function.launch import launch

        return launch
    if name == "LaunchError":
        from msrun.function.failure import LaunchError

        return LaunchError
    import worker_hooks

    return getattr(worker_hooks, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
