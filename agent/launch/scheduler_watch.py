"""The scheduler of a job that is started by hand has ended: its workers train on, and look for it.

It is dialled until it is started again. That is done in a thread, as it waits there for the other
workers. Of these it is known whether their msruns are there, by their doors, and whether ranks
elsewhere have begun to save by themselves, by the folder that all share: then ranks here have to
take part.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.hooks.rank_links import Loop
from agent.launch.doors import Address, DoorWatch
from agent.machine.loop_calls import until_closed
from agent.nodes.join import (
    AwaitedLine,
    JoinedNode,
    NeverBegunError,
    NobodyThereError,
    RefusedError,
)
from agent.nodes.line import Loss, LossKind
from agent.nodes.messages import AGAIN
from agent.nodes.roster import Doors

AGAIN_S = 0.5  # from one try to the next
GONE_S = 5.0  # that another worker's msrun is gone or silent, until that counts
REFUSED_S = 10.0  # the same after it was another job's
SAVING = "ranks of other workers have begun to save, and no scheduler is there"
GONE = "another worker's msrun has ended, and no scheduler is there"
SILENT = "another worker's machine is silent, and no scheduler is there"

Dial = Callable[[Callable[[socket.socket], object]], JoinedNode]
"""Dials the scheduler once, and waits until all workers are there; takes what takes the connection,
and raises as :func:`agent.nodes.join.join`."""


def may_train_on(loss: Loss, *, is_calm: bool, is_asked: bool) -> bool:
    """Whether ranks train on without the scheduler.

    Args:
        loss: of the line to it. Who is only silent may be alive, and give the ranks' places to
            others.
        is_calm: the job runs, and no rank waits for an order.
        is_asked: somebody wants the job to end.
    """
    return loss.kind is LossKind.PROOF and is_calm and not is_asked


class LostWorkers:
    """What is known of the other workers while ranks train without a scheduler. Pure."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # that one is lost

    def why(self, doors: Doors, now_s: float) -> str:
        """Why the ranks cannot train on; empty: they may.

        At the end of training, too, msruns end, some a moment before others. ``now_s``: monotonic.
        """
        if not doors.gone | doors.silent:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s > self._since_s + GONE_S:
            return GONE if doors.gone else SILENT
        return ""


class AloneWith(NamedTuple):
    """What workers without a scheduler look at."""

    dial: Dial
    doors: Mapping[int, Address]  # of the other workers' msruns, by the nodes' ranks
    folders: Sequence[Path]  # in which ranks leave notes


class SchedulerWatch:
    """Looks for the scheduler, until it is found, no longer wanted, or too late."""

    def __init__(
        self,
        look_at: AloneWith,
        loop: Loop,
        found: Callable[[JoinedNode], object],
        too_late: Callable[[str, bool], object],
        say: Callable[[str], None],
    ) -> None:
        """Begin.

        Args:
            loop: on which the others are called.
            found: takes the line to it.
            too_late: takes why the ranks here cannot train on, as a sentence, and whether that is
                certain. It may be told more than once.
            say: prints one sentence for people.
        """
        self._look_at = look_at
        self._loop, self._call = loop, until_closed(loop.call_soon_threadsafe)
        self._found = found
        self._too_late = too_late
        self._say = say
        self._awaited = AwaitedLine()
        self._doors = DoorWatch(look_at.doors)
        self._others = LostWorkers()
        self._timer = loop.call_later(AGAIN_S, self._knock)
        for look in (self._look_for_it, self._look_for_notes):
            threading.Thread(target=look, name="msrun-scheduler", daemon=True).start()

    def close(self) -> None:
        """It is not wanted any more; what is found nevertheless is closed.

        Who waits there waits no longer: this node may come again, as another one.
        """
        self._timer.cancel()
        self._doors.close()
        self._awaited.close()

    def _knock(self) -> None:
        doors = self._doors.look(set(self._look_at.doors))
        if why := self._others.why(doors, self._loop.time()):
            self._end(why, certain=False)
        if not self._awaited.is_over.is_set():
            self._timer = self._loop.call_later(AGAIN_S, self._knock)

    def _end(self, why: str, *, certain: bool = True) -> None:
        if not self._awaited.is_over.is_set():
            self._too_late(why, certain)

    # --- in threads -----------------------------------------------------------------------------

    def _look_for_notes(self) -> None:
        folders = self._look_at.folders
        pause_s = AGAIN_S
        while folders and not self._awaited.is_over.wait(pause_s):
            with contextlib.suppress(OSError):  # the file server is away for a moment
                if any(each.exists() for each in folders):
                    self._call(self._end, SAVING)
                    pause_s = REFUSED_S

    def _look_for_it(self) -> None:
        said = ""
        while not self._awaited.is_over.is_set():
            pause_s = AGAIN_S
            try:
                joined = self._look_at.dial(self._awaited.opened)
            except NobodyThereError:
                pass
            except (RefusedError, NeverBegunError) as error:
                pause_s = REFUSED_S
                if error.exit_code == AGAIN:
                    self._call(self._end, str(error))
                elif str(error) != said:
                    said = str(error)
                    self._call(self._say, f"what is at the scheduler's port is none: {said}")
            else:
                self._call(self._take, joined)
                return
            self._awaited.is_over.wait(pause_s)

    def _take(self, joined: JoinedNode) -> None:
        if self._awaited.is_wanted(joined):
            self._found(joined)
