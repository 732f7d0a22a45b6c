"""One rank's state in its loop: what is a commit, what stays readable, and what is none of ours."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from support.one_rank import Training
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from worker_hooks import TrainState
from worker_hooks.changes import loop_end_copies
from worker_hooks.contract.status_page import Phase
from worker_hooks.data.feed import Feed
from worker_hooks.guard.guard import Guard
from worker_hooks.training import torch_hooks
from worker_hooks.training.train_state import NO_STEP


def steps_over(training, batches, body):
    """The step in front of each batch, and behind the loop."""
    seen = []
    for batch in training.state.batches(batches):
        seen.append(training.state.step)
        body(batch)
    return [*seen, training.state.step]


def test_a_commit_is_the_return_for_the_next_batch_behind_an_update():
    training = Training()
    seen = steps_over(training, range(4), lambda batch: training.update() if batch % 2 else None)
    assert seen == [0, 0, 1, 1, 2]


def test_a_loop_that_is_left_at_will_is_a_commit_and_is_over():
    training = Training()
    for _ in training.state.batches(range(4)):
        training.update()
        break
    assert training.state.step == 1
    assert b'"is_over": true' in training.record().meta


def test_a_loop_that_an_exception_ends_is_neither():
    training = Training()
    with contextlib.suppress(KeyError):
        for _ in training.state.batches(range(4)):
            training.update()
            raise KeyError
    assert training.state.step == 0
    assert training.committed.is_complete() is False  # nothing is known yet of what a step changes
    assert b'"is_over": false' in training.record().meta
    assert training.state._guard.gate.is_torn
    next(training.state.batches(range(4)))  # the script goes on nevertheless
    assert (training.state.step, training.state._guard.gate.is_torn) == (1, False)


def leaves_by(statement):
    namespace = {
        "left": [],
        "contextlib": contextlib,
        "torch_hooks": torch_hooks,
        "sys": __import__("sys"),
    }
    code = f"""
def batches():
    try:
        yield from range(3)
    except GeneratorExit:
        left.append(torch_hooks.is_left_regularly(sys._getframe(1)))
        raise

def around(inner):
    for each in inner:
        yield each

def script():
    {statement}
