"""What is said of variables that begin anew when the training function is entered again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker_hooks.script.source import Named

PAIRED = (
    "{}() around state.batches() begins anew after a replacement or a restart amid an epoch; "
    "number batches by enumerate() or state.batch, and stop at state.batch"
)
COUNTS_ANEW = "enumerate() around state.batches() counts from 0 at batch %d: use state.batch"

MOST = 6  # variables in one sentence


def sentences(named: Sequence[Named]) -> Iterator[tuple[str, bool]]:
    """Sentences for people, and whether weights may depend on it: then ``--strict`` refuses.

    ``named``: variables that the training loop carries and nothing keeps.
    """
    printed = [each for each in named if each.is_only_printed]
    if printed:
        yield f"{_listed(printed)}: after a replacement or resume printed values may differ", False
    steering = [each for each in named if not each.is_only_printed]
    for some in ([e for e in steering if not e.kind], [e for e in steering if e.kind]):
        if some:
            yield _sentence(some), True


def _sentence(named: list[Named]) -> str:
    verb, they, them = ("begin", "they", "them") if len(named) > 1 else ("begins", "it", "it")
    own = ", ".join(f"state.own.{name}" for name in dict.fromkeys(e.name for e in named[:MOST]))
    what = (
        f"make {them} in the step, as {they} cannot be kept"
        if named[0].kind
        else f"keep {them} as {own}"
    )
    return f"{_listed(named)} {verb} anew after a replacement or resume: {what}"


def _listed(named: list[Named]) -> str:
    """``train.py:41 `best`, `last```: the place is said where it changes."""
    words, place = [], ""
    for each in named[:MOST]:
        kind = f" ({each.kind})" if each.kind else ""
        word = f"`{each.name}`{kind}"
        words.append(word if each.place == place else f"{each.place} {word}")
        place = each.place
    more = len(named) - MOST
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
