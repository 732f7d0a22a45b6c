"""MindSpore's strategy file: which part of each parameter each rank has, as JSON.

    config = {"save_file": "strategy.json"}
    state = TrainState(model=net, optimizer=opt, callbacks=[ParallelStrategy(config)])

It is for people and their tools. A checkpoint needs none: its files say which parts they have.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_hooks.checkpoint.context import CheckpointedTraining
from worker_hooks.contract.atomic_file import describe_os_error, ensure_folder, write_atomic
from worker_hooks.state.module import ModulePiece
from worker_hooks.tensors import placements

log = logging.getLogger("msrun")

RANK = "{rank}"
"""Stands in ``save_file`` for a rank's number; without it rank 0 alone writes, for all."""

_KEYS = ("save_file", "load_file", "only_trainable_params")
_NAMED = 3  # parameters in one sentence

Layouts = Mapping[str, Mapping[str, Any]]


class ParallelStrategy:
    """Writes the layout of all parameters, and compares it with that of an earlier run."""

    def __init__(self, strategy_ckpt_config: Mapping[str, Any]) -> None:
        """Take MindSpore's argument.

        Args:
            strategy_ckpt_config: ``save_file``, a path, in which :data:`RANK` may stand;
                ``load_file``, the path of a file to compare with, differences are logged;
                ``only_trainable_params``, default true: leave out what needs no gradient.

        Raises:
            TypeError: it is no mapping, or a value is of the wrong type.
            ValueError: a key is unknown, or ``load_file`` is no such file.
        """
        if not isinstance(strategy_ckpt_config, Mapping):
            raise TypeError(f"strategy_ckpt_config must be a dict, not {strategy_ckpt_config!r}")
        config = dict(strategy_ckpt_config)
        if unknown := [key for key in config if key not in _KEYS]:
            raise ValueError(
                f"strategy_ckpt_config has {unknown[0]!r}, but knows {', '.join(_KEYS)}"
            )
        self._save_file = _path("save_file", config.get("save_file"))
        load_file = _path("load_file", config.get("load_file"))
        is_only = config.get("only_trainable_params", True)
        if type(is_only) is not bool:
            raise TypeError(f"only_trainable_params must be True or False, not {is_only!r}")
        self._is_only_trained = is_only
        self._load_file = load_file
        self._then = _read(Path(load_file)) if load_file else None

    def begin(self, state: CheckpointedTraining) -> None:
        """Write the file, and say what has changed: the model is registered, and sharded."""
        layouts = self._layouts(state)
        changes = "" if self._then is None or state.rank else _changes(self._then, layouts)
        if changes:
            log.warning("the layout is another one than in %s: %s", self._load_file, changes)
        if self._save_file and (state.rank == 0 or RANK in self._save_file):
            path = Path(self._save_file.replace(RANK, str(state.rank)))
            content = {
                "current_stage": 0,
                "parallel_strategy_item": {},
                "parallel_layout_item": layouts,
            }
            try:
                ensure_folder(path.parent)
                write_atomic(path, json.dumps(content, indent=1).encode(), durable=False)
            except OSError as error:  # training needs no such file
                log.warning("%s is not written: %s", path, describe_os_error(error))

    def _layouts(self, state: CheckpointedTraining) -> Layouts:
        found = {}
        for piece in state.checkpoint_context.committed.pieces:
            if isinstance(piece, ModulePiece):
                dims = placements.fsdp_dims(piece.module)
                for name, one in piece.parameters().items():
                    if one.requires_grad or not self._is_only_trained:
                        found[name] = _layout(one, dims.get(id(one), 0))
        return found


def _layout(tensor: Any, fsdp_dims: int) -> dict[str, Any]:
    """One parameter's, with MindSpore's keys and ``boxes``, which has what these cannot tell."""
    shape = list(tensor.shape)
    plain: dict[str, Any] = {"field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
    if not placements.is_distributed(tensor):
        plain |= {"dev_matrix": [1], "tensor_map": [-1] * len(shape), "tensor_shape": shape}
        return plain
    mesh = list(tensor.device_mesh.shape)
    tensor_map, shards = [-1] * len(shape), 0
    for at, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and at < fsdp_dims:  # for MindSpore this is the optimizer's concern
            shards = mesh[at]
        elif dim is not None:
            tensor_map[dim] = len(mesh) - 1 - at
    boxes = placements.boxes_by_rank(tensor)
    return {
        **plain,
        "dev_matrix": mesh,
        "tensor_map": tensor_map,
        "tensor_shape": list(placements.part_of(tensor).shape),
        "opt_weight_shard_size": shards,
        "boxes": {str(rank): [box.offset, box.size] for rank, box in sorted(boxes.items())},
    }


def _changes(then: Layouts, now: Layouts) -> str:
    """What is not as it was, as text; empty: nothing."""
    # as JSON tells it
    now = json.loads(json.dumps(now))
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    said = [
        f"{name} is {_described(now.get(name))}, and was {_described(then.get(name))}"
        for name in names[:_NAMED]
    ]
    left = len(names) - _NAMED
    more = [f"{left} more differ{'s' * (left == 1)}"] if left > 0 else []
    return "; ".join(said + more)


def _described(layout: Mapping[str, Any] | None) -> str:
    if layout is None:
        return "not there"
    shape = "x".join(map(str, layout.get("tensor_shape", ())))
    ranks = "x".join(map(str, layout.get("dev_matrix", ())))
    return f"cut into {shape} over {ranks} ranks" if "boxes" in layout else f"whole ({shape})"


def _read(path: Path) -> Layouts:
    try:
        found = json.loads(path.read_bytes())["parallel_layout_item"]
    except OSError as error:
        raise ValueError(f"load_file {path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"load_file {path} is no strategy file in JSON") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ValueError(f"load_file {path} is no strategy file in JSON")
    return found


def _path(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"{name} must be a path, not {value!r}")
    return str(os.fspath(value))