"""
    exec(code, namespace)
    with contextlib.suppress(ValueError):
        namespace["script"]()
    (left,) = namespace["left"]
    return left


@pytest.mark.parametrize(
    ("statement", "is_at_will"),
    [
        ("for _ in batches(): break", True),
        ("for _ in batches(): return 3", True),
        ("for _ in enumerate(batches()): break", True),
        ("for _ in around(enumerate(batches())): break", True),
        ("for _ in zip(batches(), range(9)): return [_]", True),
        ("for _ in batches():\n        with contextlib.nullcontext(): break", True),
        ("for _ in batches():\n        try: int('x')\n        except ValueError: break", True),
        ("for _ in batches(): int('x')", False),
        ("for _ in batches(): raise ValueError", False),
        ("for _ in around(batches()): int('x')", False),
        ("for _ in batches():\n        with contextlib.nullcontext(): int('x')", False),
        ("for _ in batches():\n        for _ in range(3): int('x')", False),
        ("for _ in batches():\n        try: int('x')\n        finally: print()", False),
        ("try:\n        for _ in batches(): int('x')\n    except ValueError: pass", False),
    ],
)
def test_python_tells_how_a_loop_was_left(statement, is_at_will):
    assert leaves_by(statement) is is_at_will


def test_weights_that_the_script_changes_are_an_update_too():
    training = Training()

    def change(_):
        before = training.net.weight.detach().clone()
        with torch.no_grad():
            training.net.weight.mul_(0.9)
        assert training.committed.is_touched()
        saved = training.committed.replica(training.state.step).tensors["model.weight"]
        assert torch.equal(saved, before)  # a copy: nobody can know where such weights change

    assert steps_over(training, range(3), change) == [0, 1, 2, 3]
    assert not training.committed.is_touched()


def test_weights_that_are_changed_for_a_validation_are_not():
    training = Training()
    steps_over(training, range(2), lambda _: training.update())
    with torch.no_grad():
        training.net.weight.mul_(0.9)
        assert steps_over(training, range(3), lambda _: None) == [2] * 4
        training.net.weight.div_(0.9)
    training.net.eval()
    assert steps_over(training, range(3), lambda _: None) == [2] * 4
    assert training.committed.is_touched()
    training.net.train()
    assert steps_over(training, range(1), lambda _: training.update()) == [2, 3]


def test_weights_that_are_changed_between_two_loops_are_no_step_but_can_be_saved():
    training = Training()
    steps_over(training, range(2), lambda _: training.update())
    before = training.net.weight.detach().clone()
    with torch.no_grad():
        training.net.weight.mul_(0.9)
    assert training.committed.why_changed() == ""
    saved = training.committed.replica(2).tensors["model.weight"]
    assert torch.equal(saved, before)
    assert steps_over(training, range(1), lambda _: None) == [2, 2]
    assert torch.equal(training.committed.replica(2).tensors["model.weight"], before)
    assert steps_over(training, range(1), lambda _: training.update()) == [2, 3]


def test_momentum_that_is_cleared_between_two_loops_is_in_the_commit():
    training = Training()
    steps_over(training, range(5), lambda _: training.update())
    before = {name: each.clone() for name, each in training.committed.replica(5).tensors.items()}
    assert any("momentum" in name for name in before)
    for kept in training.optimizer.state.values():
        kept["momentum_buffer"].zero_()
    assert training.committed.why_changed() == ""
    saved = training.committed.replica(5).tensors
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name]) for name in before)
    training.optimizer.state.clear()  # there is no place for a copy any more
    assert "momentum_buffer changed after step 5" in training.committed.why_changed()


def test_what_was_seen_to_be_changed_between_two_loops_is_copied_however_large(monkeypatch):
    monkeypatch.setattr(loop_end_copies, "COPIED_ANYWAY", 0)
    monkeypatch.setattr(loop_end_copies, "SHARE", 0)
    training = Training()
    for has_copy in (False, True):
        steps_over(training, range(5), lambda _: training.update())
        for kept in training.optimizer.state.values():
            kept["momentum_buffer"].zero_()
        assert (training.committed.why_changed() == "") is has_copy


def test_a_doubt_is_not_removed_by_what_changed_before_the_loop_began():
    """An average that is set anew between two loops may be due behind a collective in a step."""
    training = Training(ema=(ema := nn.Linear(3, 2)), scheduler=None)
    steps_over(training, range(5), lambda _: training.update())
    ema.load_state_dict(training.net.state_dict())
    next(iter(training.state.batches(range(3))))
    training.update()
    assert not training.committed.is_complete()


def test_a_loop_for_one_update_by_hand_behind_it_is_a_step():
    net = nn.Linear(4, 4)
    training = Training(model=net, optimizer=None, scheduler=None)
    for count in range(3):
        steps_over(training, range(2), lambda _: net(torch.ones(4)).sum().backward())
        with torch.no_grad():
            net.weight.sub_(net.weight.grad)
        net.zero_grad()
        assert training.state.step == count
    assert steps_over(training, range(1), lambda _: None) == [3, 3]


def test_a_save_between_two_loops_saves_what_the_loop_left(caplog):
    training = Training()
    steps_over(training, range(5), lambda _: training.update())
    with torch.no_grad():
        training.net.weight.mul_(0.9)
    training.state.save()
    assert training.state.step == 5
    assert "save() saves a step as its loop left it" in caplog.text
    assert not training.state.should_exit
    assert training.state.step == 5


def test_the_end_of_training_is_kept_while_the_script_goes_on():
    training = Training()
    for _ in training.state.epochs(1):
        steps_over(training, range(5), lambda _: training.update())
    before = training.net.weight.detach().clone()
    with torch.no_grad():
        training.net.weight.mul_(0.9)
    assert training.committed.why_changed() == ""
    assert torch.equal(training.committed.replica(5).tensors["model.weight"], before)


def test_a_commit_stays_as_it_was_while_another_loader_is_read():
    training = Training()
    first, second = list(range(3)), list(range(5))
    steps_over(training, first, lambda _: training.update())
    before, page = training.record(), training.committed.page
    learned = dict(
        zip((e.name for e in page.entries), training.committed.private.read(3), strict=True)
    )
    training.schedule.step()
    loop = training.state.batches(second)
    next(loop)
    assert training.committed.page is not page
    after = training.record()
    assert (after.meta, after.batch, after.step) == (before.meta, before.batch, before.step)
    for entry, octets in training.committed.private.read(3):
        if entry.name in learned:
            assert octets == learned[entry.name][1], entry.name
    value = training.committed.replica(3).rest
    assert '"last_epoch": 3' in value  # the schedule is as of the commit, not one further
    training.update()
    next(loop)
    assert (training.state.step, training.record().batch) == (4, 1)
    assert b'"place": 1' in training.record().meta
    page = training.committed.page
    steps_over(training, first, lambda _: training.update())
    assert training.committed.page is page  # it has room for both


def test_of_loaders_that_are_made_anew_only_the_last_are_kept():
    training = Training()
    for _ in range(20):
        steps_over(training, list(range(2)), lambda _: training.update())
    assert len(training.state._loop._feeds) == 8
    assert len(training.committed.page.entries) < 30


def test_what_changes_behind_backward_is_known_as_late():
    training = Training()
    norm = nn.BatchNorm1d(3)
    count = nn.Module()
    count.register_buffer("updates", torch.tensor(0))
    state = TrainState(model=[norm, count], optimizer=training.optimizer)
    for _ in state.batches(range(2)):
        training.net(norm(torch.randn(4, 3))).sum().backward()
        training.optimizer.step()
        count.updates += 1
    assert state._committed.private.late_buffers == {"model.1.updates"}
    replica = state._committed.replica(2)
    assert {entry.name: bytes(octets) for entry, octets in replica.buffers}["model.1.updates"][
        0
    ] == 2


def test_a_step_is_complete_when_all_has_changed_that_any_step_changed():
    training = Training(seldom=(seldom := torch.zeros(1)))

    def body(batch):
        training.update()
        if batch == 1:
            seldom.add_(1)
        elif batch == 3:
            assert not training.committed.is_complete()
            seldom.add_(1)
            assert training.committed.is_complete()

    steps_over(training, range(4), body)


class Seen:
    """Steps of a training, until what is changed in a step is known; then half of another one."""

    def __init__(self, seed=0, **objects):
        torch.manual_seed(seed)
        self.training = Training(**objects)

    def is_complete(self, behind=lambda _: None, between=lambda _: None):
        """Whether the step is taken for complete behind its update, before ``behind`` in it."""
        training, found = self.training, []

        def body(batch):
            training.update()
            if batch == 4:
                found.append(training.committed.is_complete())
            behind(training)

        for epoch in training.state.epochs(2):
            steps_over(training, range(3 if epoch == 0 else 5), body)
            between(training)
        return found[0]


def test_a_step_is_complete_behind_its_update_if_nothing_else_may_change():
    assert Seen().is_complete()


def test_a_step_in_which_something_has_not_changed_is_in_doubt():
    average = torch.zeros(3)
    assert not Seen(average=average).is_complete()  # it may be due every tenth step
    assert not Seen(average=average).is_complete(lambda _: average.data.add_(1))
    assert not Seen(average=average).is_complete(lambda _: average.add_(1))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert not Seen(teacher=frozen).is_complete()


class Best:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_what_was_seen_to_change_between_loops_makes_no_doubt():
    best = Best()
    assert not Seen(best=best).is_complete()
    assert Seen(best=best).is_complete(between=lambda _: setattr(best, "value", best.value + 1))


def test_weights_that_change_uncounted_behind_an_update_make_a_doubt():
    assert not Seen().is_complete(lambda training: training.net.weight.data.clamp_(-0.1, 0.1))


def test_random_numbers_behind_backward_make_a_doubt():
    assert not Seen().is_complete(lambda _: torch.randn(1))


def test_an_update_captured_in_a_graph_is_recognised_and_said(monkeypatch, caplog):
    training = Training()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with caplog.at_level(logging.WARNING, "msrun"):
        steps_over(training, range(2), lambda _: training.update())
    said = [line for line in caplog.messages if "CUDA graph" in line]
    assert len(said) == 1
    step, is_whole, why = training.state._guard.freeze(0.0)
    assert (step, is_whole) == (2, False)
    assert why in said[0]


def test_the_list_of_all_tensors_is_made_once():
    training, seen = Training(), []
    held = training.committed.changes
    steps_over(training, range(4), lambda _: (training.update(), seen.append(held._versions)))
    assert seen[-1].tensors is seen[-2].tensors
    assert len(seen[-1].tensors) == 4  # two parameters, two moments


def test_what_changes_between_loops_belongs_to_no_step():
    training = Training()

    def body(_):
        training.backward()
        training.optimizer.step()

    for _ in training.state.epochs(2):
        steps_over(training, range(3), body)
        training.schedule.step()
    assert training.committed.typical_changes == (
        0,
        1,
        0,
        0,
        0,
        0,
    )  # updates of each, then what moved


def test_the_end_of_training_is_behind_all_epochs():
    training = Training()
    for _ in training.state.epochs(2):
        for _ in training.state.batches(range(3)):
            training.update()
        with torch.no_grad():
            training.net.weight.mul_(0.9)
    assert training.state.step == 7  # the last change is behind the last step
    record = training.record()
    assert (record.epoch, record.batch) == (2, 0)


def test_a_loader_of_another_batch_size_than_before_a_death_is_refused(monkeypatch):
    training = Training()
    loop, guard = training.state._loop, training.state._guard
    monkeypatch.setattr(guard, "env", guard.env._replace(attempt=1))
    point = SimpleNamespace(ranks=(1, 1), feed={"batch_size": 4})
    with pytest.raises(ValueError, match="batches of 2, and made batches of 4"):
        loop._open(Feed(DataLoader(range(8), batch_size=2)), 0, point)


def test_samplers_are_told_their_epoch_only_by_epochs():
    loader = DataLoader(
        range(8), sampler=(sampler := DistributedSampler(range(8), num_replicas=2, rank=0))
    )
    training = Training()
    sampler.set_epoch(5)
    steps_over(training, loader, lambda _: None)
    assert sampler.epoch == 5
    for epoch in training.state.epochs(2):
        steps_over(training, loader, lambda _: None)
        assert sampler.epoch == epoch


def test_callbacks_hear_of_everything_in_its_order():
    said = []
    moments = ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")
    callback = SimpleNamespace(**{m: lambda _, m=m: said.append(m) for m in moments})
    training = Training(callbacks=[callback])
    for _ in training.state.epochs(1):
        for _ in training.state.batches(range(2)):
            training.update()
    step = ["step_begin", "step_end"]
    assert said == ["begin", "epoch_begin", *step, *step, "epoch_end", "end"]


def test_the_heartbeat_follows_the_step():
    training = Training()
    phases = []
    training.optimizer.register_step_pre_hook(lambda *_: phases.append(beat().phase))

    def beat():
        return training.committed.page.heartbeat()

    for _ in training.state.batches(range(2)):
        phases.append(beat().phase)
        training.net(torch.ones(1, 3)).sum().backward()
        phases.append(beat().phase)
        training.optimizer.step()
        phases.append(beat().phase)
    phases.append(beat().phase)
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.UPDATED]
    assert phases[:4] == [*step[:2], phases[2], step[3]]
    assert phases[-1] is Phase.IDLE
    assert beat().step == 2


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "not running under msrun, so this run is not protected"),
        ({"MS_ENABLE_TFT": "{TTP:0}"}, "this run is not protected: MS_ENABLE_TFT says so"),
        ({"RANK": "1"}, ""),
    ],
)
def test_one_line_says_that_nothing_guards_it(environ, said, monkeypatch, caplog):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "msrun"):
        training = Training()
        steps_over(training, range(2), lambda _: training.update())
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([f"TrainState: {said}"] if said else [])


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("is_recover", [1, 0])
def test_a_resume_that_finds_nothing_is_said(tmp_path, monkeypatch, caplog, is_recover, has_folder):
    monkeypatch.delenv("MSRUN_HOOKS", raising=False)
    place = str(tmp_path) if has_folder else None
    with caplog.at_level(logging.WARNING, "msrun"):
        TrainState(model=nn.Linear(1, 1), ckpt_save_path=place, is_recover=is_recover)
    where = f"in {tmp_path}" if has_folder else "(no ckpt_save_path says where it is)"
    wanted = f"there is nothing to resume {where}: training begins anew"
    assert [line for line in caplog.messages if "resume" in line] == [wanted] * is_recover


class Switching:
    """A callback as profilers are: it rebinds its own methods."""

    checkpoints = []  # noqa: RUF012  a list of its own, no folder

    def __init__(self):
        self.steps = []

    def begin(self, _state):
        self.step_end = self.started

    def started(self, state):
        self.steps.append(state.step)
        self.step_end = self.going

    def going(self, state):
        self.steps.append(-state.step)


def test_a_callback_may_rebind_its_methods_and_have_attributes_of_its_own():
    switching = Switching()
    training = Training(callbacks=[switching])
    steps_over(training, range(3), lambda _batch: training.update())
    assert switching.steps == [1, -2, -3]


def test_a_script_that_counts_its_epochs_itself_says_so():
    training = Training()
    training.state.epoch = 4
    steps_over(training, range(1), lambda _batch: training.update())
    assert training.state.epoch == training.record().epoch == 4


def test_gradients_that_wait_for_a_later_step_make_a_commit_no_place_to_resume_from():
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    often = torch.optim.SGD(body.parameters(), lr=0.1)
    seldom = torch.optim.SGD(head.parameters(), lr=0.1)
    state = TrainState(model=[body, head], optimizer=[often, seldom])
    committed, pending = state._committed, []
    for number, _ in enumerate(state.batches(range(6))):
        pending.append(bool(committed.why_pending))
        head(body(torch.ones(1, 2))).sum().backward()
        often.step()
        often.zero_grad()
        if number % 2:
            seldom.step()
            if number < 4:  # else what was used stays
                seldom.zero_grad()
    pending.append(bool(committed.why_pending))
    assert pending == [False, True, False, True, False, True, False]
    assert "gradients wait" not in committed.why_unknown()


def test_gradients_that_are_zero_wait_for_nothing():
    """An optimizer that is set to zero in place, and one that a resume has put back."""
    often, seldom = (torch.nn.Linear(2, 1) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (often, seldom)]
    state = TrainState(model=[often, seldom], optimizer=optimizers)
    committed, pending = state._committed, []
    for number, _ in enumerate(state.batches(range(6))):
        often(torch.ones(1, 2)).sum().backward()
        optimizers[0].step()
        if number == 2:
            committed._pending.forget()
        if number % 3 == 0:
            seldom(torch.ones(1, 2)).sum().backward()
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=False)
        pending.append(bool(committed.why_pending))
    assert pending == [False] * 6
    seldom.weight.grad.add_(1)
    committed._pending.committed([1, 1, 1, 0])
    assert committed.why_pending


def test_a_first_epoch_in_which_nothing_registered_is_updated_is_said_once(monkeypatch):
    """Parameters in a dict that each step replaces, as with ``torch.func``."""
    said = []
    monkeypatch.setattr(Guard, "say_unprotected", lambda _, text, **__: said.append(text))
    idle, training = Training(), Training()
    for _ in idle.state.epochs(3):
        for _ in idle.state.batches(range(2)):
            pass
    assert said == [NO_STEP]
    for _ in training.state.epochs(3):
        for _ in training.state.batches(range(2)):
            training.update()
    assert said == [NO_STEP]
