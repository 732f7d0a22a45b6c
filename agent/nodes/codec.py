"""Events and actions as JSON objects: what happened on a node, and what it is ordered to do. Pure.

The controller decides for all nodes in one of them; the others carry out its actions and say what
happened to their ranks, in the words of one node.
"""

from __future__ import annotations

from typing import get_args

from agent.controller.actions import Action
from agent.controller.events import Event
from agent.nodes.vocabulary import Vocabulary

_EVENTS: Vocabulary[Event] = Vocabulary(get_args(Event))
_ACTIONS: Vocabulary[Action] = Vocabulary(get_args(Action))

pack_event, unpack_event = _EVENTS.pack, _EVENTS.unpack
pack_action, unpack_action = _ACTIONS.pack, _ACTIONS.unpack
"""As ``run_messages.Fact`` and ``run_messages.Order`` have them."""
