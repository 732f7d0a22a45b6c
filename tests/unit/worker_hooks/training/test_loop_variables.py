"""Variables and counts of the script's frames: kept at a commit, and put back into another frame."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, deque
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.loop_variables import around, looked_at, nothing_registered, saved_of
from support.one_rank import Training
from torch.nn.functional import mse_loss

from worker_hooks.script import notice, source
from worker_hooks.script.kept import ScriptValues
from worker_hooks.training.loop_variables import LoopVariables
from worker_hooks.training.script_frames import advance, consumers, names_of_loop


class Meter:
    def __init__(self):
        self.total, self.newest = 0.0, []


def everything(variables, saved=None):
    """Another value in each variable than in front of the loop."""
    total, count, nothing, name = 0.0, 0, 0, "begin"
    losses, table, last, seen, meter = [], {"kept": 0}, deque(maxlen=2), set(), Meter()
    alias = losses
    for number in around(variables, saved=saved):
        loss = torch.tensor(number + 0.1, requires_grad=True) * 2
        error = mse_loss(torch.full((4, 1), float(number)), torch.zeros(4, 1))
        total += loss.item()
        count, nothing, name, big = count + 1, None, f"batch {number}", 1 << 80
        losses.append(loss.item())
        table[name] = [count, (loss.detach(), float("nan"), -0.0)]
        last.append(number)
        seen.add(name)
        meter.total += 1
        meter.newest.append(number)
        mean = np.float32(total / count)
        frequent = Counter(map(str, losses))
    assert alias is losses
    assert nothing is None
    zero = table["batch 1"][1][2]
    assert math.copysign(1, zero) == -1
    assert type(mean) is np.float32
    plain = (total, count, name, big, losses, list(last), last.maxlen, sorted(seen), mean)
    rest = (loss.item(), error.item(), meter.total, meter.newest, frequent, repr(table), number)
    return *plain, *rest


def test_all_plain_values_are_there_behind_a_loop_that_is_over():
    variables = LoopVariables(nothing_registered)
    expected = everything(variables)
    again = LoopVariables(nothing_registered)
    assert everything(again, saved_of(variables)) == expected
    # a second death, before anything has changed since the first
    assert everything(LoopVariables(nothing_registered), saved_of(again)) == expected


def test_what_never_changed_is_not_overwritten_by_what_another_process_had():
    def train(variables, port, saved=None):
        opened = port
        for number in around(variables, saved=saved):
            step = number
        return opened, step

    variables = LoopVariables(nothing_registered)
    assert train(variables, 1) == (1, 2)
    assert train(LoopVariables(nothing_registered), 5, saved_of(variables)) == (5, 2)


def test_functions_around_the_loop_are_put_back_too_and_others_are_not():
    def epoch(variables, saved):
        for number in around(variables, saved=saved):
            loss = number
        return loss

    def train(variables, saved=None, epochs=2):
        best = 0
        for _ in range(epochs):
            last = epoch(variables, saved)
            best += 1
        return best, last

    def stranger(saved):
        for number in around(LoopVariables(nothing_registered), saved=saved):
            loss = number
        return loss

    variables = LoopVariables(nothing_registered)
    assert train(variables) == (2, 2)
    saved = saved_of(variables)
    assert train(LoopVariables(nothing_registered), saved, epochs=1) == (2, 2)
    with pytest.raises(UnboundLocalError):
        stranger(saved)


def test_registered_and_large_tensors_views_and_leaves_are_no_variables():
    registered = torch.zeros(2)
    table = torch.zeros(4)

    def train(variables):
        mine, leaf = torch.zeros(2), torch.zeros(1, requires_grad=True)
        for number in around(variables):
            mine, alias, view, large = mine + number, registered, table[0], torch.zeros(4096)
        assert leaf is not None
        return alias, view, large

    variables = LoopVariables(lambda: (registered,))
    train(variables)
    (_, changed, others), *_ = saved_of(variables).frames
    assert {"mine", "number"} <= changed.keys()
    assert not {"alias", "view", "large", "leaf"} & (changed.keys() | others.keys())


def test_a_long_list_is_kept_and_what_has_no_room_is_left_out():
    def train(variables, steps):
        losses = []
        for number in around(variables, count=steps):
            losses.append(number / 7)
            assert len(losses) == number + 1
        return losses

    variables = LoopVariables(nothing_registered)
    losses = train(variables, 300)
    (_, changed, _), *_ = saved_of(variables).frames
    assert changed["losses"] == [losses, {}]
    train(variables, 5000)
    (_, changed, _), *_ = saved_of(variables).frames
    assert "losses" not in changed
    assert len(variables.text) < 64 << 10


def lost_in(variables):
    return [(each.name, each.kind) for each in variables.lost()]


def test_what_a_loop_hands_to_its_end_is_named_if_it_cannot_be_kept():
    class Opaque:
        __slots__ = ()

    def train(variables):
        for _ in around(variables):
            found, unused = Opaque(), Opaque()
            fresh = 1 if unused else 0
            yield lost_in(variables)
        fresh = found
        return fresh

    assert list(train(LoopVariables(nothing_registered)))[1:] == [[("found", "Opaque")], []]


def carrying(variables, batches):
    """What a loop carries: kept, too large to be kept, and of another kind from its third step."""
    best, ahead, chosen, drawn = 0.0, torch.zeros(200, 300), None, iter([1, 2, 3])
    told = []
    for number in SimpleNamespace(batches=batches).batches(variables):
        best = max(best, float(number) + ahead.sum().item() + next(drawn))
        ahead = ahead + 1
        if number == 1:
            chosen = {"weight": torch.zeros(40_000)}
        told.append(lost_in(variables))
    return told, best, chosen


def test_what_a_loop_carries_is_named_as_soon_as_nothing_keeps_it():
    script = looked_at(carrying)
    names = {each.name for each in script.findings.carried}
    assert names >= {"best", "ahead", "drawn", "chosen"}
    told, *_ = carrying(LoopVariables(nothing_registered, script), around)
    assert sorted(told[0]) == [("ahead", "Tensor"), ("drawn", "list_iterator")]
    assert told[1:] == [[], [("chosen", "dict")]]


def test_a_random_generator_in_a_variable_is_named_where_the_loop_draws_from_it():
    outer = torch.Generator()

    def train(variables):
        mine, loaders = torch.Generator(), torch.Generator()
        for _ in around(variables):
            torch.rand(1, generator=mine)
            torch.rand(1, generator=outer)
        return loaders

    variables = LoopVariables(nothing_registered)
    train(variables)
    assert lost_in(variables) == [("mine", "")]


def test_of_a_loop_without_batches_all_that_is_carried_is_named():
    def steps(variables):
        variables.has_no_loop(sys._getframe(1))
        variables.has_no_loop(sys._getframe(1))
        yield from range(2)

    told, *_ = carrying(LoopVariables(nothing_registered, looked_at(carrying)), steps)
    assert {name for name, _ in told[0]} >= {"best", "ahead", "drawn", "chosen"}
    assert told[1] == []


class Sum(torch.Tensor):
    """As a DTensor that is a sum over ranks: to compare it is a collective."""

    asked = 0

    def __eq__(self, other):
        Sum.asked += 1
        return torch.tensor(False)

    __hash__ = torch.Tensor.__hash__


def test_a_tensor_that_takes_the_place_of_a_number_in_a_container_is_not_compared():
    def train(variables):
        norms, meters = [0.0], {"norm": {"last": 0.0}}
        for number in around(variables):
            norms[0] = torch.tensor(0.0).as_subclass(Sum) if number > 1 else number / 2
            meters["norm"]["last"] = norms[0]
        return norms, meters

    train(LoopVariables(nothing_registered))
    assert Sum.asked == 0


def test_a_batch_that_is_fetched_ahead_is_kept():
    def train(variables, saved=None):
        x, mean = torch.zeros(64, 300), 0.0
        for number in SimpleNamespace(batches=around).batches(variables, saved=saved):
            mean, x = x.mean().item(), torch.full((64, 300), float(number))
        return mean, x.mean().item()

    variables = LoopVariables(nothing_registered, looked_at(train))
    assert train(variables) == (1.0, 2.0)
    assert lost_in(variables) == []
    again = LoopVariables(nothing_registered, looked_at(train))
    assert train(again, saved_of(variables)) == (1.0, 2.0)


class History(dict):
    """More than its attributes."""


class Odd:
    def __init__(self):
        self.x = 1

    def __eq__(self, other):
        return self.x == other.x

    __hash__ = None


def test_what_is_more_than_its_attributes_is_no_plain_object():
    def train(variables, saved=None):
        history, phase = History(), None
        for number in SimpleNamespace(batches=around).batches(variables, saved=saved):
            history[number] = len(history)
            phase = History if phase is None else phase
        return dict(history), phase

    variables = LoopVariables(nothing_registered, looked_at(train))
    train(variables)
    assert "history" not in json.dumps(saved_of(variables).frames)


def test_an_object_that_the_loop_made_is_made_again():
    def train(variables, saved=None):
        best = None
        for number in around(variables, saved=saved):
            if best is None:
                best = Meter()
            best.total += number
        return type(best), best.total

    variables = LoopVariables(nothing_registered)
    assert train(variables) == (Meter, 3.0)
    assert train(LoopVariables(nothing_registered), saved_of(variables)) == (Meter, 3.0)


def test_two_names_of_one_thing_stay_two_names_of_one_thing():
    def objects(variables, saved=None):
        first, second = Meter(), Meter()
        current = first
        for _ in around(variables, saved=saved):
            current.total += 1
            current = second if current is first else first
        return first.total, second.total, current is second

    def lists(variables, saved=None):
        first, second = [0], [1]
        current = first
        for number in around(variables, saved=saved):
            current.append(number)
            current = second if current is first else first
        return first, second, current is second

    stages = [{"lr": 1.0}, {"lr": 0.5}]

    def constants(variables, saved=None):
        stage = stages[0]
        for number in around(variables, saved=saved):
            stage = stages[number % 2 == 1]
        return dict(stage), list(map(dict, stages))

    for train in (objects, lists, constants):
        variables = LoopVariables(nothing_registered)
        expected = train(variables)
        assert train(LoopVariables(nothing_registered), saved_of(variables)) == expected


def test_what_one_name_stands_for_and_another_one_contains_is_named():
    def train(variables, saved=None):
        average = torch.zeros(2)
        held = {"average": average}
        for number in SimpleNamespace(batches=around).batches(variables, saved=saved):
            average.add_(number)
            held["average"].mul_(0.5)
        return held["average"] is average

    variables = LoopVariables(nothing_registered, looked_at(train))
    assert train(variables)
    assert {name for name, _ in lost_in(variables)} >= {"average"}
    (_, changed, others), *_ = saved_of(variables).frames
    assert not {"average", "held"} & {*changed, *others}


def test_nothing_that_is_looked_at_raises_into_the_training():
    def train(variables):
        slots, ring, threads = [None, None], [], {}
        ring.append(ring)
        for number in around(variables):
            slots[number % 2] = Odd()
            threads[number] = number
        return len(slots), len(threads)

    assert train(LoopVariables(nothing_registered)) == (2, 3)


def test_where_an_exception_leaves_the_loop_its_variables_are_those_of_that_moment():
    def train(variables):
        scale, count = 1.0, 0
        for number in SimpleNamespace(batches=raising).batches(variables):
            scale *= 0.5
            count = count + number + 1
            if scale < 0.3:
                raise ValueError(count)

    def raising(variables):
        variables.enter(sys._getframe(1))
        variables.capture(is_last=True)
        for number in range(5):
            yield number
            variables.capture(is_last=True)

    variables = LoopVariables(nothing_registered, looked_at(train))
    with pytest.raises(ValueError, match="3"):
        train(variables)
    text = variables.settled()
    assert text is not None
    (_, changed, _), *_ = json.loads(b'{"loop": 0' + text + b"}")["frames"]
    assert changed["scale"][0] == 0.25


class Asking:
    """Does with the variables of a loop of the script's own what ``state.should_exit`` does."""

    def __init__(self, script=None, saved=None):
        self.variables = LoopVariables(nothing_registered, script)
        self.saved, self.count = saved, 0

    def ask(self, frame=None):
        frame = frame or sys._getframe(1)
        if not self.count:
            self.variables.enter(frame, is_own=True)
            if self.saved is not None:
                self.variables.put_back(self.saved, frame)
        else:
            self.variables.asked(frame)
        self.variables.capture(is_last=True)
        self.count += 1
        return self.count > 3

    def ask_deeper(self):
        return self.ask(sys._getframe(0))


