"""What may stand in the place of the last word of a command line. Pure, but for files and runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import click

from msrun.options.program import SUBCOMMANDS
from msrun.options.table import OPTIONS, SPELLINGS, Kind, Option

OF_RUNS = {"status", "top", "logs", "stop", "bugreport"}  # commands with a run's id
OF_LIVING = {"stop"}
OF_FOLDERS = {"checkpoints", "doctor"}
PATHS = {"FILE", "DIR"}  # metavars


class Sources(NamedTuple):
    """Where words come from that no table has."""

    commands: click.Group
    runs: Callable[[bool], Iterable[str]]  # the ids of all runs, or of the living ones


def candidates(words: Sequence[str], sources: Sources) -> list[str]:
    """Words for the last one of ``words``, which may be empty; ``msrun`` itself is left out."""
    *before, typed = _joined(words) or [""]
    found = dict.fromkeys(_fitting(before, typed, sources))
    return [word for word in found if word.startswith(typed)]


def _joined(words: Sequence[str]) -> list[str]:
    """Bash takes an ``=`` for a word: put together what the user typed as one."""
    joined: list[str] = []
    for at, word in enumerate(words):
        follows = word == "=" or (at and words[at - 1] == "=")
        if follows and joined and joined[-1].startswith("--"):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _fitting(before: list[str], typed: str, sources: Sources) -> Iterable[str]:
    if before and before[0] in SUBCOMMANDS:
        return _of_command(sources.commands.commands[before[0]], before, typed, sources)
    return _of_launch(before, typed, sources)


def _of_launch(before: list[str], typed: str, sources: Sources) -> Iterator[str]:
    rest, owner = list(before), None
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option = SPELLINGS.get(rest.pop(0))  # None: with its value after an =, or shortened
        if option is not None and option.kind not in {Kind.FLAG, Kind.MAYBE}:
            owner = option if not rest else None
            del rest[:1]
        elif option is not None and option.kind is Kind.MAYBE and not rest:
            yield from _values(option, typed, sources)
    if owner is not None:
        yield from _values(owner, typed, sources)
    elif rest and rest != ["--"]:  # the script's own arguments
        yield from _files(typed)
    elif typed.startswith("-"):
        name, equals, value = typed.partition("=")
        if not equals:
            yield from (each for option in OPTIONS for each in _spellings(option, typed))
        elif (known := SPELLINGS.get(name)) is not None:
            yield from (f"{name}={each}" for each in _values(known, value, sources))
    else:
        yield from () if before else SUBCOMMANDS
        yield from _files(typed, (".py",))


def _spellings(option: Option, typed: str) -> Iterator[str]:
    """With dashes; with underscores if those were typed."""
    yield option.short
    yield f"--{option.dest}" if "_" in typed else option.long


def _values(option: Option, typed: str, sources: Sources) -> Iterator[str]:
    if option.name == "resume":
        yield from sources.runs(False)
        yield from _files(typed, ())
    elif option.metavar in PATHS:
        yield from _files(typed, () if option.metavar == "DIR" else None)
    elif option.kind is Kind.BOOL:
        yield from ("True", "False")
    else:
        yield from option.choices


def _of_command(
    command: click.Command, before: list[str], typed: str, sources: Sources
) -> Iterator[str]:
    name, given = before[0], before[1:]
    if name == "drill" and "--" in given:
        yield from _of_launch(given[given.index("--") + 1 :], typed, sources)
        return
    if isinstance(command, click.Group):
        yield from () if given else command.commands
        if given and given[0] in command.commands:
            command, given = command.commands[given[0]], given[1:]
    options = [each for each in command.params if isinstance(each, click.Option)]
    if given and any(given[-1] in each.opts and not each.is_flag for each in options):
        return  # its value, which no table knows
    if typed.startswith("-"):
        yield from (spelling for each in options for spelling in each.opts)
        yield "--help"
    elif name in OF_FOLDERS:
        yield from _files(typed, ())
    elif all(word.startswith("-") for word in given):
        yield from sources.runs(name in OF_LIVING) if name in OF_RUNS else ()
        choices = (each.type for each in command.params if isinstance(each, click.Argument))
        yield from (
            word for one in choices if isinstance(one, click.Choice) for word in one.choices
        )


def _files(typed: str, endings: tuple[str, ...] | None = None) -> Iterator[str]:
    """Folders, and files with one of these endings (``None``: all), that begin like ``typed``."""
    head, tail = os.path.split(typed)
    try:
        inside = sorted(os.scandir(head or "."), key=lambda one: one.name)
    except OSError:
        return
    for one in inside:
        if one.name.startswith(".") and not tail.startswith("."):
            continue
        path = os.path.join(head, one.name)
        if one.is_dir():
            yield f"{path}/"
        elif endings is None or one.name.endswith(endings):
            yield path
