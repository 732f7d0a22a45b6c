"""What is said of variables that begin anew when the training function is entered again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from worker_hooks.contract.fingerprint import ANEW
from worker_hooks.script.source import Named

HARMLESS = "that is harmless if each step sets it before it reads it: then say state.ignore('{0}')"
PAIRED = (
    "{}() around state.batches() begins anew after a replacement or a restart amid an epoch; "
    "number batches by enumerate() or state.batch, and stop at state.batch"
)
COUNTS_ANEW = "enumerate() around state.batches() counts from 0 at batch %d: use state.batch"

BEHIND = (
    "no rank came to the end of step %d: what it did to these variables behind its update is "
    "lost: %s"
)
OF_A_PEER = "rank %d had died within its step: these variables are those of another rank: %s"
LACKING = (
    "rank %d had died within its step: these variables lack what the step did to them behind its "
    "backward: %s"
)
OTHER_SIZE = (
    "the loader makes batches of {}, and made batches of {} before: keep what its size depends on "
    "in state.own, which is there again before the loader is made"
)
RESHAPED = (
    "{} changed parameters, layers or groups after TrainState(): no rank is replaced alone from "
    "now on, and a restarted script is refused if it does not change them again before its loop"
)
RESHAPED_WHY = "changes the parameters, layers or groups that TrainState() was given"
LACKS_CHANGE = (
    "%s differs between ranks, and this rank died between its update and its commit: the value is "
    "that of the step's last backward; change it before backward"
)
DATA_CHANGES = (
    "`{}` changes as data are read, and begins anew after a replacement or resume: compute it from "
    "the epoch or from state.step"
)
WORKERS_RETURN = (
    "a loader keeps its workers while another one has its turn: these begin anew after a "
    "replacement or resume in that turn, and draw other random numbers, if they draw any; leave "
    "persistent_workers out, or say state.ignore('persistent_workers')"
)
ITERATES = (
    "`{0}` is an iterator, and begins anew after a replacement or resume: count in a number, which "
    f"comes back, and make the iterator from that; {HARMLESS}"
)
GROWS = (
    "`{0}` gets or loses objects while training, and begins anew after a replacement or resume: "
    "make all of its objects before run, or keep what they hold in state.own; "
    f"{HARMLESS}"
)
TOO_LARGE = (
    "%s changes while training and is larger than %d KiB, or has more than %d tensors: it begins "
    "anew after a replacement or resume; give it to TrainState(...) as a tensor or with "
    "state_dict and load_state_dict; %s"
)
DISTRIBUTED = (
    "%s changes while training and is, or holds, a DTensor, of which nothing is kept: it begins "
    "anew after a replacement or resume; give it to TrainState(...), or keep its full_tensor() or "
    "a number; %s"
)

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


def texts_of_anew(sentence: str) -> dict[str, str]:
    """What a sentence on what begins anew is about, as msrun is told it."""
    names = [f"`{each}`" for each in re.findall("`([^`]+)`", sentence)]
    return {f"{ANEW}{each}": "" for each in names or ["what is said above"]}


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
