"""``state.own`` and ``state.shared``: attributes that are saved at each commit."""

from __future__ import annotations

from typing import Any

from worker_hooks.script import values


class OwnValues:
    """A script's own values: numbers, texts, small tensors and arrays, and containers of these.

        state.own.setdefault(best=0.0, bad_epochs=0)      # at the begin of train
        state.own.best = max(state.own.best, accuracy)

    Random number generators are saved, too. A value may also be changed in place.
    """

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        """``name``: as the script spells it, for messages."""
        object.__setattr__(self, "_name", name)

    def setdefault(self, **defaults: Any) -> None:
        """Assign those that have no value yet: neither from this run nor from a checkpoint."""
        for name, value in defaults.items():
            if name not in vars(self):
                setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a value.

        Raises:
            TypeError: it cannot be saved.
            ValueError: it is too large, or the name is that of a method.
        """
        full = f"{self._name}.{name}"
        if name.startswith("_") or name == "setdefault":
            raise ValueError(f"{full} cannot be assigned: choose a name without _ at its begin")
        values.check_own(value, full)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by Python itself, of an object without attributes
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name}.{name} has no value yet: give it one with "
            f"{self._name}.setdefault({name}=...)"
        )
