"""One node is asked to end (``--on-leave=shrink``): it leaves, or the whole job stops. Pure.

All ranks save their step, the msrun of that node ends, and the others meet again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from agent.arrivals.resize import Resize, goes_on_with
from agent.controller import events as ev


class Asked(NamedTuple):
    """What is so as a node is asked to end."""

    name: str  # of that node, for people
    stay: int  # how many nodes are there that do not leave, without it
    comers: int = 0  # how many wait to be taken in
    why_not: str = ""  # why the job does not go on with fewer nodes in any case, as a clause
    is_to_end: bool = False  # somebody has asked for the end of the whole job
    is_holding: bool = False  # ranks are on their way to the end of one step


class Departures:
    """Judges such requests, on node 0."""

    def __init__(self, resize: Resize, say: Callable[[str], object]) -> None:
        """No node leaves.

        Args:
            resize: plans the job's size.
            say: prints one sentence for people.
        """
        self._resize = resize
        self._say = say
        self._kept: set[int] = set()  # nodes that were asked, and do not leave
        self._killed: set[int] = set()  # nodes whose ranks were ended at once

    def judged(self, event: ev.StopRequested, asked: Asked) -> ev.StopRequested | None:
        """The request that is to be decided on; ``None``: only end the ranks of that node at once.

        Each signal is less patient than the one before. What a second one may cut short is what
        this node alone has to do: the others save the step, with which they go on.
        """
        node, resize = event.node, self._resize
        if asked.is_to_end:
            return replace(event, leaves=False)
        if node in resize.leaving:
            if asked.is_holding:  # nobody saves yet: all do so now
                return replace(event, why=f"{asked.name} leaves at once")
            if node not in self._killed:
                self._killed.add(node)
                self._say(f"{asked.name} leaves at once: its ranks are killed, the others go on")
            return None
        why_not = asked.why_not or resize.leave(node, asked.name, asked.stay, asked.comers)
        if not why_not:
            return replace(event, why=resize.request)
        if node not in self._kept:
            self._kept.add(node)
            self._say(f"the job does not go on without {asked.name}, but stops: {why_not}")
        return replace(event, leaves=False)


def farewell(nodes: int, saved: str) -> str:
    """What a node says that has left.

    Args:
        nodes: with which the job goes on.
        saved: the checkpoint from which it does.
    """
    return f"this node has left: {goes_on_with(nodes)}, from {saved}"
