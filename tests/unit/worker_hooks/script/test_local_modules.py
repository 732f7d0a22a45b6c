"""Which modules are the script's own: those beside it, as they are loaded now."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from worker_hooks.script.watch import local_modules


def module(name, file):
    made = ModuleType(name)
    made.__file__ = str(file)
    return made


@pytest.fixture(autouse=True)
def main(tmp_path, monkeypatch):
    made = module("__main__", tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", made)
    return made


def test_a_module_counts_from_its_import_on_and_until_it_is_gone(main, tmp_path, monkeypatch):
    assert local_modules() == [main]
    helper = module("helper", tmp_path / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", helper)
    monkeypatch.setitem(sys.modules, "elsewhere", module("elsewhere", "/elsewhere/helper.py"))
    assert local_modules() == [main, helper]
    monkeypatch.delitem(sys.modules, "helper")
    assert local_modules() == [main]


def test_one_that_was_loaded_anew_under_its_name_takes_the_place_of_the_old_one(
    main, tmp_path, monkeypatch
):
    for _ in range(2):
        helper = module("helper", tmp_path / "helper.py")
        monkeypatch.setitem(sys.modules, "helper", helper)
        assert local_modules() == [main, helper]
        assert local_modules()[1] is helper


class Equal(ModuleType):
    """Says that it is equal to any other one."""

    __hash__ = ModuleType.__hash__

    def __eq__(self, _):
        return True


class Incomparable:
    """Stands for an array, of which nobody can say whether it equals another one."""

    __hash__ = object.__hash__

    def __eq__(self, _):
        raise ValueError("ambiguous")


def test_what_a_module_says_of_its_equals_does_not_matter(tmp_path, monkeypatch):
    for _ in range(2):
        helper = Equal("helper")
        helper.__file__ = str(tmp_path / "helper.py")
        monkeypatch.setitem(sys.modules, "helper", helper)
        monkeypatch.setitem(sys.modules, "none", Incomparable())
        assert local_modules()[1] is helper


def test_another_script_has_others_beside_it(main, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "helper", module("helper", tmp_path / "helper.py"))
    assert len(local_modules()) == 2
    main.__file__ = str(tmp_path / "other" / "train.py")
    assert local_modules() == [main]