def of_its_own(asking, ask):
    best, ahead, losses = 4.0, torch.zeros(2), []
    while not ask():
        best = min(best, float(3 - asking.count))
        ahead = ahead + 1
        losses.append(best)
    return best, ahead.tolist(), losses


@pytest.mark.parametrize("name", ["ask", "ask_deeper"])
def test_a_loop_of_the_scripts_own_continues_with_its_variables(name):
    first = Asking(looked_at(of_its_own))
    ended = of_its_own(first, getattr(first, name))
    assert ended == (0.0, [3.0, 3.0], [2.0, 1.0, 0.0])
    assert first.variables.lost() == []
    again = Asking(saved=saved_of(first.variables))
    again.count = 0
    more = of_its_own(again, getattr(again, name))
    assert more == (0.0, [6.0, 6.0], [2.0, 1.0, 0.0, *[0.0] * 3])


def test_where_it_asks_in_another_place_than_at_first_its_variables_are_named():
    def train(asking):
        best = 0.0
        if asking.ask():
            return
        while not SimpleNamespace(should_exit=asking.ask()).should_exit:
            best = best + 1 if best < 5 else 0

    asking = Asking(looked_at(train))
    train(asking)
    assert [each.name for each in asking.variables.lost()] == ["best"]
    assert asking.variables.text == b""


