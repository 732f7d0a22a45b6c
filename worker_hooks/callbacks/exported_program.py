"""A model as a program that runs without the model's code: ``.pt2``, made by ``torch.export``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from worker_hooks.contract.atomic_file import FILE_MODE, fsync_folder
from worker_hooks.state.module import unwrapped

_SIMPLE = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)


class _TensorSpec(NamedTuple):
    """A tensor without its elements."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Example:
    """The arguments of a model's first call in training, for the export."""

    def __init__(self, module: nn.Module) -> None:
        """Record the next call, and none after it."""
        self._module = unwrapped(module)
        self._leaves: list[Any] | None = None
        self._spec: Any = None
        self._hook = self._module.register_forward_pre_hook(self._called, with_kwargs=True)

    def export(self, path: Path) -> None:
        """Write or replace the file: the program for inference, with the model's weights.

        The first dimension of each tensor, the batch, may have any size that the model allows.

        Args:
            path: ends with ``.pt2``, in an existing folder.

        Raises:
            ValueError: the model was not called, or with arguments that cannot be recorded.
            Exception: the model cannot be exported, for one of many reasons.
        """
        self._hook.remove()
        args, kwargs = self._arguments()
        with _evaluating(self._module), torch.no_grad():
            sizes = _sizes(self._module, args, kwargs)
            program = torch.export.export(self._module, args, kwargs, dynamic_shapes=sizes)
        aside = path.parent / f".{path.stem}_tmp.pt2"
        try:
            torch.export.save(program, aside)
            with open(aside, "rb") as file:
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & FILE_MODE)
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)

    def _called(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a side effect would break the graph
        self._hook.remove()
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [
            _TensorSpec(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        if not all(isinstance(leaf, (_TensorSpec, *_SIMPLE)) for leaf in self._leaves):
            self._leaves = [type(leaf).__qualname__ for leaf in leaves]  # keep no argument alive
            self._spec = None

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._leaves is None:
            raise ValueError("the model was not called, or only inside of torch.compile")
        if self._spec is None:
            raise ValueError(f"the model is called with {', '.join(self._leaves)}")
        leaves = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            if isinstance(leaf, _TensorSpec)
            else leaf
            for leaf in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs


def _sizes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Which dimensions of each argument may have any size, by the argument's name."""
    named = inspect.signature(module.forward).bind(*args, **kwargs).arguments

    def free(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim else None

    sizes: dict[str, Any] = pytree.tree_map(free, dict(named))
    return sizes


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set the module and all inside it to evaluation; restore it afterwards."""
    before = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, was in before:
            each.training = was
