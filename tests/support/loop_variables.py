"""Loops that do with their caller's variables what a loop over batches does."""

from __future__ import annotations

import json
import sys

from worker_hooks.recovery.resume import SavedVariables
from worker_hooks.script import source
from worker_hooks.script.kept import ScriptValues


def around(variables, loop=None, saved=None, count=3):
    """A generator that does with its caller's variables what a loop over batches does."""
    variables.enter(sys._getframe(1))
    if saved is not None:
        variables.put_back(saved, sys._getframe(1), loop)
        variables.capture(is_last=True)
    for number in range(0 if saved is not None else count):
        yield number
        variables.capture(is_last=True)
    variables.leave(0)


def saved_of(variables):
    fields = json.loads(b'{"loop": 0' + variables.text + b"}")
    return SavedVariables(fields["frames"], fields["before"])


def nothing_registered():
    return ()


def looked_at(entry):
    script = ScriptValues()
    script.findings = source.look_at(entry)
    return script
