"""A script that makes its steps itself; and who is told to leave, in which kind of loop."""

from __future__ import annotations

import pytest
import torch
from support.one_rank import Training
from torch.utils.data import DataLoader

from worker_hooks import ExitByRequest, GracefulExit, TrainState, run
from worker_hooks.data.feed import Feed
from worker_hooks.guard.guard import Guard
from worker_hooks.training import own_loop

TRIGGERED = "Graceful exit is triggered, stop training."


class Saver:
    """As ModelCheckpoint is seen."""

    def __init__(self):
        self.saved, self.ended, self.left = [], [], []

    def save_now(self, state, reason):
        self.saved.append((state.step, reason))

    def exit_requested(self, state):
        self.left.append(state.step)

    def end(self, state):
        self.ended.append(state.step)


def leave_at(state, step):
    """The order comes as the step is under way; the main thread finds it at its boundary."""
    state._guard.gate.hold_at(step, state._guard.gate.exit)


@pytest.fixture
def told(monkeypatch):
    """What msrun is told that nothing restores."""
    sentences = []
    monkeypatch.setattr(
        Guard,
        "say_unprotected",
        lambda _, text, *, is_refused: sentences.append((text, is_refused)),
    )
    return sentences


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_set_on_data_is_named_behind_a_death_as_well(told, monkeypatch, is_strict):
    """A rank had died before the loop that showed it: nothing was said, and weights were others."""
    training = Training()
    guard = training.state._guard
    guard.env = guard.env._replace(attempt=1, is_strict=is_strict)
    found = ["`Order.kept` is set between loops"]
    monkeypatch.setattr(Feed, "unsaved", lambda *_: [*found])
    for _ in training.state.batches(DataLoader(torch.zeros(2, 1))):
        training.update()
    assert set(told) == {(found[0], False)}
    guard.env = guard.env._replace(rank=1)
    told.clear()
    for _ in training.state.batches(DataLoader(torch.zeros(2, 1))):
        training.update()
    assert told == []  # one rank for all


# --- the script's own loop -----------------------------------------------------------------------


def test_to_ask_is_the_end_of_a_step_if_there_was_an_update():
    training = Training()
    state = training.state
    assert not state.should_exit
    assert state.step == 0
    for step in (1, 2):
        training.backward()
        assert not state.should_exit
        training.update()
        assert not state.should_exit
        assert (state.step, state.batch) == (step, step)
    assert training.committed.is_complete() is False  # nothing is under way
    training.update()
    assert training.committed.is_complete()  # what a step changes was learned
    assert training.record().step == 2


def test_of_a_rank_that_dies_in_its_step_the_same_batch_is_known_as_of_its_peers():
    training = Training()
    state = training.state
    assert not state.should_exit
    page = training.committed.page
    for step in (1, 2, 3):
        training.backward()
        assert page.record(step).batch == step  # as its commit will have it
        training.update()
        if step == 3:
            assert training.committed.is_complete()
            assert training.committed.position(step)[1] == step
        assert not state.should_exit
        assert page.record(step).batch == state.batch == step


def test_once_it_is_true_it_stays_true_and_nothing_is_raised(caplog):
    saver = Saver()
    training = Training(callbacks=[saver])
    state = training.state
    leave_at(state, 2)
    steps = 0
    while not state.should_exit:
        training.update()
        steps += 1
    assert (steps, state.step, saver.left) == (2, 2, [2])
    assert state.should_exit
    state.finish()
    assert (saver.ended, saver.left) == ([], [2])
    assert caplog.text.count(TRIGGERED) == 1
    with pytest.raises(GracefulExit):
        next(state.batches(range(3)))


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_follows_run_is_for_a_training_that_came_to_its_end(is_asked):
    training = Training()
    behind = []

    def train(state):
        while not state.should_exit and state.step < 3:
            training.update()
            if is_asked and state.step == 1:
                leave_at(state, 2)
        return state.step

    def script():
        behind.append(run(train, training.state))

    if is_asked:
        with pytest.raises(GracefulExit):
            script()
    else:
        script()
    assert behind == ([] if is_asked else [3])


