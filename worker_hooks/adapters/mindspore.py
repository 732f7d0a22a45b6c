"""MindSpore's names for the power-off checkpoint, on top of ``TrainState``.

    state = TrainState(model=net, optimizer=OptTFTWrapper(opt),
                       callbacks=[TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints")])

Of MindSpore's arguments only the folder is used: no rank runs a controller here, so there is none
to be placed, dialled, or lost with rank 0.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any, TypeVar

from torch.optim import Optimizer

from worker_hooks.training.train_state import TrainState

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

MAX_PORT = 65535
_HOST = re.compile(r"(?!-)[A-Za-z0-9._-]{1,253}")


class TFTRegister:
    """Names the folder for dumps, as in MindSpore 2.4."""

    def __init__(
        self,
        ctrl_rank_id: int,
        ctrl_ip: str,
        ctrl_port: int,
        ckpt_save_path: str | os.PathLike[str],
    ) -> None:
        """Take MindSpore's arguments.

        Args:
            ctrl_rank_id: checked, not used.
            ctrl_ip: an address or host name; checked, not used.
            ctrl_port: 0 to 65535; checked, not used.
            ckpt_save_path: the folder in which ``tft_saved_checkpoints-step_N`` are made.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an argument is impossible.
        """
        _check_number("ctrl_rank_id", ctrl_rank_id, None)
        _check_host("ctrl_ip", ctrl_ip)
        _check_number("ctrl_port", ctrl_port, MAX_PORT)
        self.ckpt_save_path = _folder(ckpt_save_path)


class TrainFaultTolerance:
    """Names the folder for dumps, as in MindSpore 2.6."""

    def __init__(
        self, ckpt_save_path: str | os.PathLike[str] | None = None, **kwargs: object
    ) -> None:
        """Take MindSpore's arguments.

        Args:
            ckpt_save_path: as in :class:`TFTRegister`; ``None``: ``TrainState`` has it.
            kwargs: ``initial_step`` is accepted and not needed: the state counts its steps.

        Raises:
            TypeError: an argument is unknown or of the wrong type.
            ValueError: a function of the script's own is to save or load, which is impossible.
        """
        for name, value in kwargs.items():
            if name in {"ckpt_save_fn", "ckpt_load_fn"}:
                if value is not None:
                    raise ValueError(
                        f"{name} cannot be used: the state is saved while this rank's own code "
                        "waits or is gone; give ckpt_save_path"
                    )
            elif name == "initial_step":
                _check_number(name, value, None)
            else:
                raise TypeError(f"TrainFaultTolerance() has no argument {name!r}")
        self.ckpt_save_path = None if ckpt_save_path is None else _folder(ckpt_save_path)

    @classmethod
    def get_optimizer_wrapper(cls, origin_opt_cls: type[AnyOptimizer]) -> type[AnyOptimizer]:
        """The class itself: optimizers are watched from outside.

        Raises:
            TypeError: this is no class of optimizers.
        """
        if not (isinstance(origin_opt_cls, type) and issubclass(origin_opt_cls, Optimizer)):
            raise TypeError(
                f"origin_opt_cls must be a torch Optimizer class, not {origin_opt_cls!r}"
            )
        return origin_opt_cls


def OptTFTWrapper(opt: AnyOptimizer, **kwargs: object) -> AnyOptimizer:  # noqa: ARG001, N802
    """The optimizer itself, because the state watches it from outside.

    ``kwargs``: accepted as in MindSpore, not used.

    Raises:
        TypeError: this is no optimizer.
    """
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt must be a torch Optimizer, not {type(opt).__name__}")
    return opt


def _check_number(name: str, value: Any, highest: int | None) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < 0 or (highest is not None and value > highest):
        limit = "at least 0" if highest is None else f"from 0 to {highest}"
        raise ValueError(f"{name} must be {limit}, not {value}")


def _check_host(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be an address or a host name, not {value!r}")
    try:
        ipaddress.ip_address(value)
    except ValueError:
        is_number = value.replace(".", "").isdigit()  # 256.0.0.1 is no host name either
        if is_number or not _HOST.fullmatch(value):
            raise ValueError(f"{name} must be an address or a host name, not {value!r}") from None


def _folder(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"ckpt_save_path must be a path, not {value!r}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"ckpt_save_path must be a path of text, not {path!r}")
    if not path:
        raise ValueError("ckpt_save_path must not be empty")
    return path


class ExitByRequest:
    """Two lines for code that overrides the train step, or has a loop of its own.

        exit_by_request = ExitByRequest(state)      # once, before the first step
        while True:
            ...                                     # one step, its update included
            if exit_by_request():
                break

    Each call is the end of a step, as the return for the next batch of ``state.batches`` is. It
    needs no communication between ranks, either.
    """

    def __init__(self, state: TrainState) -> None:
        """Begin: the state is guarded from now on, and restored if this run resumes.

        Raises:
            TypeError: this is no TrainState.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"ExitByRequest() takes your TrainState, not {type(state).__name__}")
        self._state = state
        self._is_due = state.should_exit

    def __call__(self) -> bool:
        """Whether to exit now: all ranks exit at the same step, and it is saved."""
        self._is_due = self._is_due or self._state.should_exit
        return self._is_due
