"""What the parts of the agent that work with hooks share, for a whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.controller import events as ev
from agent.hooks.rank_links import Loop
from agent.machine.file_thread import FileThread
from agent.records.journal import Journal


@dataclass(frozen=True, slots=True)
class Services:
    """Everything but the job itself."""

    loop: Loop  # the agent's
    post: Callable[[ev.Event], None]  # decides on an event
    say: Callable[[str], None]  # prints one sentence for people
    journal: Journal
    files: FileThread  # does file work
