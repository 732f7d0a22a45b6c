"""A step that halts behind its update, in a collective: its commit is there, if all of it is copied."""

from __future__ import annotations

import pytest
import torch
from support.one_rank import Training

from worker_hooks.changes import observer
from worker_hooks.distributed import process_group
from worker_hooks.tensors.shard import quick_digest as digest


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_step_that_halts_in_a_collective_goes_back_to_its_commit(monkeypatch, is_counted):
    """The average is moved behind the collective, in which the rank waits for a dead one."""
    training, begun = Training(average=(average := torch.zeros(2, 3))), [0]
    monkeypatch.setattr(process_group, "collectives", lambda: begun[0])
    gate, whole = training.state._guard.gate, []

    def body(batch):
        step, before = training.state.step, digest(training.committed.replica(training.state.step))
        training.update()
        begun[0] += 1
        whole.append(training.committed.is_copied())
        if whole[-1]:
            assert not training.committed.is_complete()
            assert digest(training.committed.replica(step)) == before
        if batch == 9:
            gate.note_raised()
            assert gate.is_torn
            assert training.state._guard.freeze(0.0) == (step, True, "")
            assert digest(training.committed.replica(step)) == before
            gate.open()
        (average if is_counted else average.data).add_(training.net.weight.detach())

    for batch in training.state.batches(range(10)):
        body(batch)
    assert whole[0] is False  # the first update has made momenta
    assert all(whole[5:])


def test_without_a_collective_behind_the_update_nothing_more_is_copied():
    training = Training(average=(average := torch.zeros(2, 3)))
    copied = []
    for _ in training.state.batches(range(7)):
        training.update()
        copied.append(training.committed.is_copied())
        average.add_(1)
    assert not copied[-1]
    # what a script changes between two loops is taken back, so that all is copied at their ends
    assert training.committed.is_copied()


def _between_two_updates(training, judge, optimizer):
    """A GAN's step up to its second backward, in which the rank waits for one that has died."""
    training.update()
    optimizer.zero_grad()
    judge(training.net(torch.ones(1, 3))).square().sum().backward()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.LBFGS])
def test_a_step_that_halts_between_two_updates_goes_back_to_its_commit(make, caplog):
    judge = torch.nn.Linear(2, 1)
    optimizer = make(judge.parameters(), lr=0.01)
    training = Training(judge=judge, other=optimizer)
    gate, whole = training.state._guard.gate, []
    for batch in training.state.batches(range(9)):
        step = training.state.step
        before = digest(training.committed.replica(step))
        _between_two_updates(training, judge, optimizer)
        whole.append(training.committed.is_copied())
        if batch == 8 and whole[-1]:
            gate.note_raised()
            assert training.state._guard.freeze(0.0) == (step, True, "")
            assert digest(training.committed.replica(step)) == before
            gate.open()
        optimizer.step(lambda: judge(torch.ones(1, 2)).square().sum())
    assert all(whole[4:]) == (make is torch.optim.Adam)
    said = [line for line in caplog.messages if "between two updates" in line]
    assert len(said) == (make is torch.optim.LBFGS)  # its state holds more than tensors


def test_what_is_too_large_to_be_copied_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 10)
    judge = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.01)
    training = Training(judge=judge, other=optimizer)
    for _ in training.state.batches(range(9)):
        _between_two_updates(training, judge, optimizer)
        optimizer.step()
    (said,) = [line for line in caplog.messages if "between two updates" in line]
    assert "all of the state is larger than" in said


def test_an_optimizer_that_counts_without_tensors_cannot_go_back():
    training = Training()
    for _ in training.state.batches(range(2)):
        training.update()
    training.backward()
    training.optimizer.step()
    assert training.committed.is_copied()  # in the first steps all is copied
    training.optimizer.state[training.net.weight]["count"] = 3
    assert not training.committed.is_copied()
