"""The texts of ``msrun --help``, which fits a terminal, and of ``msrun --help-all``.

The options come from their table. No line needs more columns than a terminal has.
"""

from __future__ import annotations

from collections.abc import Iterator

from msrun.options.program import SUBCOMMANDS
from msrun.options.table import BY_DEST, OPTIONS, Kind, Option, Section

USAGE = "usage: msrun [options] script.py [script arguments]"
_COLUMN = 30
_EXAMPLES = (
    ("msrun --worker-num=8 train.py", "start 8 workers, and replace those that die"),
    ("msrun --worker-num=8 -m pkg.train", "the same as python -m"),
    ("msrun --resume", "continue the newest run of this folder"),
    ("msrun status", "what it does; also: msrun top, msrun logs -f"),
    ("msrun stop", "finish one step, save it and exit"),
)
_USUAL = {
    "worker_num": "workers, as torchrun's --nproc-per-node",
    "max_restarts": "how often all ranks may restart; default 0",
    "resume": "continue from the newest complete checkpoint",
    "strict": "refuse a script whose state cannot be restored",
    "grace": "time to finish and save a step when stopped",
    "log_dir": "folder of the logs",
    "config": "YAML file with options, script and arguments",
    "dry_run": "print what would be started, start nothing",
    "verbose": "print the time-outs that msrun derives",
    "version": "print the versions of msrun, torch and Python",
}
_FOREWORD = """\
Start, watch and restart the workers of a training script.
"""
_AFTERWORD = """\
Every option may be spelled with dashes or underscores, and abbreviated as long as it is
unique. Options end at the script: what follows belongs to the script.
Precedence: defaults < --config file < environment (PET_ and the option's name, such as
PET_MAX_RESTARTS=3) < command line.
"""


def short_help() -> str:
    """What a terminal of 80 columns and 30 lines shows at once."""
    width = max(len(line) for line, _ in _EXAMPLES) + 2
    return "\n".join(
        (
            USAGE,
            *(f"{line.ljust(width)}{meaning}" for line, meaning in _EXAMPLES),
            "",
            *(f"msrun {name.ljust(13)}{meaning}" for name, meaning in SUBCOMMANDS.items()),
            "",
            *(_left(BY_DEST[dest]).ljust(_COLUMN) + said for dest, said in _USUAL.items()),
            "msrun --help-all lists all options, msrun COMMAND --help those of a command.\n",
        )
    )


def help_text(width: int = 100) -> str:
    """Every command and option, in sections, in lines of at most ``width`` columns."""
    parts = [USAGE, "", _FOREWORD, "Commands (msrun COMMAND --help lists their options):"]
    parts += [f"  {name.ljust(_COLUMN - 2)}{said}" for name, said in SUBCOMMANDS.items()]
    parts.append("")
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
    left = _left(option)
    lines = _wrapped(sentence, width - _COLUMN)
    if len(left) < _COLUMN:
        yield left.ljust(_COLUMN) + next(lines)
    else:
        yield left
    for line in lines:
        yield " " * _COLUMN + line


def _left(option: Option) -> str:
    """Its spellings and the form of its value."""
    short = f"{option.short}, " if option.short else ""
    joint = "" if option.metavar.startswith("[=") else " "
    return f"  {short}{option.long}{joint}{option.metavar}".rstrip()


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
