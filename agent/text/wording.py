"""Exits, signals, ranks and sizes as text, the same in every message. Pure."""

from __future__ import annotations

import signal as signals
from collections.abc import Collection, Iterable
from itertools import islice

from agent.text.ranges import format_ranges

KB = 1000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
LISTED = 8  # ranks named in a sentence
WORDS_CHARS = 300  # of a line of a rank's that decisions and messages quote
ONE_NODE_ONLY = (
    "--protect-memory=live keeps the memory of killed ranks on one node only: on several it is "
    "copied, as with --protect-memory=copy"
)
NOT_KEPT = "the memory of rank {} is lost if it is killed (--protect-memory=live): {}"


def known_signal(signum: int | None) -> str | None:
    """``SIGTERM``; ``None`` for no signal, and for a real-time signal, which has no name."""
    try:
        return None if signum is None else signals.Signals(signum).name
    except ValueError:
        return None


def signal_name(signum: int) -> str:
    """``SIGTERM``, or ``signal 40`` for one without a name."""
    return known_signal(signum) or f"signal {signum}"


def other_world(saved: int, now: int) -> str:
    """The sentence for a resume with another number of ranks."""
    return (
        f"{saved} ranks saved it, now there are {now}: training continues, but not bit for bit "
        "as it would have"
    )


def listed(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 0, 2``; a long list is cut."""
    more = ", ..." if len(ranks) > LISTED else ""
    words = ", ".join(str(rank) for rank in islice(ranks, LISTED)) + more
    return f"rank{'s' if len(ranks) != 1 else ''} {words}"


def ranged(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2,5``: all of them."""
    numbers = format_ranges(ranks)
    return f"rank{'' if numbers.isdecimal() else 's'} {numbers}"


def times(count: int) -> str:
    """``three times``."""
    words = {1: "once", 2: "twice", 3: "three times"}
    return words.get(count, f"{count} times")


def described(facts: Iterable[tuple[int, str]]) -> str:
    """Ranks with a fact about each, equal facts together: ``ranks 0, 2 ended; rank 1 is torn``.

    ``facts`` are verbs; each fits one rank as well as several.
    """
    alike: dict[str, list[int]] = {}
    for rank, fact in facts:
        alike.setdefault(fact, []).append(rank)
    return "; ".join(f"{listed(ranks)} {fact}" for fact, ranks in alike.items())


def describe_exit(exit_code: int, own_end: str = "") -> str:
    """An exit code as text: ``was killed by SIGKILL``, ``exited with code 3``.

    ``own_end``: why a process killed itself; empty: it did not.
    """
    if exit_code < 0 and own_end:
        return f"ended itself: {own_end}"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"exited with code {exit_code}"


def sized(nbytes: float) -> str:
    """``417 bytes``, ``10.4 MB``, ``37.1 GB``."""
    if nbytes < KB:
        return f"{nbytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        nbytes /= KB
        if nbytes < KB:
            return f"{nbytes:.3g} {unit}"
    return f"{nbytes / KB:.3g} TB"


def worker_named(name: str) -> str:
    """A worker that was started by hand, as text: its name may be a bare number."""
    return f"worker {name}" if name.isdecimal() else name


def duration(seconds: float) -> str:
    """``7 s``, ``2 min 7 s``, ``3 h 02 min``, ``4 d 3 h``."""
    whole = max(0, int(seconds))
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"
