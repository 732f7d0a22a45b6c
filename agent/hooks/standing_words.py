"""What ranks have said that stays true: another controller has to hear it once more."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from agent.hooks.rank_links import Said
from worker_hooks.contract import protocol

MOST_KEPT = 64  # messages of a rank


class StandingWords:
    """The words of some ranks of the present attempt."""

    def __init__(self) -> None:
        self._said: dict[int, list[Said]] = {}

    @property
    def ranks(self) -> AbstractSet[int]:
        """Those that have said anything that stays true."""
        return self._said.keys()

    def hear(self, message: Said) -> bool:
        """Keep what stays true, in the place of what it makes untrue; whether it was kept."""
        match message:
            case protocol.Hello():
                self._said[message.rank] = [message._replace(wants_resume=False)]  # it has begun
            case protocol.Registered():
                known = self._said.setdefault(message.rank, [])
                known[:] = [each for each in known if not isinstance(each, protocol.Registered)]
                known.append(message)
            case protocol.Fingerprinted():
                known = self._said.setdefault(message.rank, [])
                if len(known) >= MOST_KEPT:
                    return False
                known.append(message)
            case _:
                return False
        return True

    def of(self, rank: int) -> tuple[Said, ...]:
        """What a rank has said, in its order."""
        return tuple(self._said.get(rank, ()))

    def drop(self, rank: int) -> None:
        """A rank is gone."""
        self._said.pop(rank, None)

    def clear(self) -> None:
        """All are gone."""
        self._said.clear()
