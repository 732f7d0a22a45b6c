"""Which answers of a row can be taken at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from agent.ranks.rank_set import RankSet

A = TypeVar("A")


def due_in(
    row: Iterable[A], number: Callable[[A], int], due: RankSet, owing: RankSet | None = None
) -> dict[int, A]:
    """The answers from the first one on that are due, one of each rank or seat, by its number.

    Sets of all ranks are used once a row, so an answer takes as long at any number of ranks.

    Args:
        row: the answers.
        number: of an answer, the rank or seat that gives it.
        due: those that may answer.
        owing: those that are awaited; not all of them are taken, as the last one is decided on by
            itself. ``None``: all may be.
    """
    answers = list(row)
    numbers = list(map(number, answers))
    undue, taken = {*(RankSet(numbers) - due)}, dict[int, A]()  # mostly there are none
    for who, one in zip(numbers, answers, strict=True):
        if who in taken or who in undue:
            break
        taken[who] = one
    if owing is not None and not owing - RankSet(taken):
        while taken and taken.popitem()[0] not in owing:
            pass
    return taken
