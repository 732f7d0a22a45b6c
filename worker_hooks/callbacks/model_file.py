"""A model alone in one safetensors file, under its own names, to be loaded without msrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from worker_hooks.contract.atomic_file import fsync_folder
from worker_hooks.state.module import unwrapped
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.safetensors_file import BITS
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.shard import Replica, digest
from worker_hooks.tensors.tensor_bytes import entry_of

log = logging.getLogger("msrun")


def tensors_of(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of a model, as its ``state_dict`` names them.

    If there are several models, each name begins with its model's. Wrappers for data parallelism
    or compilation do not appear in the names.
    """
    found = {}
    for model, module in models.items():
        prefix = f"{model}." if len(models) > 1 else ""
        for name, value in unwrapped(module).state_dict().items():
            if isinstance(value, Tensor):
                found[prefix + name] = value
            else:
                log.warning("%s%s is no tensor: it is left out of the model's file", prefix, name)
    return found


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """64 hexadecimal digits, equal for equal tensors under equal names."""
    return digest(Replica(tensors, (), "", {}), lambda _: None)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write or replace the file: after a crash it is either the old or the new one.

    ``tensors``: by name; two may share memory.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
        TypeError: a tensor cannot be saved.
    """
    found = [(entry_of(name, tensor), tensor) for name, tensor in tensors.items()]
    found.sort(key=lambda each: (-BITS[each[0].dtype], each[0].name))  # so that all are aligned
    head = safetensors_file.header([entry for entry, _ in found], {**metadata, "format": "pt"})
    aside = path.parent / f".{path.name}_tmp"  # each rank has its own folder: one writer
    safetensors_file.write(aside, head, _pieces(tensor for _, tensor in found), lambda _: None)
    os.replace(aside, path)
    fsync_folder(path.parent)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    reader = Reader()
    for tensor in tensors:
        yield from reader.pieces(tensor)
