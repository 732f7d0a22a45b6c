"""What counts as a mistake: the mutants of a few lines, and that each is a program."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts/mutation"))

import mutation
from mutants import mutants
from mutation import ROOT


def becomes(source):
    return [one.becomes for one in mutants(source)]


@pytest.mark.parametrize(
    ("line", "mistakes"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a is b", ["x = (a is not b)"]),
        ("x = a and b", ["x = (a or b)", "x = a", "x = b"]),
        ("x = not a", ["x = a"]),
        ("x = 3", ["x = 4"]),
        ("x = True", ["x = False"]),
        ("x = all(y)", ["x = any(y)"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("x = f(a, b=1)", ["x = f(a)", "x = f(a, b=2)"]),
        ("x = f(a, b)", ["x = f(a)"]),
        ("x.a = b", ["pass"]),
        ("f()", ["pass"]),
        ("x = a if b else c", ["x = a if (not b) else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if (not a)]"]),
        ("x = isinstance(a, b)", []),
        ("assert a < b", []),
        ("log.debug('%d', 1)", []),
        ("x = f'{1}'", []),
        ('"""A text."""', []),
        ("x: list[1]", []),
    ],
)
def test_mistakes_of_a_line(line, mistakes):
    assert sorted(becomes(line)) == sorted(mistakes)


def test_returns_are_left_out_but_the_last():
    source = "def f(x):\n    if x:\n        return 'a'\n    return 'b'\n"
    assert [(one.line, one.becomes) for one in mutants(source)] == [
        (2, "if (not x):"),
        (3, "pass"),
    ]


def test_an_expression_of_several_lines_is_changed_as_one():
    source = "é = 'ä'\nx = (\n    a and\n    b\n)\n"
    found = {one.becomes: (one.was, one.text) for one in mutants(source)}
    assert found["(a or b)"] == ("a and b", "é = 'ä'\nx = (\n    (a or b)\n)\n")


@pytest.mark.parametrize("file", mutation.all_files())
def test_each_mutant_of_a_file_is_another_program(file):
    source = (ROOT / file).read_text()
    whole = ast.dump(ast.parse(source))
    found = mutants(source)[::29]
    assert all(ast.dump(ast.parse(one.text)) != whole for one in found)


def test_a_seed_is_a_choice_and_each_file_gets_its_share():
    files = ["agent/controller/dump.py", "worker_hooks/guard/gate.py"]
    one = mutation.chosen(files, 1, 20)
    assert one == mutation.chosen(files, 1, 20) != mutation.chosen(files, 2, 20)
    assert [file for file, _ in one] == files * 10
    assert len({mutant.text for _, mutant in one}) == 20


def test_what_behaves_like_the_code_is_explained_and_left_out():
    known = {(one["file"], one["was"], one["becomes"]) for one in mutation.equivalent()}
    assert known and all(one["why"] for one in mutation.equivalent())
    left = mutation.chosen(mutation.all_files(), 1, 1_000_000)
    assert not known & {(file, one.was, one.becomes) for file, one in left}


def test_what_is_known_to_behave_like_the_code_is_one_line_of_it():
    for one in mutation.equivalent():
        made = mutants((ROOT / one["file"]).read_text())
        assert [(each.was, each.becomes) for each in made].count((one["was"], one["becomes"])) <= 1
