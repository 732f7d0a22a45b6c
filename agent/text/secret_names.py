"""What looks like a secret in a command line or an environment, and what is shown instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MASK = "***"
SHORTEST = 4  # characters of a secret that is looked for in other texts

_NAME = re.compile(
    r"TOKEN(?!IZER|S(_|$))|KEY|SECRET|PASSW|PASS(_|$)|(^|_)(PWD|PAT|AUTH|DSN)(_|$)|CREDENTIAL|COOKIE",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(://[^/@\s:]*:)([^/@\s]*)@")


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name probably holds a secret."""
    return _NAME.search(name.replace("-", "_")) is not None


def has_password(value: str) -> bool:
    """Whether a text contains a URL with a password."""
    return _IN_URL.search(value) is not None


def without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A command line for others to read."""
    found: list[str] = []
    is_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_secret and not word.startswith("-"):
            found.append(MASK)
        elif equals and is_secret_name(name):
            found.append(f"{name}={MASK}")
        else:
            found.append(masked(word, frozenset()))
        is_secret = word.startswith("-") and not equals and is_secret_name(word)
    return tuple(found)


def secrets(words: Sequence[str]) -> frozenset[str]:
    """The values in a command line that are probably secrets."""
    return frozenset(each for each in _secrets(words) if len(each) >= SHORTEST)


def _secrets(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if is_secret_name(name.lstrip("-")):
            if equals:
                yield value
            elif name.startswith("-") and not following.startswith("-"):
                yield following
        yield from (found[2] for found in _IN_URL.finditer(word))


def masked(text: str, known: frozenset[str]) -> str:
    """A text without those secrets, and without passwords in URLs."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _IN_URL.sub(rf"\g<1>{MASK}@", text)