def test_exit_by_request_takes_two_lines():
    training = Training()
    exit_by_request = ExitByRequest(training.state)
    leave_at(training.state, 3)
    for _ in range(10):
        training.update()
        if exit_by_request():
            break
    assert training.state.step == 3
    assert exit_by_request()
    with pytest.raises(TypeError, match="takes your TrainState, not int"):
        ExitByRequest(3)


def test_epochs_end_for_a_script_that_was_told():
    saver = Saver()
    training = Training(callbacks=[saver])
    leave_at(training.state, 2)
    epochs = []
    for epoch in training.state.epochs(5):
        epochs.append(epoch)
        for _ in range(4):
            if training.state.should_exit:
                break
            training.update()
    assert (epochs, training.state.step, saver.ended) == ([0], 2, [])


def over_a_loader(training, **options):
    """Four steps of a script that loops over a loader by itself."""
    for _ in DataLoader(range(4), **options):
        if training.state.should_exit:
            break
        training.update()
    assert not training.state.should_exit


def test_a_loader_that_the_script_loops_over_by_itself_is_said_once(told):
    training = Training()
    over_a_loader(training)
    over_a_loader(training)
    assert [(text.partition(" without ")[0], refused) for text, refused in told] == [
        ("a DataLoader is looped over", False)
    ]


def test_it_is_refused_where_nothing_may_begin_anew(told):
    training = Training()
    guard = training.state._guard
    guard.env = guard.env._replace(is_strict=True)
    over_a_loader(training)
    assert [refused for _, refused in told] == [True]


def test_it_can_be_left_to_the_script(told):
    training = Training()
    training.state.ignore("DataLoader")
    over_a_loader(training)
    assert told == []


def test_a_loader_that_hands_out_nothing_in_a_step_is_no_training_data(told):
    training = Training()
    checks = iter(DataLoader(range(4)))
    next(checks)
    while not training.state.should_exit and training.state.step < 3:
        list(DataLoader(range(2)))  # a validation
        training.update()
    next(checks)
    assert told == []


def over_a_list(training):
    for item in [1, 2, 3]:
        if training.state.should_exit:
            break
        training.update()
        del item
    assert not training.state.should_exit


def over_a_range_again(training, count):
    for number in range(count):
        training.update()
        if training.state.should_exit:
            return number
    return None


def said_of(told):
    return [(text.partition("`")[2].partition("`")[0], refused) for text, refused in told]


def test_a_loop_that_begins_anew_is_said_at_the_first_commit_and_once(told):
    training = Training()
    for item in [1, 2, 3]:
        if training.state.should_exit:
            break
        assert len(told) == (item > 1)
        training.update()
    over_a_list(training)
    over_a_list(training)
    assert said_of(told) == [("for item in [1, 2, 3]", False)] * 2  # there are two such loops


def test_so_is_a_second_one_that_comes_later(told):
    training = Training()
    while not training.state.should_exit and training.state.step < 2:
        training.update()
    assert told == []
    over_a_range_again(training, 2)
    over_a_range_again(training, 2)
    assert said_of(told) == [("for number in range(count)", False)]


def test_it_is_refused_where_nothing_may_begin_anew_before_the_first_commit_only(told):
    training = Training()
    guard = training.state._guard
    guard.env = guard.env._replace(is_strict=True)
    over_a_list(training)
    over_a_range_again(training, 2)
    assert [refused for _, refused in told] == [True, False]
    assert "for item in [1, 2, 3]` begins anew after a replacement or resume" in told[0][0]
    assert told[0][0].endswith("by state.ignore('item'): refused, because of --strict")


def test_a_loop_may_be_left_to_the_script_by_the_name_of_its_variable(told):
    training = Training()
    training.state.ignore("item")
    over_a_list(training)
    assert told == []


def test_all_loops_around_are_said_in_one_sentence(told):
    training = Training()
    for _ in range(2):
        for x, y in [(1, 2)]:
            training.update()
            assert not training.state.should_exit
            del x, y
    ((text, _),) = told
    assert "`for _ in range(2)`, test_loops_without_batches.py:" in text
    assert "`for x, y in [(1, 2)]` begin anew after" in text


