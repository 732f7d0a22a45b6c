"""Whether ranks of node 0 whose msrun alone was killed save, or another node decides by now."""

from __future__ import annotations

import time
from pathlib import Path

from worker_hooks.contract.left_pages import ALONE, claim, claimed, notes_folder
from worker_hooks.guard.guard import Guard

LOOK_S = 0.01  # between two looks
TAKEN_S = 1.0  # for another node, to take the part of this one


def is_left(guard: Guard) -> bool:
    """Whether no other node takes the part of this one, whose msrun was killed.

    Others do so at once, or save: then their notes are there.
    """
    env, place = guard.env, Path(guard.options.ckpt_save_path)
    if env.is_controlled or not guard.options.ckpt_save_path:
        return True
    notes = notes_folder(str(place), env.record_id)
    until_s = time.monotonic() + TAKEN_S
    while time.monotonic() < until_s and not notes.exists():
        if claimed(place, env.record_id, env.attempt):
            break
        time.sleep(LOOK_S)
    try:
        return claim(place, env.record_id, env.attempt, ALONE)
    except OSError:
        return True  # they save elsewhere, and nobody else could claim it either
