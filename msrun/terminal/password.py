"""Asks for a password, at a terminal, without showing it."""

from __future__ import annotations

import getpass
from pathlib import Path

from agent.spec.job_spec import UsageError
from agent.text.sanitize import sanitized


def asked(variable: str, path: Path) -> str:
    """What a person types for ``path``.

    Raises:
        UsageError: nobody answers. It names ``variable``, which could hold the password.
    """
    try:
        return getpass.getpass(f"msrun: password of {sanitized(str(path))} ({variable}): ")
    except EOFError:
        raise UsageError(f"no password of {path}: give {variable}") from None
