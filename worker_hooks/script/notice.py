"""What is said of local variables before training begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from worker_hooks.script.source import Named

MOST = 6  # variables in one sentence


def sentences(named: Iterable[Named], *, is_strict: bool) -> Iterator[tuple[str, bool]]:
    """Sentences for people, and whether the script is refused for it.

    Args:
        named: local variables that the training loop carries.
        is_strict: refuse a script whose training such a variable may change.
    """
    named = list(named)
    steering = [each for each in named if not each.is_only_printed]
    printed = [each for each in named if each.is_only_printed]
    if printed:
        yield f"{_listed(printed)}: after a replacement or resume printed values may differ", False
    if not steering:
        return
    many = len(steering) > 1
    verb, them = ("begin", "them") if many else ("begins", "it")
    own = ", ".join(f"state.own.{name}" for name in dict.fromkeys(e.name for e in steering[:MOST]))
    text = f"{_listed(steering)} {verb} anew after a replacement or resume: keep {them} as {own}"
    if is_strict:
        text += f" (or state.ignore({steering[0].name!r})): refused, because of --strict"
    yield text, is_strict


def _listed(named: list[Named]) -> str:
    """``train.py:41 `best`, `last```: the place is said where it changes."""
    words, place = [], ""
    for each in named[:MOST]:
        words.append(f"`{each.name}`" if each.place == place else f"{each.place} `{each.name}`")
        place = each.place
    more = len(named) - MOST
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
