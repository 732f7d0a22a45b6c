"""Which variables of a launch its record keeps, so that a resume from another shell finds them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SESSION = frozenset(
    (
        *("PWD", "OLDPWD", "SHLVL", "_", "SHELL", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "MAIL"),
        *("COLUMNS", "LINES", "LS_COLORS", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID"),
        *("STY", "WINDOW", "INVOCATION_ID", "JOURNAL_STREAM", "XDG_RUNTIME_DIR"),
        "TORCHELASTIC_ERROR_FILE",  # of an outer launcher
    )
)
_SESSION_STARTS = (
    *("TERM", "SSH_", "XDG_SESSION", "XDG_SEAT", "XDG_VTNR", "DBUS", "TMUX", "VTE_", "GPG_"),
    *("BASH_FUNC_", "MSRUN_", "SLURM_"),  # an outer run or an allocation is over by then
)
_SECRET = re.compile(
    r"TOKEN(?!IZER|S(_|$))|KEY|SECRET|PASSW|PASS(_|$)|(^|_)(PWD|PAT|AUTH|DSN)(_|$)|CREDENTIAL|COOKIE",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def remembered(environ: Mapping[str, str]) -> dict[str, str]:
    """All but what belongs to a terminal's session, and what looks like a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _SESSION
        and not name.startswith(_SESSION_STARTS)
        and not _SECRET.search(name)
        and not _PASSWORD_IN_URL.search(value)
    }
