"""The entry: subcommands, or a job to launch. Wrong usage leaves here with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from agent.spec import UsageError

USAGE_EXIT = 2
SUBCOMMANDS = ("status", "stop", "logs")


def main(argv: Sequence[str]) -> int:
    """Run msrun with these arguments; the exit code."""
    try:
        if argv and argv[0] in SUBCOMMANDS:
            from msrun.commands import run

            return run(argv)
        return _launch(argv)
    except UsageError as error:
        print(f"msrun: error: {error}", file=sys.stderr)
        return USAGE_EXIT
    except BrokenPipeError:  # `msrun --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _launch(argv: Sequence[str]) -> int:
    from msrun.parse import parse

    request = parse(argv, os.environ)
    for warning in request.warnings:
        print(f"msrun: warning: {warning}", file=sys.stderr)
    if request.dry_run:
        from msrun.dry_run import show

        return show(request, os.environ)
    from agent.launch import ignite, prepare

    prepared = prepare(request.job, os.environ)
    if not request.join:
        from msrun.detach import detach

        if not detach(prepared):
            return 0
    ignited = ignite(prepared, os.environ)
    from agent.run import run  # while the forkserver starts
    from msrun.console import CONSOLE

    return run(prepared, ignited, os.environ, CONSOLE)
