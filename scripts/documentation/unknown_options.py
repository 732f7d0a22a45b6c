"""Finds options that a page names and msrun does not have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import click
from markdown_pages import Page

from agent.spec.job_spec import UsageError
from msrun.commands import commands
from msrun.options.argv import scan
from msrun.options.table import SPELLINGS

_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*(?![\w*-])")
_COMMANDS = {"msrun", "torchrun"}
OF_SCRIPTS = {"--lr", "--epochs"}
"""Options of training scripts that pages show without their command line."""


def problems(page: Page) -> Iterator[str]:
    """One sentence for each unknown option: in command lines of msrun, and in literals."""
    for line in page.shell:
        yield from _of_line(line)
    for span in page.spans:
        if span.startswith("-"):
            yield from _unknown(span, {*SPELLINGS} | _below(commands) | OF_SCRIPTS)
        else:
            yield from _of_line(span)


def _of_line(line: str) -> Iterator[str]:
    """Of ``$ PET_ROLE=x srun msrun --worker-num=8 train.py``, what follows the command."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation mark in a sentence
        words = line.split()
    at = next((at for at, word in enumerate(words) if word in _COMMANDS), None)
    if at is not None:
        yield from _of_command(words[at + 1 :])


def _of_command(words: list[str]) -> Iterator[str]:
    if words and words[0] in commands.commands:
        yield from _of_subcommand(words)
        return
    try:
        scan(words, lambda following: not following[0].endswith(".py"))
    except UsageError as error:
        yield f"`msrun {' '.join(words)}`: {error}"


def _of_subcommand(words: list[str]) -> Iterator[str]:
    own, job = words, list[str]()
    if "--" in words:
        own, job = words[: words.index("--")], words[words.index("--") + 1 :]
    command: click.Command = commands.commands[words[0]]
    known = _options(command)
    if isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
        known |= _options(command.commands[words[1]])
    elif isinstance(command, click.Group):  # `msrun checkpoints FOLDER --json`
        known |= _below(command)
    yield from _unknown(" ".join(own), known | {"--help"})
    yield from _of_command(job)


def _unknown(text: str, known: AbstractSet[str]) -> Iterator[str]:
    yield from (
        f"`{text}`: no such option: {each}" for each in _OPTION.findall(text) if each not in known
    )


def _options(command: click.Command) -> set[str]:
    return {each for option in command.params for each in (*option.opts, *option.secondary_opts)}


def _below(command: click.Command) -> set[str]:
    found = _options(command)
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        found |= _below(below)
    return found
