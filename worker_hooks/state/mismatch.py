"""Why saved tensors cannot be restored into those of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from worker_hooks.tensors import state_json
from worker_hooks.tensors.state_json import Json


def compared(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """Differences in names, shapes and dtypes as text; values are not compared."""
    found = []
    if lost := mine.keys() - saved.keys():
        found.append(f"missing in it: {listed(lost)}")
    if unexpected := saved.keys() - mine.keys():
        found.append(f"unknown to this script: {listed(unexpected)}")
    for name in sorted(mine.keys() & saved.keys()):
        now, then = _kind(mine[name]), _kind(saved[name])
        if now != then:
            found.append(f"{name} is {then} there and {now} here")
    return found


def missing(value: Json, saved: Mapping[str, Tensor]) -> list[str]:
    """The tensors that an encoded value names and that are not there, as text."""
    lost = state_json.names_in(value) - saved.keys()
    return [f"missing in it: {listed(lost)}"] if lost else []


def listed(names: Iterable[str]) -> str:
    """Names as a part of a sentence."""
    return ", ".join(sorted(names))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
