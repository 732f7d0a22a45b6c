"""Variables of a loop at the begin of its epoch and of a backward, beside those of the commit."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support.loop_variables import around, looked_at, nothing_registered, saved_of

from worker_hooks.recovery.resume import SavedVariables
from worker_hooks.training.loop_variables import LoopVariables


def epochs(variables, begin, saved=None):
    """What ``state.epochs`` does with its caller's variables."""
    for epoch in range(begin, 3):
        variables.begin_epoch(sys._getframe(1), saved if epoch == begin else None)
        yield epoch


def test_an_epoch_that_continues_begins_with_what_it_had_begun_with():
    class DeathError(Exception):
        pass

    def train(variables, begin=0, saved=None, dies_in=3):
        size, order, count, made = 4, [], 0, []
        for epoch in epochs(variables, begin, saved):
            loader, order = f"{size} of {order}", [*order, epoch]
            made.append(loader)
            for _ in around(variables, saved=saved):
                size, count = size * 2, count + 1
                order.append(count)
                if (epoch, count % 3) == (dies_in, 2):
                    raise DeathError
        return size, order, count, made

    expected = train(LoopVariables(nothing_registered))
    for dies_in in range(3):
        variables = LoopVariables(nothing_registered)
        with pytest.raises(DeathError):
            train(variables, dies_in=dies_in)
        # what is saved of a loop is handed out as if the loop had been over
        fields = json.loads(b'{"loop": 0' + variables.text + b"}")
        saved = SavedVariables(fields["frames"], {"-1": fields["before"]["-1"]})
        *_, made = train(LoopVariables(nothing_registered), dies_in, saved)
        assert made[dies_in] == expected[-1][dies_in]


def test_an_epoch_in_a_checkpoint_that_does_not_tell_its_begin_begins_as_the_script_sets_it():
    def train(variables, saved=None):
        size = 1
        for _ in epochs(variables, 2, saved):
            made = size
            for _ in around(variables, saved=saved):
                size += 1
        return made, size

    variables = LoopVariables(nothing_registered)
    assert train(variables) == (1, 4)
    saved = SavedVariables(saved_of(variables).frames)
    assert train(LoopVariables(nothing_registered), saved) == (1, 4)


def test_what_training_depends_on_is_read_where_backward_begins():
    def fields(text):
        return json.loads(b'{"loop": 0' + text + b"}")

    def train(variables, seen, committed):
        ahead, best, gone = torch.zeros(2), 0.0, 1
        for number in SimpleNamespace(batches=around).batches(variables):
            best += ahead.sum().item() + (gone == 1)
            ahead = torch.full((2,), float(number))
            gone = 1 if number != 1 else sys.stdout
            seen.append(fields(variables.under_way()))
            if number:
                best = best * 2
            if best > 1e9:
                break
            committed.append(fields(variables.text))
            told.update(variables.late_values())

    seen, committed, told = [], [], {}
    variables = LoopVariables(nothing_registered, looked_at(train))
    train(variables, seen, committed)
    committed = [*committed[1:], fields(variables.text)]
    for number, (then, now) in enumerate(zip(seen, committed, strict=True)):
        (_, changed, others), *_ = now["frames"]
        values = {**others, **changed}
        since, *_ = then["since"]
        assert since.keys() <= {"ahead", "best", "gone"}
        assert since.get("ahead", values["ahead"]) == values["ahead"]
        assert (since["best"] == values["best"]) == (number == 0)
        assert now["late"][0] == ["best"] * (number > 0)
    (name,) = told
    assert name.startswith("late: test_variables_in_time.py:")
    assert name.endswith(" `best`")
    assert [each["since"][0]["gone"] for each in seen[1:]] == [None, [1, {}]]