def test_a_step_is_complete_when_what_steers_the_training_has_changed_as_it_usually_does():
    states = []

    def train(variables):
        n, printed, seldom = 0, 0.0, 1.0
        for number in SimpleNamespace(batches=around).batches(variables, count=4):
            states.append(variables.settled() is not None)
            printed += n
            n = n + 1
            states.append(variables.settled() is not None)
            seldom = 0.5 if number == 5 else seldom
            if n > 7 or seldom < 0:
                break
        print(printed)

    script = looked_at(train)
    assert {e.name for e in script.findings.carried if not e.is_only_printed} == {"n", "seldom"}
    variables = LoopVariables(nothing_registered, script)
    train(variables)
    assert states == [True] * 4 + [False, True] * 2  # two commits show what is usual
    fields = json.loads(b'{"loop": 0' + variables.text + b"}")
    assert "is_settled" not in fields
    assert sorted(fields["steering"][0]) == ["n", "seldom"]
    assert fields["moving"][0] == ["n"]


def test_what_is_ignored_is_neither_kept_nor_put_back_nor_named():
    def train(variables, saved=None):
        mine, other, big = 0, 0, torch.zeros(9000)
        for number in SimpleNamespace(batches=around).batches(variables, saved=saved):
            mine, other = number, number
            big = big + 1
        return mine, other, big is None

    script = looked_at(train)
    script.ignored |= {"mine", "big"}
    variables = LoopVariables(nothing_registered)
    train(variables)
    assert train(LoopVariables(nothing_registered, script), saved_of(variables))[:2] == (0, 2)
    assert "big" in {each.name for each in script.findings.carried}
    variables = LoopVariables(nothing_registered, script)
    train(variables)
    (_, changed, others), *_ = saved_of(variables).frames
    assert "mine" not in {*changed, *others}
    assert "other" in changed
    assert "big" not in [each.name for each in variables.lost()]


