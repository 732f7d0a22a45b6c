"""The text of ``msrun --help``, made from the table of options."""

from __future__ import annotations

from collections.abc import Iterator

from msrun.options.table import OPTIONS, Kind, Option, Section

USAGE = "usage: msrun [options] script.py [script arguments]"
_COLUMN = 30
_FOREWORD = """\
Start, watch and restart the workers of a training script.

Also: msrun status [RUN], msrun top [RUN], msrun stop [RUN], msrun logs [RUN] [-f] [--rank R],
msrun report [RUN], msrun drill, msrun checkpoints FOLDER. msrun --resume resumes the newest run
of this folder from its newest checkpoint.
"""
_AFTERWORD = """\
Every option may be spelled with dashes or underscores, and abbreviated as long as it is
unique. Options end at the script: what follows belongs to the script.
Precedence: defaults < --config file < environment (PET_ and the option's name, such as
PET_MAX_RESTARTS=3) < command line.
"""


def help_text(width: int = 100) -> str:
    """The help text, in sections, no line longer than ``width`` columns."""
    parts = [USAGE, "", _FOREWORD]
    for section in Section:
        parts.append(f"{section.value}:")
        for option in OPTIONS:
            if option.section is section:
                parts.extend(_entry(option, width))
        parts.append("")
    parts.append(_AFTERWORD)
    return "\n".join(parts)


def _entry(option: Option, width: int) -> Iterator[str]:
    """One option: its spelling in the left column, its sentence and default in the right one."""
    sentence = option.help
    if option.kind is not Kind.FLAG:
        sentence += f" Default: {option.shown_default}."
    short = f"{option.short}, " if option.short else ""
    joint = "" if option.metavar.startswith("[=") else " "
    left = f"  {short}{option.long}{joint}{option.metavar}".rstrip()
    lines = _wrapped(sentence, width - _COLUMN)
    if len(left) < _COLUMN:
        yield left.ljust(_COLUMN) + next(lines)
    else:
        yield left
    for line in lines:
        yield " " * _COLUMN + line


def _wrapped(sentence: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns (importing ``textwrap`` costs 5 ms)."""
    line = ""
    for word in sentence.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line
