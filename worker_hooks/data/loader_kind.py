"""What can be done with a loader: its samplers, and how consumed batches are skipped."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from worker_hooks.data.loader_workers import can_record, dataset_owners
from worker_hooks.tensors import state_json

log = logging.getLogger("msrun")

_STATE_BYTES = 14 << 10  # of JSON, for a loader's own state

_ASKED = "_IterableDataset_len_called"  # a DataLoader keeps the length it returned, and warns


class SkipMethod(Enum):
    """How the consumed batches of an epoch are skipped."""

    SAMPLER = "sampler"  # their indices are drawn and dropped
    LOAD = "load"  # they are loaded and dropped
    OWN = "own"  # the loader has a state of its own


def skip_method(loader: Any) -> SkipMethod:
    """How consumed batches of this loader are skipped."""
    has_state = all(
        callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
    )
    if has_state and not _is_drawn_late(loader):
        return SkipMethod.OWN
    is_mapped = is_plain(loader) and not isinstance(loader.dataset, IterableDataset)
    return SkipMethod.SAMPLER if is_mapped else SkipMethod.LOAD


def _is_drawn_late(loader: Any) -> bool:
    """Whether a DataLoader draws its order with its first batch, as a generator does.

    Its own state would be put back together with the randomness as of that batch, from which it
    would draw another order. It is a DataLoader, so the epoch's first randomness gives its order.
    """
    return isinstance(loader, DataLoader) and inspect.isgeneratorfunction(type(loader).__iter__)


def is_plain(loader: Any) -> bool:
    """Whether this iterates as torch's DataLoader does, so that its parts have the same meaning."""
    if not isinstance(loader, DataLoader) or not can_record():
        return False
    parts = ("__iter__", "_get_iterator", "_index_sampler")
    own = all(getattr(type(loader), part) is getattr(DataLoader, part) for part in parts)
    return own and {"worker_init_fn", sampler_name(loader)} <= vars(loader).keys()


def sampler_name(loader: DataLoader[Any]) -> str:
    """The attribute whose indices a DataLoader sends to its data set."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def parts_of(loader: Any) -> dict[str, Any]:
    """The loader and its parts that may count epochs or own generators."""
    batch_sampler = _part(loader, "batch_sampler")
    parts = {
        "loader": loader,
        "sampler": _part(loader, "sampler"),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": _part(batch_sampler, "sampler"),
        "dataset": _part(loader, "dataset"),
    }
    return {name: part for name, part in parts.items() if part is not None}


def other_loaders(owners: Mapping[str, object]) -> dict[str, object]:
    """The parts of the loaders that a script holds.

    While one loader hands out batches, the generators of the others stay as they are: a new process
    must have them, too. ``owners``: what has the script's variables as attributes, by a prefix.
    """
    return {
        f"{name}.{part}": each
        for name, loader in _loaders(owners)
        for part, each in (parts_of(loader) | dataset_owners(_part(loader, "dataset"))).items()
    }


def keep_workers(owners: Mapping[str, object], but: object) -> dict[str, DataLoader[Any]]:
    """The loaders with persistent workers that a script holds, by name.

    Args:
        owners: what has the script's variables as attributes, by a prefix.
        but: the loader that is left out.
    """
    return {
        name: loader
        for name, loader in _loaders(owners)
        if loader is not but
        and getattr(loader, "persistent_workers", False)
        and getattr(loader, "num_workers", 0)
    }


def iterator_of(loader: object) -> Any | None:
    """The iterator that a DataLoader keeps; ``None``: it has none, or this torch has no such name.

    Of a torch that lacks it the first line of the run has said that nothing is promised.
    """
    return getattr(loader, "_iterator", None)


def loaders_of(owners: Mapping[str, object]) -> list[DataLoader[Any]]:
    """The loaders that a script holds; ``owners`` as for :func:`other_loaders`."""
    return [loader for _, loader in _loaders(owners)]


def _loaders(owners: Mapping[str, object]) -> Iterator[tuple[str, DataLoader[Any]]]:
    for owner, holder in owners.items():
        for name, thing in vars(holder).items():
            if isinstance(thing, DataLoader):
                yield f"{owner}.{name}", thing


def batch_size_of(loader: Any) -> int:
    """Samples in a batch; 1 if the loader does not tell."""
    sizes = (_part(_part(loader, "batch_sampler"), "batch_size"), _part(loader, "batch_size"))
    return next((size for size in sizes if type(size) is int and size > 0), 1)


def length_of(loader: Any) -> int | None:
    """Batches in an epoch, if the loader knows; the loader is not changed by asking."""
    attributes = getattr(loader, "__dict__", {})
    before = {_ASKED: attributes[_ASKED]} if _ASKED in attributes else {}
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
    finally:
        attributes.update(before)


def state_of(loader: Any) -> Any | None:
    """A loader's own state as JSON; ``None``: JSON cannot express it, or it is too large.

    Raises:
        LookupError: the loader has the method and no state; accelerate's is so.
    """
    try:
        own = loader.state_dict()
    except Exception as error:
        raise LookupError(f"{type(loader).__name__} has no state: {error}") from error
    try:
        value, tensors = state_json.encode(own, "loader")
        packed = {name: state_json.pack(tensor) for name, tensor in tensors.items()}
        size = len(state_json.dumps(state := {"value": value, "tensors": packed}))
    except (TypeError, ValueError) as error:
        log.debug("%s: %s", type(loader).__name__, error)
        return None
    return state if size <= _STATE_BYTES else None


def load_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Load a state that :func:`state_of` returned."""
    tensors = {name: state_json.unpack(*packed) for name, packed in state["tensors"].items()}
    loader.load_state_dict(state_json.decode(state["value"], tensors))


def _part(thing: Any, name: str) -> Any | None:
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001  the property of an unknown loader
        return None
