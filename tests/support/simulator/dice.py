"""The randomness of a simulated schedule. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any


class Dice(Random):
    """Draws what ``random.Random`` draws for the same seed, quicker: a schedule chooses sixty times."""

    def choice(self, seq: Sequence[Any]) -> Any:
        size = len(seq)
        bits = size.bit_length()
        number = self.getrandbits(bits)
        while number >= size:
            number = self.getrandbits(bits)
        return seq[number]
