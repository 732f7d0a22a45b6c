"""``msrun`` and ``python -m msrun``."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Run the command line and exit with its exit code."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] != root:
        # `python -m msrun` puts the working folder first, which may hold a user's own `agent`
        sys.path.insert(0, root)
    from msrun.cli import main as run

    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads
            stream.flush()
    os._exit(code)  # everything is closed: the interpreter's own shutdown would take 25 ms


if __name__ == "__main__":
    main()
