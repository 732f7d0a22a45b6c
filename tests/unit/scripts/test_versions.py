"""The versions that are tried, and what is said of them."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts/versions"))  # as for a script in that folder

import matrix  # noqa: E402
from matrix import PYTHONS, TORCHES, TRIALS, Pair  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "msrun-matrix"


def minor(version):
    return version.rpartition(".")[0]


def test_what_is_promised_is_what_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [each for each in project["dependencies"] if each.startswith("torch")]
    assert torch == f"torch>={minor(TORCHES[0])}"
    assert project["requires-python"] == f">={PYTHONS[0]}"
    named = [re.search(r"Python :: (\d\.\d+)$", each) for each in project["classifiers"]]
    assert tuple(found[1] for found in named if found) == PYTHONS
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned[1] in TORCHES
    for page in ("README.md", "docs/index.md"):
        said = re.search(r"torch (\d\.\d+) to (\d\.\d+)\]", (ROOT / page).read_text())
        assert said.groups() == (minor(TORCHES[0]), minor(TORCHES[-1])), page


def test_the_manual_says_of_every_version_what_was_seen():
    text = (ROOT / "docs/user-guide/launching.md").read_text()
    rows = re.findall(r"^\| (\d\S+) \| (\S+) \| (.*) \|$", text, re.MULTILINE)
    tried = {(torch, minor(python)) for torch, python, _ in rows}
    assert tried == set(matrix.pairs_of(()))


def test_every_trial_names_tests_that_exist():
    for words in TRIALS.values():
        assert (ROOT / words[0]).exists()
        for name in words[1:]:
            path, _, function = name.partition("::")
            if path.endswith(".py"):
                assert f"def {function}" in (ROOT / path).read_text()


def test_pairs():
    assert matrix.pairs_of(["2.14.1:3.13", "2.9.1:3.11"]) == [("2.14.1", "3.13"), ("2.9.1", "3.11")]
    every = matrix.pairs_of([])
    assert {pair.torch for pair in every} == {*TORCHES}
    assert {pair.python for pair in every if pair.torch == TORCHES[-1]} == {*PYTHONS}
    for wrong in ("2.14.1", "2.14.1:", "2:3:4"):
        with pytest.raises(SystemExit, match="a pair is TORCH:PYTHON"):
            matrix.pairs_of([wrong])


def told(capsys, monkeypatch, *pairs):
    monkeypatch.setattr(sys, "argv", ["matrix", *pairs])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    return ended.value.code, capsys.readouterr().out.splitlines()[2:-1]


def test_what_cannot_be_tried_is_a_failure_and_the_next_is_tried(capsys, monkeypatch, cache):
    def runs(pair, words, _environ):
        pair.log.write_text(f"ERROR: no torch {pair.torch}\n")
        assert words == ["scripts/install"]
        return False

    monkeypatch.setattr(matrix, "runs", runs)
    here = ".".join(map(str, sys.version_info[:2]))
    monkeypatch.setattr(matrix, "interpreter", lambda version: sys.executable * (version == here))
    code, rows = told(capsys, monkeypatch, "1.2.3:9.9", f"1.2.3:{here}")
    assert code == 1
    assert [row.rpartition(" | ")[2] for row in rows] == [
        "this Python is not on the machine |",
        "cannot be installed: no torch 1.2.3 |",
    ]
    assert {each.name for each in cache.iterdir()} == {f"torch-1.2.3-python-{here}.log"}


@pytest.mark.parametrize(
    ("why", "failing", "code", "end"),
    [
        ("", (), 0, "ok | ok | holds |"),
        ("", ("drill",), 1, "ok | FAILED | fails: drill |"),
        ("", ("quick", "drill"), 1, "FAILED | fails: quick, drill |"),
        ("torch 3 lacks x", (), 0, "- | - | says that it promises nothing: torch 3 lacks x |"),
    ],
)
def test_a_version_holds_or_says_so_or_fails(why, failing, code, end, capsys, monkeypatch, cache):
    monkeypatch.setattr(matrix, "interpreter", lambda _: sys.executable)
    bad = [TRIALS[name] for name in failing]
    monkeypatch.setattr(matrix, "runs", lambda _pair, words, _environ: words not in bad)
    monkeypatch.setattr(matrix, "ASK", f"print('3.0+cpu', '3.11.7', {why!r}, sep='\\n')")
    python = cache / "torch-3.0-python-3.11/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    found, (row,) = told(capsys, monkeypatch, "3.0:3.11")
    assert (found, row.startswith("| 3.0+cpu | 3.11.7 | ")) == (code, True)
    assert row.endswith(end)


def test_an_interpreter_is_of_that_version():
    here = ".".join(map(str, sys.version_info[:2]))
    assert matrix.is_of(sys.executable, here)
    assert not matrix.is_of(sys.executable, here[:-1])
    assert not matrix.is_of("/bin/false", here)


def test_each_pair_has_a_place_of_its_own(cache):
    pair = Pair("2.9.1", "3.11")
    assert pair.venv == cache / "torch-2.9.1-python-3.11"
    assert pair.log == cache / "torch-2.9.1-python-3.11.log"
