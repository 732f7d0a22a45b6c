"""How the script's source is looked at, and which modules are the script's."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.data import DataLoader

from worker_hooks.script import source, watch

SCRIPT = """
def train(state):
    for x in state.batches(loader):
        first(x)
        second(x)

def first(x):
    pass

def second(x):
    first(x)

loader = []
"""


def loaded(path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path.write_text(text)
    module = ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def test_a_file_is_parsed_once_however_many_of_its_functions_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = loaded(tmp_path / "train.py", "__main__", SCRIPT, monkeypatch)
    parsed, parse = [], ast.parse

    def counted(text: str, *rest: object) -> ast.AST:
        parsed.append(text)
        return parse(text, *rest)

    monkeypatch.setattr(ast, "parse", counted)
    assert source.look_at(main.train).has_batches
    assert parsed == [SCRIPT]


DATA = """
class Numbers(list):
    pass
"""


@pytest.mark.parametrize("key", ["numbers", "another name"])
def test_data_of_the_script_s_own_is_found_whatever_its_module_is_called(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path / "train.py", "__main__", "", monkeypatch)
    numbers = loaded(tmp_path / "numbers.py", "numbers", DATA, monkeypatch)
    if key != "numbers":
        monkeypatch.setitem(sys.modules, key, numbers)
        monkeypatch.setitem(sys.modules, "numbers", sys)
    found = watch.data_objects(DataLoader(numbers.Numbers()))
    assert [each._name for each in found] == ["Numbers"]


def test_data_of_a_library_is_not_the_script_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path / "train.py", "__main__", "", monkeypatch)
    (tmp_path / "site-packages").mkdir()
    numbers = loaded(tmp_path / "site-packages" / "numbers.py", "numbers", DATA, monkeypatch)
    assert watch.data_objects(DataLoader(numbers.Numbers())) == []
