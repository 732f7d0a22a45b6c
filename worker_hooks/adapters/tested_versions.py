"""The versions of frameworks whose inner workings the adapters know."""

from __future__ import annotations

import re

TESTED = {
    "accelerate": ((1, 15), (1, 15)),
    "transformers": ((5, 23), (5, 24)),
    "lightning": ((2, 6), (2, 6)),
}
"""The first and the last tested minor version."""


def check_version(package: str, version: str) -> None:
    """Refuse a version that was not tested: another one may keep its state elsewhere.

    ``package``: a key of ``TESTED``.

    Raises:
        ImportError: it is not known to be protected.
    """
    first, last = TESTED[package]
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not first <= found <= last:
        low, high = (".".join(map(str, each)) for each in (first, last))
        names = low if low == high else f"{low} to {high}"
        raise ImportError(
            f"msrun protects trainings with {package} {names}, and {version} is installed: another "
            f"version may keep its state elsewhere; pip install '{package}=={high}.*'"
        )
