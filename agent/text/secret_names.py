"""What looks like a secret in a command line or an environment, and what is shown instead. Pure."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence

MASK = "***"
SHORTEST = 4  # characters of a secret that is looked for in other texts
_NO_SECRETS = {"true", "false", "none", "null", "auto", "default"}  # --use-auth=true

_NAME = re.compile(
    r"TOKEN(?!IZER|S(_|$))|KEY|SECRET|PASSW|PASS(_|$)|(^|_)(PWD|PAT|AUTH|DSN)(_|$)|CREDENTIAL|COOKIE"
    r"|WEBH|^_*WEB?$",  # who knows such an address can post there; its option may be abbreviated
    re.IGNORECASE,
)
_IN_URL = re.compile(
    r"(?P<before>://[^/@\s:]*:)(?P<password>[^/@\s]*)@"
    r"|(?P<scheme>https?://)(?P<user>[^/@\s:?#]+)@"  # alone, it is a token
    r"|(?P<query>[?&](?P<name>[\w.~%-]+)=)(?P<value>[^&#\s\"'<>\\]+)"
)
_LONE = 12  # characters; a shorter user of a URL may be a name, which stands in many texts


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name probably holds a secret."""
    return _NAME.search(name.replace("-", "_")) is not None


def has_password(value: str) -> bool:
    """Whether a text contains a URL with a password, or with a token."""
    return _without_passwords(value) != value


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
    found = (each for each in _secrets(words) if len(each) >= SHORTEST)
    return frozenset(each for each in found if each.lower() not in _NO_SECRETS)


def _secrets(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if is_secret_name(name.lstrip("-")):
            if equals:
                yield value
            elif name.startswith("-") and not following.startswith("-"):
                yield following
        for found in _IN_URL.finditer(word):
            if found["password"]:
                yield found["password"]
            elif found["user"] and len(found["user"]) >= _LONE:
                yield found["user"]
            elif found["name"] and is_secret_name(found["name"]):
                yield found["value"]


def masked(text: str, known: frozenset[str]) -> str:
    """A text without those secrets, and without passwords and tokens in URLs."""
    spelled = {form for secret in known for form in _spellings(secret)}
    for secret in sorted(spelled, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _without_passwords(text)


def _spellings(secret: str) -> Iterator[str]:
    """A secret as it may stand in a text: as it is, in JSON, in a list of Python, in a shell."""
    quoted = shlex.quote(secret)
    for inner in (secret, repr(secret)[1:-1], secret if quoted == secret else quoted[1:-1]):
        yield inner
        for is_ascii in (True, False):
            yield json.dumps(inner, ensure_ascii=is_ascii)[1:-1]
    with contextlib.suppress(UnicodeEncodeError):  # an argument that is no text, as a log is read
        yield secret.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _without_passwords(text: str) -> str:
    return _IN_URL.sub(_masked_match, text)


def _masked_match(found: re.Match[str]) -> str:
    if found["name"]:
        return f"{found['query']}{MASK}" if is_secret_name(found["name"]) else found[0]
    return f"{found['before'] or found['scheme']}{MASK}@"
