"""Reads ``--config job.yaml``: every option by its long name, and ``script`` and ``args``.

Scalars stay text as written (YAML 1.1 would turn ``nnodes: 1:2`` into 62 and ``0.10`` into 0.1), so
they mean what they mean on the command line.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from agent.spec.job_spec import UsageError
from msrun.options.settings import Setting
from msrun.options.table import BY_DEST, OPTIONS

_SCRIPT = {"script": "script", "training_script": "script"}
_ARGS = {"args": "args", "training_script_args": "args"}
_NOT_HERE = frozenset({"config", "help", "version"})
_UNSET = frozenset({"", "~", "null"})
_CSV = frozenset(
    {
        "local_ranks_filter",
        "tail_worker_log",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "signals_to_handle",
        "graceful_signals",
        "on_failure",
        "preload",
    }
)
_MAPS = {"rdzv_conf": "=", "redirects": ":", "tee": ":"}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a YAML file."""

    given: dict[str, Setting]
    script: str | None = None
    script_args: tuple[str, ...] = ()


def read_config(path: str) -> ConfigFile:
    """Read a YAML file.

    Raises:
        UsageError: it cannot be read, is no YAML mapping, or has an unknown key or shape.
    """
    given: dict[str, Setting] = {}
    program: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        dest = str(key).replace("-", "_")
        dest = _SCRIPT.get(dest) or _ARGS.get(dest) or dest
        if dest in given or dest in program:
            raise UsageError(f"{path} says {dest} twice")
        if dest in {"script", "args"}:
            program[dest] = value
        elif isinstance(value, str) and value in _UNSET:
            continue
        else:
            text = _encodable(_text(_checked(dest, path), value, path), str(key), path)
            given[dest] = Setting(text, str(key), path)
    return ConfigFile(given, _script(program, path), _args(program, path))


def read_yaml(option: str, path: str) -> Any:
    """The content of a YAML file, scalars as text. ``option``: that named the file, for the error.

    Raises:
        UsageError: the file cannot be read, or is no YAML.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, Loader=yaml.BaseLoader)  # noqa: S506 - builds text only
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path} is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"{option} {path} is malformed YAML{_position(error)}") from None
    except RecursionError:
        raise UsageError(f"{option} {path} is nested too deeply") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{option} {path} is malformed YAML: {reason}") from None


def _mapping(path: str) -> dict[Any, Any]:
    content = read_yaml("--config", path) or {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must be a mapping of option names to values")
    return content


def _position(error: Any) -> str:
    """Line and column of a YAML error, and what is wrong there."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
    at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{at}: {problem}"


def _checked(dest: str, path: str) -> str:
    """``dest``, if it is an option that a file may set."""
    if dest in _NOT_HERE:
        raise UsageError(f"{path}: {dest} belongs on the command line, not in the file")
    if dest in BY_DEST:
        return dest
    import difflib

    names = [option.dest for option in OPTIONS if option.dest not in _NOT_HERE]
    near = difflib.get_close_matches(dest, [*names, *_SCRIPT, *_ARGS], n=1, cutoff=0)
    raise UsageError(f"{path}: unknown key {dest!r}, the closest known one is {near[0]!r}")


def _text(dest: str, value: Any, path: str) -> str:
    """A value as a user types it on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and dest in _CSV and all(isinstance(item, str) for item in value):
        escaped = (item.replace(",", ",,") for item in value)
        return ",".join(escaped if dest.startswith("duplicate") else value)
    if isinstance(value, dict) and dest in _MAPS:
        return ",".join(f"{key}{_MAPS[dest]}{item}" for key, item in value.items())
    if isinstance(value, dict) and dest == "bind_core":
        return json.dumps(value)
    shape = "list" if isinstance(value, list) else "mapping"
    raise UsageError(f"{path}: {dest} cannot be a {shape}")


def _encodable(text: str, key: str, path: str) -> str:
    """``text``, if it can be an argument or a path: YAML's escapes can spell text that cannot."""
    if "\0" in text:
        raise UsageError(
            f"{path}: {key} contains a NUL character, which no program takes: remove it"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X}"
        raise UsageError(
            f"{path}: {key} contains {character}, which cannot be encoded: remove it"
        ) from None
    return text


def _script(program: dict[str, Any], path: str) -> str | None:
    """The training script."""
    script = program.get("script", "")
    if not isinstance(script, str):
        raise UsageError(f"{path}: script must be one path")
    return None if script in _UNSET else _encodable(script, "script", path)


def _args(program: dict[str, Any], path: str) -> tuple[str, ...]:
    """The script's arguments: a list, or one line that is split as a shell splits it."""
    args = program.get("args", [])
    if isinstance(args, str):
        return _split(_encodable(args, "args", path), path)
    if not isinstance(args, list) or not all(isinstance(item, str) for item in args):
        raise UsageError(f"{path}: args must be a list of words or one line")
    return tuple(_encodable(arg, "args", path) for arg in args)


def _split(line: str, path: str) -> tuple[str, ...]:
    """The words of a line."""
    import shlex

    try:
        return () if line in _UNSET else tuple(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"{path}: args cannot be split into words: {error}") from None
