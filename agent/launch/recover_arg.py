"""Decides which argument tells the script that it resumes: only one that it asks for.

Most parsers refuse an argument that they do not know, and a script that refuses its arguments can
be neither replaced nor restarted. So ``--is_recover=1``, which MindSpore's msrun appends, is
appended only where the script's own sources name it. ``--recover-arg`` overrides in both ways.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agent.launch.warm_imports import MAX_BYTES, RECOVER, entry, look, search_path_of
from agent.spec.job_spec import JobSpec, Program, ProgramKind

ARGUMENT = f"--{RECOVER}=1"


def decided(spec: JobSpec) -> JobSpec:
    """The job with its argument decided, if the user gave none. Reads sources, runs nothing."""
    if spec.dump.recover_arg is not None:
        return spec
    argument = ARGUMENT if _is_asked_for(spec.program) else ""
    return spec._replace(dump=spec.dump._replace(recover_arg=argument))


def _is_asked_for(program: Program) -> bool:
    if program.kind is ProgramKind.PROGRAM:
        return _wrapper_asks(program)
    source = entry(program)
    return source is not None and look(source, search_path_of(program, source)).names_recover


def _wrapper_asks(program: Program) -> bool:
    """Whether the program's text, or the first Python file on its command line, names it."""
    path = shutil.which(program.name)
    if path is not None and _text_names_it(path):
        return True
    script = next((word for word in program.args if word.endswith(".py")), "")
    if not os.path.isfile(script):
        return False
    source = Path(os.path.realpath(script))
    return look(source, source.parent).names_recover


def _text_names_it(path: str) -> bool:
    """Whether a script with a ``#!`` line names it outside of comments."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES)
    except OSError:  # the start will report it
        return False
    if not text.startswith(b"#!"):
        return False
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(b"#"))
    return any(RECOVER.encode() in line for line in lines)
