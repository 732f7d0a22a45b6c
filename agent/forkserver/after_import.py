"""Calls a function once a module has been imported, whoever imports it and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(name: str, call: Callable[[], None]) -> None:
    """Call this right after module ``name`` has run for the first time; it must not raise."""
    sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    """Finds one module as the other finders would, and gives its loader more to do, once.

    It stays until the module has run: who asks for a spec may only want to know if there is one.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = [each for each in sys.meta_path if each is not self]
        finders = [each for each in others if hasattr(each, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _extend(spec.loader, self._has_run)
        return spec

    def _has_run(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


def _extend(loader: object, call: Callable[[], None]) -> None:
    run: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

    def run_and_call(module: ModuleType) -> None:
        run(module)
        call()

    loader.exec_module = run_and_call  # type: ignore[attr-defined]
