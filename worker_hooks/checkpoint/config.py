"""When and how to save, under MindSpore's names, with its checks and its precedence."""

from __future__ import annotations

import json
import logging
from typing import Any

log = logging.getLogger("msrun")

EPOCH_NUM, STEP_NUM = "epoch_num", "step_num"
_PLAIN = (int, float, bool, str)
_ASYNC = ("thread", "process")
_FORMAT = "safetensors"
_REFUSED = {
    "incremental": "incremental saves of embedding tables are MapParameter's, which torch has not",
    "enable_redundance": "enable_redundance is MindSpore's own business",
}


class CheckpointConfig:
    """When to save, how, and what to keep. Two checks that MindSpore makes later are made here."""

    def __init__(
        self,
        save_checkpoint_steps: int | None = 1,
        save_checkpoint_seconds: int | None = 0,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_per_n_minutes: int | None = 0,
        integrated_save: bool = True,
        async_save: bool | str = False,
        saved_network: Any = None,
        append_info: list[Any] | None = None,
        enc_key: bytes | None = None,
        enc_mode: str = "AES-GCM",
        exception_save: bool = False,
        crc_check: bool = False,
        **kwargs: Any,
    ) -> None:
        """Take MindSpore's arguments; those that cannot be honoured are refused.

        Args:
            save_checkpoint_steps: save whenever the count of all steps is a multiple of it; 0 or
                ``None``: not by steps. The last step is saved in any case.
            save_checkpoint_seconds: save this long after the previous save, by rank 0's clock; used
                only if ``save_checkpoint_steps`` is 0 or ``None``.
            keep_checkpoint_max: keep this many of the newest; 0 or ``None``: see the next argument.
            keep_checkpoint_per_n_minutes: keep one for every n minutes; used only if
                ``keep_checkpoint_max`` is 0 or ``None``. Without either, one is kept.
            integrated_save: one rank writes the model for all; where groups of ranks hold parts of
                it, one of each group, and their files are merged into one. ``False``: every rank
                writes what it holds.
            async_save: training continues as soon as the state is copied; "thread" and "process"
                mean ``True``: the writer is always a process.
            saved_network: refused; register the module that is to be saved.
            append_info: "epoch_num", "step_num" and at most one dict of numbers, bools and texts;
                saved as JSON in the model's file, under ``append_info``.
            enc_key: refused.
            enc_mode: only the default.
            exception_save: also save when an exception ends training, with ``_breakpoint`` in the
                name.
            crc_check: read back and compare what was written before it counts as saved. A
                checksum is always saved.
            kwargs: ``remove_redundancy=True``: each rank writes an equal part of the model, or of
                what its group holds, once;
                ``format``: "safetensors" only.

        Raises:
            TypeError: an argument is unknown, or of the wrong type.
            ValueError: it cannot be honoured; the message says why.
        """
        steps = _count("save_checkpoint_steps", save_checkpoint_steps)
        seconds = _count("save_checkpoint_seconds", save_checkpoint_seconds)
        most = _count("keep_checkpoint_max", keep_checkpoint_max)
        minutes = _count("keep_checkpoint_per_n_minutes", keep_checkpoint_per_n_minutes)
        if not (steps or seconds or most or minutes):
            raise ValueError(
                "save_checkpoint_steps, save_checkpoint_seconds, keep_checkpoint_max and "
                "keep_checkpoint_per_n_minutes cannot all be 0 or None"
            )
        if steps and seconds:
            log.warning(
                "save_checkpoint_seconds=%d is ignored because of save_checkpoint_steps=%d: "
                "set that to 0 to save by time",
                seconds,
                steps,
            )
        if most and minutes:
            log.warning(
                "keep_checkpoint_per_n_minutes=%d is ignored because of keep_checkpoint_max=%d: "
                "set that to 0 to keep by time",
                minutes,
                most,
            )
        _refuse(saved_network, enc_key, enc_mode)
        if async_save not in _ASYNC:
            _check_bool("async_save", async_save)
        is_split = kwargs.pop("remove_redundancy", False)
        _check_format(kwargs.pop("format", _FORMAT))
        for name, value in kwargs.items():
            if name not in _REFUSED:
                raise TypeError(f"CheckpointConfig() has no argument {name!r}")
            if value:
                raise ValueError(f"{name} cannot be used: {_REFUSED[name]}")
        _check_bool("remove_redundancy", is_split)
        self.save_checkpoint_steps = steps
        self.save_checkpoint_seconds = 0 if steps else seconds
        self.keep_checkpoint_max = most or (0 if minutes else 1)
        self.keep_checkpoint_per_n_minutes = 0 if most else minutes
        self.remove_redundancy: bool = is_split
        self.integrated_save = _check_bool("integrated_save", integrated_save) and not is_split
        self.async_save = bool(async_save)
        self.exception_save = _check_bool("exception_save", exception_save)
        self.crc_check = _check_bool("crc_check", crc_check)
        self.format = _FORMAT
        self.append_info = _checked(append_info)
        self.append_dict: dict[str, Any] = next(
            (dict(each) for each in self.append_info if isinstance(each, dict)), {}
        )

    def appended(self, epoch: int, step: int) -> dict[str, Any]:
        """The values that ``append_info`` names.

        Args:
            epoch: counted from 1.
            step: of all steps.
        """
        numbers = {EPOCH_NUM: epoch, STEP_NUM: step}
        asked = {name: numbers[name] for name in numbers if name in self.append_info}
        return asked | self.append_dict


def _count(name: str, value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer or None, not {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
    return value


def _check_bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _refuse(saved_network: Any, enc_key: Any, enc_mode: Any) -> None:
    if saved_network is not None:
        raise ValueError(
            "saved_network cannot be used: a checkpoint holds all that training needs to resume; "
            "give that module to TrainState, or save it by safetensors.torch.save_model"
        )
    if enc_key is not None:
        raise ValueError(
            "enc_key cannot be used: checkpoints are not encrypted here, so that any safetensors "
            "reader opens them; use an encrypted file system"
        )
    if enc_mode != "AES-GCM":
        raise ValueError(f"enc_mode={enc_mode!r} cannot be used: checkpoints are not encrypted")


def _check_format(form: Any) -> None:
    if form == "ckpt":
        raise ValueError(
            "format='ckpt' cannot be used: that is protobuf or pickle, and loading a pickle runs "
            "its code; format='safetensors' is the only one"
        )
    if form != _FORMAT:
        raise ValueError(f"format must be 'safetensors', not {form!r}")


def _checked(append_info: Any) -> tuple[Any, ...]:
    if append_info is None:
        return ()
    if not isinstance(append_info, list):
        raise TypeError(f"append_info must be a list, not {append_info!r}")
    for each in append_info:
        if isinstance(each, dict):
            _check_dict(each)
        elif not isinstance(each, str):
            raise TypeError(f"append_info can hold texts and one dict, not {each!r}")
        elif each not in {EPOCH_NUM, STEP_NUM}:
            raise ValueError(f"append_info can ask for {EPOCH_NUM} and {STEP_NUM}, not {each!r}")
    if sum(isinstance(each, dict) for each in append_info) > 1:
        raise TypeError("append_info can hold one dict, not several")
    return tuple(append_info)


def _check_dict(given: dict[Any, Any]) -> None:
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"append_info's dict must have texts as keys, not {key!r}")
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"append_info's {key!r} is of type {type(value).__name__}: only numbers, bools and "
                "texts can be appended; give tensors and generators to TrainState"
            )
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"append_info's dict is not JSON: {error}") from None
