"""``msrun`` and ``python -m msrun``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] != root:
        # `python -m msrun` puts the working folder first; a user's own `agent` package may be there
        sys.path.insert(0, root)
    from msrun.cli import main as run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
