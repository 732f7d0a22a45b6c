"""The page ``docs/reference/command-line.md``: every option of ``msrun`` and of its subcommands."""

from __future__ import annotations

from collections.abc import Iterator

import click
from markdown_tables import alternatives, code, note, table, with_code

from msrun.commands import commands
from msrun.options.program import SUBCOMMANDS
from msrun.options.table import OPTIONS, Kind, Option, Section

_FOREWORD = """\
# Command line

Every option of `msrun`, with its default, and every subcommand. `msrun --help-all` and
`msrun COMMAND --help` print the same in a terminal.

    msrun [options] script.py [script arguments]
    msrun status|top|stop|logs [RUN]
    msrun drill [faults] -- [options] script.py [script arguments]
    msrun checkpoints list|show|verify|prune|merge FOLDER
    msrun doctor [FOLDER]
    msrun bugreport [RUN]
    msrun completion bash|zsh|fish

## How options are read

- A value is taken from the first of these places that names it: the command line, the environment,
  the YAML file of `--config`, the default.
- Every option may be written with dashes or underscores (`--max-restarts`, `--max_restarts`), and
  may be shortened while it stays unique. If a shortened name could mean several options, torchrun's
  option wins.
- Options end at the script. What follows the script belongs to the script.
- In the environment an option is `PET_` and its name in capitals: `PET_MAX_RESTARTS=3`. Options
  without such a variable: {without}.
- In the YAML file an option is its name with underscores: `max_restarts: 3`; `script` and `args`
  name the script and its arguments.
- Booleans are `True` and `False`, also `1`/`0`, `yes`/`no`, `on`/`off`.
- The last column says whose option it is. torchrun's options mean what they mean there, but for
  the differences in [Coming from torchrun](../user-guide/coming-from-torchrun.md); MindSpore's are
  explained in [Coming from MindSpore](../user-guide/coming-from-mindspore.md).
"""


def page() -> str:
    """The whole page."""
    without = ", ".join(code(option.long) for option in OPTIONS if not option.has_env)
    lines = [note("msrun/options/table.py and msrun/commands.py"), ""]
    lines += _FOREWORD.format(without=without).splitlines()
    for section in Section:
        lines += ["", f"## {section.value}", ""]
        listed = (option for option in OPTIONS if option.section is section)
        lines += table(("option", "value", "default", "what it does", "from"), map(_row, listed))
    lines += ["", "## Subcommands", ""]
    lines += ["`RUN` is a run's id or the beginning of one; `msrun status --all` lists them."]
    msrun = click.Context(commands, info_name="msrun")
    for name in SUBCOMMANDS:
        lines += _command(commands.commands[name], msrun)
    return "\n".join(lines) + "\n"


def _row(option: Option) -> tuple[str, ...]:
    spellings = ", ".join(code(each) for each in (option.short, option.long) if each)
    value = alternatives("|".join(option.choices) or option.metavar)
    if option.kind is Kind.MAYBE:
        value += " or none"
    default = with_code(option.unset) if option.unset else code(option.default) or "none"
    return spellings, value, default, with_code(option.help), option.origin.value


def _command(command: click.Command, above: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=command.name, parent=above)
    words = [
        each.make_metavar(context) for each in command.params if isinstance(each, click.Argument)
    ]
    if isinstance(command, click.Group):
        words = [command.subcommand_metavar or ""]
    yield from ("", f"### {context.command_path}", "")
    yield f"    {' '.join((context.command_path, '[options]', *words))}"
    for paragraph in (command.help or "").split("\n\n"):
        yield from ("", with_code(" ".join(paragraph.split())))
    options = [each for each in command.params if isinstance(each, click.Option)]
    yield from ("",) if options else ()
    # a list, for a bar in a table reads differently in every Markdown
    yield from (f"- {_spelled(each)}: {with_code(each.help or '')}" for each in options)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from _command(below, context)


def _spelled(option: click.Option) -> str:
    *others, last = option.opts
    value = "" if option.is_flag else f" {option.metavar or 'N'}"
    return ", ".join(map(code, (*others, f"{last}{value}")))
