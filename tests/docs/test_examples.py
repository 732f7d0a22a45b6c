"""What README and the manual tell people to type: read by the parsers that would read it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml
from support.documents import PAGES, ROOT, Block, blocks, marked, patched

from msrun.checkpoints.commands import completed
from msrun.commands import commands
from msrun.drill.fault_options import read_file, read_words
from msrun.drill.patterns import choose
from msrun.drill.random_faults import read_kinds
from msrun.job.request import parse
from msrun.options.argv import command_words, scan
from msrun.options.program import SUBCOMMANDS
from worker_hooks import TrainState

OURS = {"msrun", "worker_hooks", "agent"}
GUIDE = [page for page in PAGES if page.parent.name == "user-guide"]
SHELL = blocks("sh")
PYTHON = blocks("python")
YAML = blocks("yaml")
ENDS = {";", "&&", "||", "|", "&", "(", ")"}
OPENING = {"if", "then", "else", "do", "exec", "time"}
FOLDERS = ("ckpts", "checkpoints", "tests")
FAULTS = ("kill", "stop", "graceful", "preempt", "cut", "poweroff")


class Command(NamedTuple):
    """One simple command of a shell block."""

    words: tuple[str, ...]
    environ: dict[str, str]  # what is assigned in front of it


def commands_in(text: str) -> list[Command]:
    """The simple commands of a shell script, without redirections and variables."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        current: list[str] = []
        for token in (*lexer, ";"):
            if token not in ENDS:
                current.append(token)
                continue
            if current:
                found.append(command_of(current))
            current = []
    return [command for command in found if command.words]


def command_of(tokens: list[str]) -> Command:
    kept, environ = list[str](), dict[str, str]()
    skips = False  # a redirection's target
    for token in tokens:
        if set(token) <= set("<>&"):
            skips = True
            if kept and kept[-1].isdigit():
                kept.pop()  # 2>&1
        elif skips:
            skips = False
        elif not kept and re.match(r"\w+=", token):
            name, _, value = token.partition("=")
            environ[name] = value
        elif not (token.startswith("$") or (not kept and token in OPENING)):
            kept.append(token)
    return Command(tuple(kept), environ)


def named(block: Block) -> str:
    return block.id


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with everything that commands of the manual name."""
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for block in (*SHELL, *YAML, *PYTHON):
        if block.marker.startswith("file "):
            (tmp_path / block.name).write_text(block.text)
    return tmp_path


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_a_shell_block_is_what_a_shell_can_read(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_each_command_of_a_shell_block_exists(block, folder):
    for command in commands_in(block.text):
        program, *arguments = command.words
        if program == "msrun":
            understood(arguments, command.environ, folder)
        elif program.startswith("scripts/"):
            assert os.access(ROOT / program, os.X_OK), program


@pytest.mark.parametrize("block", YAML, ids=named)
def test_a_yaml_block_is_read_and_its_commands_are_understood(block, folder):
    def look(node):
        match node:
            case ["msrun", *arguments]:
                understood([str(each) for each in arguments], {}, folder)
            case list():
                for each in node:
                    look(each)
            case dict():
                for each in node.values():
                    look(each)

    look(yaml.safe_load(block.text))


def understood(arguments: list[str], environ: dict[str, str], folder: Path) -> None:
    """Have a command line read as msrun would read it, but for what was saved by earlier runs."""
    for word in arguments:
        if word.endswith((".py", ".sh")):
            (folder / word).touch(mode=0o755)
    if arguments and arguments[0] in SUBCOMMANDS:
        subcommand(arguments, folder)
        return
    line = scan(arguments, lambda following: not following[0].endswith(".py"))
    given = {
        name: each for name, each in line.given.items() if name not in {"resume", "is_recover"}
    }
    script = line.script or (None if "config" in given else "train.py")
    (folder / "train.py").touch()
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    parse(command_words(line._replace(given=given, script=script)), {"PATH": path, **environ})


def subcommand(arguments: list[str], folder: Path) -> None:
    name, *rest = completed(arguments)
    command: Any = commands.commands[name]
    if isinstance(command, click.Group):
        name, *rest = rest
        command = command.commands[name]
    with command.make_context(name, rest) as context:
        asked = context.params
    if name != "drill":
        return
    if asked["patterns"]:
        assert choose(asked["patterns"])
        return
    has_faults = any(asked[each] for each in (*FAULTS, "faults", "number", "marathon"))
    assert has_faults, "the drill has no fault"
    for kind in FAULTS:
        for fault in asked[kind]:
            read_words(fault, kind)
    for path in asked["faults"]:
        assert read_file(path)
    read_kinds(asked["kinds"] or "kill")
    understood(list(asked["job"]), {}, folder)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_a_python_block_compiles_and_uses_what_there_is(block):
    uses_what_there_is(block.text)


@pytest.mark.usefixtures("folder")
def test_readmes_diff_makes_a_script_that_uses_what_there_is():
    uses_what_there_is(patched(marked("script", "train.py").text, marked("diff", "train.py").text))


def uses_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    ours = dict(imported(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in ours:
                fits(ours[name], node)
            case ast.Attribute(value=ast.Name(id="state"), attr=attribute):
                assert attribute in of_a_state(), f"state.{attribute}"


def imported(tree: ast.AST):
    """Name -> object, of what is imported from our packages; every other import must be there."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                found = importlib.import_module(module)
                for alias in names:
                    thing = getattr(found, alias.name)
                    if module.partition(".")[0] in OURS:
                        yield alias.asname or alias.name, thing
            case ast.Import(names=names):
                for alias in names:
                    importlib.import_module(alias.name)


def fits(function, call: ast.Call) -> None:
    """Fail if the function does not take these arguments; with literals alone, it is called."""
    try:
        values = [ast.literal_eval(each) for each in call.args]
        keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except ValueError:
        named = {each.arg: each.value for each in call.keywords}
        inspect.signature(function).bind(*call.args, **named)
    else:
        function(*values, **keywords)


def of_a_state() -> set[str]:
    """Attributes of a TrainState."""
    return {*dir(TrainState), *re.findall(r"self\.(\w+)", inspect.getsource(TrainState))}


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_a_page_opens_with_what_the_reader_can_do_then(page):
    title, _, rest = page.read_text().partition("\n\n")
    assert title.startswith("# ")
    assert rest.startswith("After reading this page you ")


def test_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("msrun a.py  # why", ["msrun a.py"]),
        ("A='{x:1}' msrun a.py", ["msrun a.py"]),
        ("if ls x >/dev/null 2>&1; then exec msrun $r a.py; fi", ["ls x", "msrun a.py", "fi"]),
    ],
)
def test_commands_are_found_in_a_line(line, expected):
    assert [" ".join(command.words) for command in commands_in(line)] == expected


def test_what_is_assigned_in_front_of_a_command_is_its_environment():
    assert commands_in("A='{x:1}' msrun a.py")[0].environ == {"A": "{x:1}"}
