"""What a loop sets under a condition, and loops that the source did not lead to."""

import json
from types import SimpleNamespace

from support.loop_variables import around, looked_at, nothing_registered

from worker_hooks.training.loop_variables import LoopVariables


def lost_in(variables):
    return [(each.name, each.kind) for each in variables.lost()]


def once(variables):
    """What one iteration alone sets, or none, and what later ones and what follows use."""
    used = []
    for number in around(variables):
        if number == 0:
            base = [0.5]
        for each in used[:1] if number == 1 else ():  # an inner loop that may have no items
            last = [each, "seen"]
        try:
            share = {"of": 1 / number}
        except ZeroDivisionError:
            share = None
        used.append([base[0] * number])
        variables.capture(is_last=False)  # a commit amid the loop
        yield json.loads(b'{"loop": 0' + variables.text + b"}")["frames"][0]
        if number > 1:
            used.append([last, share])


def test_what_is_set_under_a_condition_is_kept_amid_the_loop_as_well():
    variables = LoopVariables(nothing_registered)  # the source tells nothing
    _, changed, others = list(once(variables))[-1]
    every = changed | others
    assert every["base"][0] == [0.5]
    assert every["last"][0] == [[0.0], "seen"]
    assert "share" not in every  # each iteration sets it before it is read


def test_a_loop_in_a_function_that_the_source_did_not_lead_to_is_looked_at():
    class Engine:
        def epoch(self, variables):
            for number in SimpleNamespace(batches=around).batches(variables):
                if number == 0:
                    drawn = iter([number])
                next(drawn, None)

    def train(engines, variables):
        for each in engines:  # whose classes nobody knows in advance
            each.epoch(variables)

    script = looked_at(train)
    variables = LoopVariables(nothing_registered, script)
    train([Engine()], variables)
    assert lost_in(variables) == []
    script.is_found = True
    variables = LoopVariables(nothing_registered, script)
    train([Engine()], variables)
    assert lost_in(variables) == [("drawn", "list_iterator")]
