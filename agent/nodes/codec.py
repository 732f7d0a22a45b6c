"""Events and actions as JSON objects: what happened on a node, and what it is ordered to do. Pure.

The controller decides for all nodes in one of them; the others carry out its actions and say what
happened to their ranks, in the words of one node.
"""

from __future__ import annotations

from typing import get_args

from agent.controller.actions import Action
from agent.controller.events import Event
from agent.nodes.vocabulary import Vocabulary

_EVENTS = Vocabulary(get_args(Event))
_ACTIONS = Vocabulary(get_args(Action))


def pack_event(event: Event) -> dict[str, object]:
    """An event for ``messages.Fact``."""
    return _EVENTS.pack(event)


def unpack_event(packed: object) -> Event:
    """The event of a ``messages.Fact``.

    Raises:
        CodecError: it is none that this version knows.
    """
    event: Event = _EVENTS.unpack(packed)
    return event


def pack_action(action: Action) -> dict[str, object]:
    """An action for ``messages.Order``."""
    return _ACTIONS.pack(action)


def unpack_action(packed: object) -> Action:
    """The action of a ``messages.Order``.

    Raises:
        CodecError: it is none that this version knows.
    """
    action: Action = _ACTIONS.unpack(packed)
    return action
