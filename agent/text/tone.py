"""Whether a sentence is good or bad news: a terminal shows it in colour."""

from __future__ import annotations

from enum import Enum


class Tone(Enum):
    """What a sentence means for the training."""

    PLAIN = "plain"
    GOOD = "good"
    CAUTION = "caution"
    BAD = "bad"
