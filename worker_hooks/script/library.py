"""Which source files are libraries', and which are the script's own."""

from __future__ import annotations

import os
import site
import sysconfig
from functools import cache
from pathlib import Path

_FOLDERS = ("site-packages", "dist-packages")


@cache
def is_library(file: str) -> bool:
    """Whether a source file belongs to Python, to an installed package or to us."""
    paths = sysconfig.get_paths()
    own = Path(__file__).parents[1]
    roots = [own, site.getusersitepackages()]
    roots += [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    is_within = file.startswith(("<frozen", *(f"{root}{os.sep}" for root in roots)))
    return is_within or any(f"{os.sep}{each}{os.sep}" in file for each in _FOLDERS)
