"""What ranks answer to the orders of a dump, as events.

Whoever answers what nobody asked is dropped. A rank answers its orders to save one after the
other, each once.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from agent.controller import events as ev
from agent.hooks.rank_links import RankLinks
from worker_hooks.contract import protocol

_FILE = re.compile(r"rank_(\d+)/[\w.-]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Answer = (
    protocol.Standing
    | protocol.Frozen
    | protocol.Written
    | protocol.Digested
    | protocol.SaveFailed
    | protocol.Progress
)


class _Owed(NamedTuple):
    """An order to save that is not answered yet."""

    round: int
    is_quick: bool


class Replies:
    """Those to one dump at a time."""

    def __init__(
        self, links: RankLinks, post: Callable[[ev.Event], None], note: Callable[[str], None]
    ) -> None:
        """``links`` are closed to who lies, ``post`` decides, ``note`` hears of a bad place."""
        self._links = links
        self._post = post
        self._note = note
        self._dump_id = -1
        self._owed: defaultdict[int, deque[_Owed]] = defaultdict(deque)  # by rank
        self.written: dict[int, protocol.Written] = {}  # by rank, the newest
        self.frozen: dict[int, tuple[int, int]] = {}  # bytes of states, on the host

    def begin(self, dump_id: int) -> None:
        """From now on only answers to this dump count."""
        self._dump_id = dump_id
        self._owed.clear()
        self.written.clear()
        self.frozen.clear()

    def owe(self, rank: int, number: int, *, is_quick: bool) -> None:
        """A rank was ordered to save, in the round ``number``."""
        self._owed[rank].append(_Owed(number, is_quick))

    def hear(self, answer: Answer) -> None:
        """Turn an answer into an event, if it is of the present dump."""
        if answer.dump_id != self._dump_id:
            return
        match answer:
            case protocol.Standing(rank, _, dump_id, step):
                self._post(ev.RankStanding(rank, dump_id, step))
            case protocol.Frozen(rank, _, dump_id, step, is_whole, why, nbytes, host_nbytes):
                self.frozen[rank] = nbytes, host_nbytes
                self._post(ev.RankFrozen(rank, dump_id, step, is_whole, _clean(why), nbytes))
            case protocol.Progress(rank, _, dump_id):
                self._post(ev.DumpProgressed(rank, dump_id))
            case _ if not self._owed[answer.rank]:
                self._links.drop(answer.rank, f"nobody asked: {answer}"[:300])
            case protocol.Written():
                self._on_written(answer, self._owed[answer.rank].popleft())
            case protocol.Digested(rank, _, dump_id, digest):
                number = self._owed[rank].popleft().round
                self._post(ev.StateDigested(rank, dump_id, digest, number))
            case protocol.SaveFailed(rank, _, dump_id, why, is_place):
                number = self._owed[rank].popleft().round
                if is_place:
                    self._note(_clean(why))
                self._post(ev.SaveFailed(rank, dump_id, _clean(why), is_place, number))

    def _on_written(self, written: protocol.Written, owed: _Owed) -> None:
        if not _is_sound(written, owed):
            self._links.drop(written.rank, f"it wrote what cannot be: {written}"[:300])
            return
        self.written[written.rank] = written
        self._post(ev.ShardWritten(written.rank, written.dump_id, written.digest, owed.round))


def _is_sound(written: protocol.Written, owed: _Owed) -> bool:
    """Whether a rank may have written this: what is in memory has no name and no checksum."""
    if owed.is_quick:
        return not written.file and not written.sha256 and written.nbytes >= 0
    file = _FILE.fullmatch(written.file)
    is_ours = file is not None and int(file[1]) == written.rank
    return is_ours and _SHA256.fullmatch(written.sha256) is not None and written.nbytes >= 0


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may spell and no stream can encode."""
    return text.encode(errors="replace").decode()
