"""What every rank runs: the script and its kind, checked before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from agent.spec.job_spec import Program, ProgramKind, UsageError
from msrun.options.settings import Settings
from worker_hooks.contract import env

SUBCOMMANDS = ("status", "top", "stop", "logs", "report", "drill", "checkpoints", "help")
"""First words that name no script."""

_PROGRAMS = frozenset({"python", "python3", "pytest"})
"""MindSpore's msrun runs these directly: ``msrun --worker_num=8 python train.py``."""


def build_program(
    settings: Settings, script: str, args: tuple[str, ...], environ: Mapping[str, str]
) -> Program:
    """The checked program.

    Raises:
        UsageError: the script does not exist, or cannot run.
    """
    kind = _kind(settings, script)
    # ${local_rank} in the name is filled in per rank, so there is no file to check yet.
    if "local_rank" not in script:
        _check(script, kind, environ)
    interpreter = environ.get(env.PYTHON_EXEC) or sys.executable
    return Program(name=script, args=args, kind=kind, interpreter=interpreter)


def _kind(settings: Settings, script: str) -> ProgramKind:
    """How to run the script, in torchrun's order: --run-path, --no-python, -m, script."""
    module, direct = settings.boolean("module"), settings.boolean("no_python")
    if settings.boolean("run_path"):
        return ProgramKind.RUN_PATH
    if module and direct:
        raise UsageError("--module and --no-python exclude each other: a module needs python")
    if module:
        return ProgramKind.MODULE
    if direct or (script in _PROGRAMS and not os.path.exists(script)):
        return ProgramKind.PROGRAM
    return ProgramKind.SCRIPT


def _check(name: str, kind: ProgramKind, environ: Mapping[str, str]) -> None:
    """Refuse what cannot run. Only importing finds a module, and that is the worker's task."""
    match kind:
        case ProgramKind.MODULE:
            if not name:
                raise UsageError("--module needs the name of a module")
        case ProgramKind.PROGRAM:
            _check_program(name, environ)
        case ProgramKind.SCRIPT | ProgramKind.RUN_PATH:
            _check_script(name)


def _check_script(name: str) -> None:
    """A file python can read, or a folder with a ``__main__.py``."""
    if not os.path.exists(name):
        import difflib  # slow to import, rarely needed

        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        meant = f" (did you mean msrun {near[0]}?)" if near else ""
        raise UsageError(
            f"there is no script {name!r}{meant}: give its path, or -m and a module's name"
        )
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        raise UsageError(f"{name!r} is a directory without __main__.py: give the script inside it")
    if not os.access(name, os.R_OK):
        raise UsageError(f"the script {name!r} is not readable: check its permissions")


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    """A file with exec permission, looked up on PATH if it has no slash, as exec does."""
    if "/" in name:
        found = [name]
    else:
        folders = environ.get("PATH", os.defpath).split(os.pathsep)
        found = [os.path.join(folder or ".", name) for folder in folders]
    files = [path for path in found if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in files):
        return
    if files:
        raise UsageError(f"{files[0]} has no exec permission: chmod +x it, or remove --no-python")
    if "/" in name and os.path.isdir(name):
        raise UsageError(f"{name!r} is a directory: --no-python needs an executable file")
    where = "there is no program" if "/" in name else "PATH has no program"
    hint = (
        f"; write ./{name} for the file in this folder"
        if name and "/" not in name and os.path.exists(name)
        else ""
    )
    raise UsageError(f"{where} {name!r}{hint}")
