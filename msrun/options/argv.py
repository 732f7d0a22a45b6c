"""Reads a command line by the rules of torchrun's argparse, into settings and a script.

Not argparse itself: up to Python 3.11 that refuses ``--nproc 2`` because both spellings of the one
option match, it reads the *script's* arguments too (``torchrun train.py --log x`` is "ambiguous"),
its rules for ``--`` change with the Python version, and it knows no torchrun-first
abbreviations. ``tests/torch/test_parser_parity.py`` holds the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from msrun.options.settings import Setting
from msrun.options.table import BY_DEST, OPTIONS, SPELLINGS, Kind, Option, OptionOrigin

PRINTED = frozenset({"help", "help-all", "version"})
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class CommandLine(NamedTuple):
    """A command line as read: options by dest, the script and its arguments."""

    given: Mapping[str, Setting]
    script: str | None
    script_args: tuple[str, ...]
    print_only: str | None = None  # one of PRINTED: print that and do nothing else


def scan(
    argv: Sequence[str], takes: Callable[[Sequence[str]], bool] = lambda _: False
) -> CommandLine:
    """Read ``argv`` (without the program's name). Of a repeated option the last one counts.

    ``takes``: given the words after ``--resume``, whether the first of them is its value.

    Raises:
        UsageError: an option is unknown or ambiguous, lacks its value, or takes none.
    """
    given: dict[str, Setting] = {}
    rest = list(argv)
    while rest and rest[0] != "--" and _is_option(rest[0]):
        option, spelling, value = _match(rest.pop(0))
        if option.kind is Kind.MAYBE and value is None:
            follows = bool(rest) and not _is_option(rest[0]) and rest[0] != "--"
            takes_it = follows and option.dest == "resume" and takes(rest)
            given[option.dest] = Setting(
                rest.pop(0) if takes_it else "", spelling, flag=not takes_it
            )
            continue
        if option.kind is not Kind.FLAG:
            given[option.dest] = Setting(_value(spelling, value, rest), spelling)
            continue
        if option.name in PRINTED:
            return CommandLine(given, None, (), option.name)
        if value is not None:  # -mr3 is -m -r3
            rest.insert(0, _after_flag(spelling, value))
        given[option.dest] = Setting("1", spelling, flag=True)
    script, script_args = _positional(rest)
    return CommandLine(given, script, script_args)


def command_words(line: CommandLine) -> tuple[str, ...]:
    """The words after ``msrun`` that :func:`scan` reads as this line."""
    options = [
        setting.name if BY_DEST[dest].kind is Kind.FLAG else f"{setting.name}={setting.text}"
        for dest, setting in line.given.items()
    ]
    if line.script is None:
        return tuple(options)
    is_ambiguous = line.script.startswith("-") or line.script_args[:1] == ("--",)
    return (*options, *(("--",) if is_ambiguous else ()), line.script, *line.script_args)


def _positional(rest: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The script and its arguments; a ``--`` directly before or after the script is dropped."""
    if "--" in rest[:2]:
        rest.remove("--")
    return (rest[0] if rest else None), tuple(rest[1:])


def _is_option(token: str) -> bool:
    """Whether argparse would read ``token`` as an option, known or not."""
    if len(token) <= 1 or token[0] != "-":
        return False
    if _candidates(token):
        return True
    return not _NEGATIVE_NUMBER.fullmatch(token) and " " not in token


def _candidates(token: str) -> list[Option]:
    """The options ``token`` may mean: by exact spelling, else by short one, else by prefix."""
    name = token.partition("=")[0]
    if name in SPELLINGS:
        return [SPELLINGS[name]]
    if not token.startswith("--"):
        return [SPELLINGS[token[:2]]] if token[:2] in SPELLINGS else []
    matching = [
        option
        for option in OPTIONS
        if any(spelling.startswith(name) for spelling in option.spellings)
    ]
    torchrun = [option for option in matching if option.origin is OptionOrigin.TORCHRUN]
    return torchrun or matching


def _match(token: str) -> tuple[Option, str, str | None]:
    """The option that ``token`` names, its full spelling, and the attached value, if any."""
    name, equals, attached = token.partition("=")
    match _candidates(token):
        case [option]:
            pass
        case []:
            raise UsageError(
                f"unrecognized option {name}{_closest(name)}: msrun --help-all lists all"
            )
        case several:
            names = ", ".join(option.long for option in several)
            raise UsageError(f"ambiguous option {name}: it could match {names}")
    if name not in SPELLINGS and not token.startswith("--"):
        return option, token[:2], token[2:]
    spelling = name if name in SPELLINGS else option.long
    return option, spelling, attached if equals else None


def _closest(name: str) -> str:
    """A hint at the option that the user probably meant."""
    import difflib

    near = difflib.get_close_matches(name.replace("_", "-"), list(SPELLINGS), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _value(spelling: str, attached: str | None, rest: list[str]) -> str:
    """The value of an option: the attached one, else the next word, which leaves ``rest``."""
    if attached is not None:
        return attached
    if not rest or rest[0] == "--" or _is_option(rest[0]):
        raise UsageError(f"{spelling} needs a value, and none follows it")
    return rest.pop(0)


def _after_flag(spelling: str, attached: str) -> str:
    """The rest of a cluster of short options after its first flag, as a word of its own."""
    if spelling.startswith("--") or f"-{attached[:1]}" not in SPELLINGS:
        raise UsageError(f"{spelling} takes no value, but {attached!r} was given to it")
    return f"-{attached}"
