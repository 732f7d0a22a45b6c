"""Something is called once a module is there, and its import is as it always was."""

import importlib
import importlib.util
import sys

import pytest

from agent.forkserver.after_import import call_after_import


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def test_it_is_called_once_after_the_module_has_run(folder):
    (folder / "awaited.py").write_text("value = 1")
    seen, before = [], [*sys.meta_path]
    call_after_import("awaited", lambda: seen.append(sys.modules["awaited"].value))
    importlib.import_module("json.tool")
    assert seen == []
    module = importlib.import_module("awaited")
    assert seen == [1]
    assert module.__spec__.origin == module.__file__ == str(folder / "awaited.py")
    assert sys.meta_path == before
    importlib.reload(module)
    assert seen == [1]


def test_who_only_asks_whether_there_is_such_a_module_takes_nothing_away(folder):
    """As libraries do that look for torch before they import it."""
    (folder / "awaited.py").write_text("value = 1")
    seen, before = [], [*sys.meta_path]
    call_after_import("awaited", lambda: seen.append(1))
    assert importlib.util.find_spec("awaited") is not None
    assert importlib.util.find_spec("awaited") is not None
    assert seen == []
    importlib.import_module("awaited")
    assert seen == [1]
    assert sys.meta_path == before


def test_an_import_that_fails_may_be_tried_again(folder):
    (folder / "awaited.py").write_text(
        "import sys; sys.tried = getattr(sys, 'tried', 0) + 1; 1 / (sys.tried - 1)"
    )
    seen = []
    call_after_import("awaited", lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("awaited")
    assert seen == []
    importlib.import_module("awaited")
    assert seen == [1]
    del sys.tried


@pytest.mark.parametrize("text", [None, "raise ValueError"])
def test_an_import_that_fails_fails_as_ever(folder, text):
    if text:
        (folder / "awaited.py").write_text(text)
    call_after_import("awaited", pytest.fail)
    with pytest.raises(ValueError if text else ModuleNotFoundError):
        importlib.import_module("awaited")