def test_what_is_saved_with_the_closure_is_not_saved_with_the_frame():
    decay, unknown = 1.0, 1.0

    def train(variables):
        nonlocal decay, unknown
        for _ in around(variables):
            decay, unknown = decay / 2, unknown / 2
            script.look(is_commit=True)

    script = ScriptValues()
    script.find(train)
    script.ignored.add("unknown")
    script.look(is_commit=True)
    script.ignored.clear()
    variables = LoopVariables(nothing_registered, script)
    train(variables)
    (_, changed, others), *_ = saved_of(variables).frames
    assert "decay" not in {*changed, *others}
    assert decay == 0.125


def test_what_pairs_batches_is_found_also_within_enumerate():
    def kinds_around(wrap):
        found = []

        def batches():
            found.extend(type(each) for each in consumers(sys._getframe()))
            yield 1

        list(wrap(batches()))
        return set(found)

    assert kinds_around(lambda it: zip(range(3), it, strict=False)) == {zip}
    assert kinds_around(lambda it: map(max, it, range(3))) == {map}
    assert kinds_around(lambda it: enumerate(islice(it, 2))) == {enumerate, islice}
    assert kinds_around(lambda it: map(str, it)) == set()


def test_a_loop_left_at_will_is_a_commit_at_once_whoever_counts():
    training = Training()
    for number, _ in enumerate(training.state.batches(range(5))):
        training.update()
        if number == 2:
            break
    assert training.state.step == 3


def counted(by=0, wrap=lambda batches: batches):
    def batches():
        asked_by = consumers(sys._getframe())
        for each in asked_by:
            assert advance(each, by)
        yield from "ab"

    return list(enumerate(wrap(batches()), start=1))


def passed_on(batches):
    yield from ()
    for each in batches:
        yield each.lower()


def test_enumerate_counts_on():
    assert counted() == [(1, "a"), (2, "b")]
    assert counted(by=40) == [(41, "a"), (42, "b")]
    assert counted(by=40, wrap=passed_on) == [(41, "a"), (42, "b")]  # as tqdm does


def test_the_names_of_a_loop():
    def script(items):
        total = count = 0
        for item in items:
            total += item
            last = item
            yield names_of_loop(sys._getframe())
        return total, last, count

    def asked():
        yield names_of_loop(sys._getframe(1))

    def train():
        total = 0
        for names in asked():
            total += 1
            last = names
        return last, total

    names = train()[0]
    assert names.carried == {"total"}
    assert names.after == {"last", "total"}
    assert next(iter(script([1]))).after == frozenset()


def test_one_sentence_for_what_own_can_hold_and_one_for_the_rest():
    where = ("/there/train.py", 7, False, 1)
    best, batch = source.Named("best", *where), source.Named("batch", *where, kind="Tensor")
    total = source.Named("total", "/there/train.py", 9, is_only_printed=True)
    anew = "begins anew after a replacement or resume"
    assert list(notice.sentences([best, batch, total])) == [
        ("train.py:9 `total`: after a replacement or resume printed values may differ", False),
        (f"train.py:7 `best` {anew}: keep it as state.own.best", True),
        (f"train.py:7 `batch` (Tensor) {anew}: make it in the step, as it cannot be kept", True),
    ]
