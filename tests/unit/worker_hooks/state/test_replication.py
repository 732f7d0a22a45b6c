"""What a rank reports of its state, and when."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_hooks

from worker_hooks.contract.fingerprint import UNSEEN, differences
from worker_hooks.script.kept import ScriptValues
from worker_hooks.state import replication
from worker_hooks.state.registry import pieces_of
from worker_hooks.state.replication import COMMITS, Replication, fingerprint
from worker_hooks.state.stateful import RankObjects
from worker_hooks.tensors.placements import TRAINED_BY_ZERO


class Training:
    """One rank, whose reports are kept."""

    def __init__(self, seed=1, layers=(4, 4), **more):
        torch.manual_seed(seed)
        self.net = nn.Sequential(*(nn.Linear(4, each) for each in layers))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.pieces = pieces_of({"model": self.net, "optimizer": self.optimizer, **more})
        self.reports = []
        self.distrusts = []
        self.unseen = 0
        self.replication = Replication(
            self.pieces,
            lambda *told: self.reports.append(told),
            self.distrusts.append,
            unseen_steps=lambda: self.unseen,
        )
        self.count = 0

    def step(self):
        torch.manual_seed(self.count)
        self.net(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.count += 1
        self.replication.committed(self.count)


def names_of(one, two):
    found = differences({0: fingerprint(one.pieces), 1: fingerprint(two.pieces)})
    return [each.name for each in found]


def test_equal_trainings_look_equal_and_one_bit_does_not():
    one, two = Training(), Training()
    one.step()
    two.step()
    assert names_of(one, two) == []
    bits = two.net[1].weight.data.view(torch.int32)
    bits[0, 0] ^= 1
    assert names_of(one, two) == ["model.1.weight"]


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_group_is_compared_by_its_values(key):
    one, two = Training(), Training()
    two.optimizer.param_groups[0][key] = 0.25
    (found,) = differences({0: fingerprint(one.pieces), 1: fingerprint(two.pieces)})
    assert found.name == f"optimizer.groups.0.{key}"
    assert f"0.25 on rank 1, {one.optimizer.param_groups[0][key]} on rank 0" in found.describe()


def test_the_state_of_an_optimizer_and_other_shapes_are_compared():
    one, two = Training(), Training()
    one.step()
    two.step()
    two.optimizer.state[two.net[0].bias]["exp_avg"].add_(1)
    assert names_of(one, two) == ["optimizer.state.1.exp_avg"]
    (found,) = differences(
        {
            0: fingerprint(pieces_of({"w": torch.zeros(4)})),
            1: fingerprint(pieces_of({"w": torch.zeros(2, 2)})),
        }
    )
    assert found.name == "w"


def test_the_first_commits_are_reported_and_then_only_what_is_new():
    training = Training()
    for _ in range(5):
        training.step()
    assert [(step, is_late) for step, _, is_late, *_ in training.reports] == [
        (1, False),
        (2, False),
    ]
    grown = nn.Linear(4, 4)
    training.net.append(grown)
    training.optimizer.add_param_group({"params": grown.parameters()})
    training.step()
    _, _, late = training.reports
    assert late[0] == 6
    assert late[2]
    assert {name for name in late[1] if name.startswith("model")} == {
        "model.2.weight",
        "model.2.bias",
    }
    training.step()
    assert len(training.reports) == COMMITS + 1


def test_until_when_a_state_is_not_known_is_reported_before_it_is_compared_and_that_it_is_over():
    training = Training()
    for training.unseen in (2, 1, 0, 0):
        training.step()
    told = [(step, [*texts]) for step, texts, _, problem, *_ in training.reports if problem]
    assert told == [(1, [f"{UNSEEN}3"]), (3, [UNSEEN])]
    assert [bool(problem) for *_, problem, _, _ in training.reports] == [True, False, False, True]


class Counter:
    def __init__(self, size):
        self.tensor, self.note = torch.zeros(size), 0

    def state_dict(self):
        return {"tensor": self.tensor, "note": self.note}

    def load_state_dict(self, state):
        self.tensor, self.note = state["tensor"], state["note"]


def test_an_object_that_is_too_large_for_each_rank_to_keep_its_own_is_compared_now_and_then():
    objects = {"small": Counter(2), "large": Counter(1 << 16)}
    training = Training(**objects)
    training.replication._script = script = ScriptValues(objects=RankObjects(training.pieces))
    script.begin()
    for number in range(1, 2050):
        training.replication.committed(number)
    full, reports = training.reports[:COMMITS], training.reports[COMMITS:]
    reports = [each for each in reports if each[0] not in LOOKS]
    assert {name.partition(".")[0] for name in full[0][1]} == {"model", "optimizer", "large"}
    assert [step for step, *_ in reports] == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert not any(is_late for _, _, is_late, *_ in reports)
    assert {*reports[0][1]} >= {"large.tensor", "large.note"}
    assert all(name.startswith("large") for _, texts, *_ in reports for name in texts)
    assert reports[0][4] == full[0][4]  # what is compared, for people
    objects["large"].note = 1
    training.replication.committed(3072)
    assert training.reports[-1][1]["large.note"] == "=1"
    objects["small"].tensor = torch.zeros(1 << 16)  # from now on it is compared, too
    script.look(is_commit=True)
    training.replication.committed(3073)
    step, texts, is_late, *_ = training.reports[-1]
    assert (step, is_late) == (3073, True)
    assert "small.tensor" in texts


LOOKS = [6, 11, 20, 37, 70, 135, 264, 521, 1034, 2059]


def test_all_of_it_is_compared_again_now_and_then():
    """Ranks may train apart behind a warm-up, and average what they hold at every eighth step."""
    training = Training()
    for number in range(1, 2060):
        training.replication.committed(number)
    full, reports = training.reports[:COMMITS], training.reports[COMMITS:]
    assert [step for step, *_ in reports] == LOOKS
    assert [(*about, is_again) for _, _, *about, is_again in (*full, *reports)] == [
        (False, "", "1 module, 1 optimizer", step > COMMITS) for step in (1, 2, *LOOKS)
    ]
    assert all(texts == full[1][1] for _, texts, *_ in reports)
    assert len({step % 8 for step in LOOKS}) > 5


def test_another_attempt_is_compared_in_full():
    training = Training()
    for _ in range(3):
        training.step()
    training.replication.begin_again()
    training.step()
    step, texts, is_late, problem, holds, _ = training.reports[-1]
    assert (step, is_late, problem) == (4, False, "")
    assert texts.keys() == training.reports[0][1].keys()
    assert holds == "1 module, 1 optimizer"


def test_a_model_that_lost_its_parameters_is_reported_before_the_first_step():
    training = Training()
    training.replication.training_begins(0, "")
    assert training.reports == []
    training.net[0].weight = nn.Parameter(torch.zeros(4, 4))
    training.replication.training_begins(0, "")
    ((step, texts, _, problem, *_),) = training.reports
    assert (step, texts) == (0, {})
    assert (
        problem
        == "model.0.weight is replaced in the model, but not in the optimizer that was given"
    )


@pytest.mark.parametrize("is_of_the_model", [True, False])
def test_a_model_that_zero_trains_is_reported_before_the_first_commit(monkeypatch, is_of_the_model):
    class Zero(torch.optim.SGD):
        """As ``ZeroRedundancyOptimizer``, which needs process groups."""

    monkeypatch.setattr(replication, "is_zero", lambda each: isinstance(each, Zero))
    training = Training()
    other = nn.Linear(4, 4)
    zero = Zero((training.net if is_of_the_model else other).parameters(), lr=0.1)
    training.replication.training_begins(0, "")
    hooks = len(optimizer_hooks)
    for each in (training.net[0], other):
        each.weight.grad = torch.ones(4, 4)
    zero.step()
    problems = [problem for _, _, _, problem, *_ in training.reports]
    assert problems == training.distrusts == ([TRAINED_BY_ZERO] if is_of_the_model else [])
    for _ in range(COMMITS):
        training.step()
    assert len(optimizer_hooks) == hooks - 1  # nothing is left of the watch


def test_what_cannot_be_read_is_a_problem_and_no_exception():
    training = Training()
    training.net[0].weight = nn.Parameter(torch.zeros(4, 4).to_sparse(), requires_grad=False)
    training.replication.committed(1)
    (report,) = training.reports
    assert "model.0.weight" in report[3]


def test_a_jump_of_the_learning_rate_is_said_with_both_values(caplog):
    training = Training()
    training.step()
    training.replication.resumed()
    training.step()
    assert not caplog.messages
    training.replication.resumed()
    training.optimizer.param_groups[0]["lr"] = 0.5
    training.step()
    (said,) = caplog.messages
    assert "was 0.1 at the checkpoint and is 0.5 at step 3" in said
