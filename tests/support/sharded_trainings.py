"""Trainings whose weights are cut over four ranks, and what they end with when nothing disturbs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from support.jobs import WORKERS
from support.warm_python import WarmPython

SCRIPT = WORKERS / "train_sharded.py"

Undisturbed = Callable[[str], str]
"""The digest of a training of this style."""


def undisturbed_digests(folder: Path, warm_python: WarmPython, steps: int) -> Undisturbed:
    """Of trainings that nobody guards; each runs once."""

    @functools.cache
    def digest(style: str) -> str:
        where = folder / f"{style}-undisturbed"
        warm_python.train(where, 4, SCRIPT, style, steps)
        return (where / f"{style}.sha").read_text()

    return digest
