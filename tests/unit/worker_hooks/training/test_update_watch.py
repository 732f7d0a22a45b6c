"""When an update begins: with the step, or with the first change behind a closure."""

from __future__ import annotations

import threading

import pytest
import torch
from support.one_rank import Training

from worker_hooks.contract.status_page import Phase


class Perturbs(torch.optim.SGD):
    """Changes the weights before it asks for gradients, as SAM does."""

    @torch.no_grad()
    def step(self, closure):
        for each in self.param_groups[0]["params"]:
            each.add_(0.1)
        with torch.enable_grad():
            closure()
        return super().step()


class Deaf(torch.optim.SGD):
    def step(self, closure=None):  # noqa: ARG002
        return super().step()


class Asked(Training):
    """Notes where the state was torn when gradients were asked for."""

    def __init__(self, make=torch.optim.SGD):
        super().__init__()
        self.optimizer = make(self.net.parameters(), lr=0.1)
        self.state = type(self.state)(model=self.net, optimizer=self.optimizer)
        self.gate, self.tracker = self.state._guard.gate, self.state._loop.tracker
        self.seen, self.said = [], []
        self.tracker._say = self.said.append

    def closure(self):
        self.optimizer.zero_grad()
        loss = self.net(torch.ones(1, 3)).square().sum()
        loss.backward()
        self.seen.append((self.gate.is_torn, self.tracker.phase))
        return loss

    def steps(self, count, step):
        for _ in self.state.batches(range(count)):
            step()
            assert self.gate.is_torn
        assert (self.state.step, self.gate.is_torn) == (count, False)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_the_update_begins_behind_the_closure_once_a_step_has_shown_that_it_may(how):
    training = Asked()
    asks = {
        "positional": lambda: training.optimizer.step(training.closure),
        "keyword": lambda: training.optimizer.step(closure=training.closure),
    }
    training.steps(3, asks[how])
    assert training.seen == [(True, Phase.UPDATE), *[(False, Phase.BACKWARD)] * 2]
    assert training.said == []


def test_an_optimizer_that_changes_weights_first_is_torn_from_its_begin():
    training = Asked(Perturbs)
    training.steps(3, lambda: training.optimizer.step(training.closure))
    assert training.seen == [(True, Phase.UPDATE)] * 3


def test_from_the_first_change_on_further_calls_are_the_update_and_it_is_said_once():
    training = Asked(lambda weights, lr: torch.optim.LBFGS(weights, lr=lr, max_iter=3))
    training.steps(3, lambda: training.optimizer.step(training.closure))
    torn = [is_torn for is_torn, _ in training.seen]
    calls = len(torn) // 3
    assert calls > 1
    assert torn == [True] * calls + [False, *[True] * (calls - 1)] * 2
    (remark,) = training.said
    assert remark.startswith("LBFGS calls its closure again after it has changed weights")


def test_an_optimizer_that_is_deaf_to_its_closure_is_not_trusted():
    training = Asked(Deaf)
    training.steps(2, lambda: training.optimizer.step(training.closure))
    assert training.seen == []
    assert not training.state._guard.gate.is_torn


def test_a_closure_that_raises_leaves_the_state_whole():
    training = Asked()

    def raises():
        raise KeyError

    batches = training.state.batches(range(3))
    next(batches)
    training.optimizer.step(training.closure)
    next(batches)
    with pytest.raises(KeyError):
        training.optimizer.step(raises)
    assert not training.gate.is_torn
    assert training.state._guard.freeze(0.0) == (1, True, "")


def test_a_step_in_another_thread_is_said_and_nothing_is_promised():
    training = Asked()

    def elsewhere():
        thread = threading.Thread(target=training.optimizer.step, name="stepper")
        training.backward()
        thread.start()
        thread.join()

    for _ in training.state.batches(range(2)):
        elsewhere()
    why = "SGD.step() runs in the thread stepper; only steps of the main thread can be protected"
    assert training.said == [why]
    assert training.state.step == 2
    assert training.state._guard.freeze(0.0) == (2, False, why)