def test_a_rank_that_says_nothing_looks_for_nothing(told, monkeypatch):
    training = Training()
    guard = training.state._guard
    guard.env = guard.env._replace(attempt=1)
    monkeypatch.setattr(own_loop, "begin_anew", lambda *_: pytest.fail("it was read"))
    over_a_list(training)
    assert told == []


def test_a_loop_over_batches_may_follow_a_question():
    training = Training()
    while not training.state.should_exit:
        for _ in training.state.batches(range(3)):
            training.update()
        if training.state.step == 6:
            break
    assert (training.state.step, training.state.batch) == (6, 3)


# --- loops over batches --------------------------------------------------------------------------


def test_a_loop_over_batches_is_left_by_an_exception_that_is_no_error():
    saver = Saver()
    training = Training(callbacks=[saver])
    leave_at(training.state, 2)
    with pytest.raises(GracefulExit) as raised:
        for _ in training.state.epochs(5):
            for _ in training.state.batches(range(3)):
                training.update()
    assert raised.value.code == 0
    assert (training.state.step, saver.left, saver.ended) == (2, [2], [])
    assert b'"is_over": false' in training.record().meta


def test_the_order_that_comes_as_a_loop_is_left_at_will_waits_for_the_next_place():
    saver = Saver()
    training = Training(callbacks=[saver])
    leave_at(training.state, 1)
    for _ in training.state.batches(range(3)):
        training.update()
        break  # a generator that is closed cannot raise
    assert saver.left == [1]
    with pytest.raises(GracefulExit):
        training.state.finish()
    assert saver.ended == []


def test_the_last_step_of_all_is_left_gracefully_too():
    training = Training()
    leave_at(training.state, 6)
    with pytest.raises(GracefulExit):
        for _ in training.state.epochs(2):
            for _ in training.state.batches(range(3)):
                training.update()
    assert training.state.step == 6


def test_accumulated_gradients_are_not_left_before_their_update():
    training = Training()
    leave_at(training.state, 1)
    seen = []
    with pytest.raises(GracefulExit):
        for batch in training.state.batches(range(9)):
            seen.append(batch)
            training.update() if batch == 3 else training.backward()
    assert seen == [0, 1, 2, 3]


# --- saving by hand ------------------------------------------------------------------------------


def test_a_step_is_saved_once_by_hand(caplog):
    saver = Saver()
    training = Training(callbacks=[saver])
    training.state.should_exit  # noqa: B018  it begins
    training.update()
    training.state.save()
    training.state.save()
    assert saver.saved == [(1, "asked for")]
    assert caplog.text.count("step 1 is saved already") == 1


def test_where_nothing_saves_it_is_said(caplog):
    training = Training()
    training.state.save()
    assert "no step was made yet" in caplog.text
    training.update()
    training.state.save()
    assert "nothing saves: give callbacks=[ModelCheckpoint(...)]" in caplog.text


def test_without_msrun_the_step_that_is_left_is_a_checkpoint(monkeypatch):
    monkeypatch.setattr("worker_hooks.guard.guard.Guard.is_on", property(lambda _: False))
    saver = Saver()
    training = Training(callbacks=[saver])
    training.state.exit.request("asked")
    with pytest.raises(GracefulExit):
        for _ in training.state.batches(range(9)):
            training.update()
    assert saver.saved == [(1, "graceful exit")]


# --- what callbacks are told ----------------------------------------------------------------------


def test_a_departure_knows_the_models_without_their_wrappers():

    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wrapped = torch.nn.DataParallel(net)
    assert TrainState(model=wrapped, ema=other).exit.models == {"model": net}
    both = TrainState(model={"a": net, "b": other}).exit.models
    assert both == {"model.a": net, "model.b": other}
    assert TrainState(ema=other).exit.models == {"ema": other}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert TrainState(model=net, scaler=scaler).exit.loss_scale == 8.0
    assert TrainState(model=net).exit.loss_scale is None
