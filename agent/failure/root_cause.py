"""Finds which of many failures was the first cause. Pure: evidence in, a root and the reason out.

A rank that dies makes its peers fail: their collectives raise, sometimes before the dead rank has
exited. So time alone does not show the cause. A *consequence* is a failure whose own message says
that a peer was lost; it is the root only if nothing else failed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL

from agent.failure.evidence import Evidence
from agent.failure.log_excerpt import find_traceback
from worker_hooks.contract.peer_lost import says_peer_lost

STOPPED_WORDS = re.compile(r"(?:\w+\.)*(?:KeyboardInterrupt|SystemExit|SignalException)\b")
WINDOW_S = 1.0
"""Error files hold full seconds: if times differ by less, the order of detection decides."""
CREDIBLE_S = 3600.0
"""How long a teardown may hang between the exception and the process's end."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The first cause of an attempt's end, and what happened to the other ranks."""

    root: Evidence
    reason: str  # why this one, as text
    consequences: tuple[Evidence, ...] = ()  # failed because they lost a peer
    others: tuple[Evidence, ...] = ()  # failed, too, for reasons of their own
    stopped: tuple[int, ...] = ()  # ranks that msrun stopped

    @property
    def repeats(self) -> tuple[Evidence, ...]:
        """Those of the others that raised what the root raised."""
        root = self.root
        return tuple(
            each
            for each in self.others
            if root.message is not None and each.message == root.message
        )

    @property
    def failures(self) -> tuple[Evidence, ...]:
        """All ranks that failed by themselves, in order of detection, the root among them."""
        found = (self.root, *self.consequences, *self.others)
        return tuple(sorted(found, key=lambda evidence: evidence.end.order))


def find_cause(evidence: Sequence[Evidence]) -> Cause | None:
    """The root among the ends of one attempt; ``None`` when no rank failed by itself."""
    failed = [each for each in evidence if each.end.failed and not each.end.stopped_by_us]
    if not failed:
        return None
    lost = [each for each in failed if is_consequence(each)]
    own = [each for each in failed if each not in lost]
    if not own:  # then somebody whom they miss left with an exit code that looks like success
        own = [each for each in evidence if each.end.amid]
    root, reason = _choose(own, lost, _failed_before_stop(evidence))
    return Cause(
        root=root,
        reason=reason,
        consequences=tuple(each for each in lost if each is not root),
        others=tuple(each for each in own if each is not root),
        stopped=tuple(sorted(_stopped(evidence, root))),
    )


def is_consequence(evidence: Evidence) -> bool:
    """Whether the first thing that went wrong in it was the loss of a peer or of the store.

    The first exception of a chain decides: a lost peer wrapped in the script's own exception is
    still a consequence, and a ValueError whose clean-up then met a dead peer is not.
    """
    return says_peer_lost(first_words(evidence))


def first_words(evidence: Evidence) -> str:
    """What the worker printed when things first went wrong: the first exception of its chain."""
    if evidence.error is None:
        return last_words(evidence) if evidence.logged is None else evidence.logged.origin
    found = find_traceback((evidence.error.traceback or "").split("\n"))
    return evidence.error.message if found is None else found.origin


def last_words(evidence: Evidence) -> str:
    """What the worker printed last: the exception, else (no traceback) its last lines.

    A process killed by SIGKILL prints nothing about its death: its log is about something else.
    """
    if evidence.message is not None:
        return evidence.message
    return "" if evidence.end.signal == SIGKILL else "\n".join(evidence.log_tail)


def _choose(
    own: list[Evidence], lost: list[Evidence], early: list[Evidence]
) -> tuple[Evidence, str]:
    if own:
        root = _first(own)
        return root, _reason_own(root, own, lost)
    if early:
        root = _first(early)
        return root, "it had failed by itself when msrun stopped it; the others lost a peer"
    root = _first(lost)
    if len(lost) == 1:
        return root, "it lost a peer, and no other rank here failed: one hangs or was too late"
    return root, "every failed rank lost a peer; this one was the first"


def _reason_own(root: Evidence, own: list[Evidence], lost: list[Evidence]) -> str:
    if len(own) > 1:
        second = _first([each for each in own if each is not root])
        later_s = failed_at(second) - failed_at(root)
        if later_s > WINDOW_S:
            return f"it failed {later_s:.0f} s before rank {second.end.rank}"
        return "it was the first seen to fail"
    if lost:
        return "the other failures are consequences: those ranks lost their connection to a peer"
    return "it is the only rank that failed by itself"


def _first(failures: Sequence[Evidence]) -> Evidence:
    earliest_s = min(map(failed_at, failures))
    near = [each for each in failures if failed_at(each) <= earliest_s + WINDOW_S]
    return min(near, key=lambda evidence: evidence.end.order)


def failed_at(evidence: Evidence) -> float:
    """When its exception was written, else when its end was noticed; seconds since the epoch."""
    seen_s = evidence.end.at_epoch_s
    written_s = None if evidence.error is None else evidence.error.timestamp
    if written_s is not None and seen_s - CREDIBLE_S <= written_s <= seen_s:
        return float(written_s)
    return seen_s


def _failed_before_stop(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Ranks that msrun stopped during the teardown after their own exception."""
    stopped = (each for each in evidence if each.end.failed and each.end.stopped_by_us)
    return [each for each in stopped if _has_own_exception(each)]


def _has_own_exception(evidence: Evidence) -> bool:
    message = evidence.message
    if message is None or STOPPED_WORDS.match(message):
        return False
    return not is_consequence(evidence)


def _stopped(evidence: Sequence[Evidence], root: Evidence) -> list[int]:
    return [each.end.rank for each in evidence if each.end.stopped_by_us and each is not root]
