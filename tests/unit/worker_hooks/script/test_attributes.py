"""Attributes of modules, classes and functions, and objects in containers: saved and put back."""

import sys
import time
from types import ModuleType

import pytest
from torch import nn

from worker_hooks.script import attributes
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.values import Script

GUMBEL = """
import torch
from torch import nn

class Gumbel(nn.Module):
    floor = 0.1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tau, self.size, self.calls = 1.0, 2, 0
        self.history = []

    def forward(self, x):
        self.calls += 1  # nobody reads it
        self.tau = max(self.floor, self.tau * 0.5)
        self.history.append(self.tau)
        if not hasattr(self, "steps"):
            self.steps = 0
        self.steps += 1
        self.attention = self.layer(x) / self.tau * self.size / len(self.history) / self.steps
        return self.attention

net = Gumbel()
"""


class Rank:
    """A process whose ``__main__`` has a source; a part of its globals is registered."""

    def __init__(self, monkeypatch, path, registered=("net",), ignored=frozenset()):
        self.main = ModuleType("__main__")
        self.main.__file__ = str(path)
        self._monkeypatch = monkeypatch
        self._enter()
        exec(compile(path.read_text(), str(path), "exec"), vars(self.main))
        models = {name: vars(self.main)[name] for name in registered if name in vars(self.main)}
        self.values = ScriptValues(models.items)
        self.values.exclude(models.values())
        self.values.ignored |= ignored
        self.values.find(None)

    def _enter(self):
        self._monkeypatch.setitem(sys.modules, "__main__", self.main)

    def __getattr__(self, name):
        return getattr(self.main, name)

    def run(self, statement):
        exec(statement, vars(self.main))

    def commit(self, statement="", repeat=1):
        for _ in range(repeat):
            self.run(statement)
        self.values.look(is_commit=True)
        return self.saved()

    def restore(self, saved):
        self._enter()
        self.values.restore(saved)

    def saved(self):
        return Script.split(self.values.content)


@pytest.fixture
def rank(monkeypatch, tmp_path):
    path = tmp_path / "train.py"

    def made(source, **how):
        if not path.exists():
            path.write_text(source)
        return Rank(monkeypatch, path, **how)

    return made


FORWARD = "net(torch.ones(1, 2))"


def test_what_a_module_assigns_in_its_forward_comes_back(rank):
    one = rank(GUMBEL)
    saved = one.commit(FORWARD, repeat=2)
    assert saved.record.values == {
        "TrainState.net.tau": 0.25,
        "TrainState.net.steps": 2,
        "TrainState.net.history": saved.record.values["TrainState.net.history"],
    }
    again = rank(GUMBEL)
    history = again.net.history
    again.restore(saved)
    assert (again.net.tau, again.net.steps, again.net.history) == (0.25, 2, [0.5, 0.25])
    assert again.net.history is history
    assert again.net.calls == 0  # it is only counted


def test_a_survivor_undoes_what_the_interrupted_step_did_to_a_module(rank):
    one = rank(GUMBEL)
    saved = one.commit(FORWARD)
    one.run(FORWARD)
    one.values.look(is_commit=False)
    one.values.rewind()
    assert (one.net.tau, one.net.history, hasattr(one.net, "steps")) == (1.0, [], False)
    one.values.restore(saved)
    assert (one.net.tau, one.net.steps, one.net.history) == (0.5, 1, [0.5])


def test_what_the_script_assigns_to_modules_comes_back_of_library_classes_too(rank):
    source = (
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))\n"
        "def step():\n    net[1].p *= 0.5\n    net.stage = 3\n    setattr(net, 'scale', 2.0)\n"
        "def use():\n    return net.stage, getattr(net, 'scale', 1.0)\n"
    )
    saved = rank(source).commit("step()")
    assert saved.record.values == {
        "TrainState.net.1.p": 0.25,  # which the library reads
        "TrainState.net.stage": 3,
        "TrainState.net.scale": 2.0,
    }
    again = rank(source)
    again.restore(saved)
    assert (again.net[1].p, again.use()) == (0.25, (3, 2.0))


def test_what_is_assigned_in_a_subclass_a_hook_or_by_an_alias_is_found(rank):
    source = (
        "import torch\nfrom torch import nn\n"
        "class Base(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.n, self.seen, self.sums = 0, [], torch.zeros(2)\n"
        "        self.limit = 5\n"
        "        def hook(module, args):\n"
        "            self.n += 1\n"
        "        self.register_forward_pre_hook(hook)\n"
        "    def forward(self, x):\n"
        "        seen = self.seen\n"
        "        seen.append(self.n)\n"
        "        self.sums.add_(1)\n"
        "        return x + self.n + len(self.seen) + self.sums + self.limit\n"
        "class Net(Base):\n    pass\n"
        "net = Net()\n"
    )
    saved = rank(source).commit(FORWARD).record.values
    assert sorted(saved) == [f"TrainState.net.{each}" for each in ("n", "seen", "sums")]


def test_what_each_forward_makes_anew_is_not_kept(rank):
    source = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def forward(self, x):\n"
        "        self.x = x + 1\n"
        "        y = self.x * 2\n"
        "        self.was = y\n"
        "        return y\n"
        "    def other(self):\n"
        "        return self.was\n"
        "net = Net()\n"
    )
    saved = rank(source).commit(FORWARD).record.values
    assert set(saved) == {"TrainState.net.was"}  # another method may read it in the next step


def test_a_part_of_the_graph_is_no_value(rank):
    source = GUMBEL + "def show():\n    return net.attention\n"
    one = rank(source)
    names = set(one.commit(FORWARD).record.values)
    assert {each.rpartition(".")[2] for each in names} == {"tau", "steps", "history"}
    one.net.attention = one.net.attention.detach()
    assert "TrainState.net.attention" in one.commit().record.values


def test_modules_that_nobody_registered_come_back_too(rank):
    source = GUMBEL + "criterion = Gumbel()\n"
    saved = rank(source).commit("criterion(torch.ones(1, 2))")
    assert saved.record.values["criterion.tau"] == 0.5
    again = rank(source)
    again.restore(saved)
    assert (again.criterion.tau, again.net.tau) == (0.5, 1.0)


def test_a_module_that_is_made_later_is_followed(rank):
    source = GUMBEL + "criterion = None\n"
    make = "criterion = Gumbel()"
    one = rank(source)
    for times in (2, 1):  # the second instead of the first
        one.commit(make)
        one.commit("criterion(torch.ones(1, 2))", repeat=times)
        assert one.saved().record.values["criterion.tau"] == 0.5**times
    again = rank(source)
    again.run(make)
    again.restore(one.saved())
    assert again.criterion.tau == 0.5


def test_classes_and_functions_come_back(rank):
    source = (
        "class Config:\n    step, fixed = 0, 1\n    @classmethod\n    def tick(cls):\n"
        "        cls.ticks = getattr(cls, 'ticks', 0) + 1\n"
        "class Other:\n    step = 0\n    def count(self):\n        type(self).n = 4\n"
        "def train():\n    Config.step += 1\n    Config.tick()\n    Other().count()\n"
        "    train.calls = getattr(train, 'calls', 0) + 1\n"
        "    return Config.step, Config.fixed, train.calls, Config.ticks, Other.n\n"
    )
    one = rank(source)
    saved = one.commit("train()")
    assert saved.record.values == {
        "Config.step": 1,
        "Config.ticks": 1,
        "Other.n": 4,
        "train.__dict__.calls": 1,
    }
    again = rank(source)
    again.restore(saved)
    assert again.train() == (2, 1, 2, 2, 4)
    again.values.look(is_commit=False)
    again.values.rewind()
    assert (again.Config.step, hasattr(again.train, "calls")) == (0, False)


METERS = """
class Meter:
    def __init__(self):
        self.total = 0.0

meters = {"loss": Meter(), "acc": Meter()}
pair = [Meter(), (Meter(),)]
"""


def test_objects_in_containers_come_back(rank):
    one = rank(METERS)
    saved = one.commit("meters['loss'].total = 2.0\npair[0].total = 3.0\npair[1][0].total = 4.0")
    assert saved.record.values == {
        "meters[loss].total": 2.0,
        "pair[0].total": 3.0,
        "pair[1][0].total": 4.0,
    }
    again = rank(METERS)
    again.restore(saved)
    assert again.meters["loss"].total == 2.0
    assert (again.pair[0].total, again.pair[1][0].total) == (3.0, 4.0)
    assert again.values.is_registered(again.meters)
    assert again.values.changes_of_data(is_first=False) == []


def test_objects_that_are_made_anew_in_a_container_are_followed(rank):
    one = rank(METERS)
    one.commit("meters['loss'].total = 2.0")
    one.commit("meters['loss'] = Meter()\nmeters['loss'].total = 5.0")
    assert one.saved().record.values["meters[loss].total"] == 5.0
    one.commit("meters = {'loss': Meter(), 'acc': Meter()}\nmeters['acc'].total = 6.0")
    assert one.saved().record.values["meters[acc].total"] == 6.0
    assert one.values.changes_of_data(is_first=False) == []


@pytest.mark.parametrize(
    ("begin", "change"),
    [
        ("", "meters['more'] = Meter()"),
        ("", "del meters['acc']"),
        ("", "del meters['acc']\nmeters['more'] = Meter()"),
        ("meters = {}", "meters['loss'] = Meter()"),
        ("meters = {}", "meters = {'loss': Meter()}"),
        ("meters = {'a': {}}", "meters['a']['loss'] = Meter()"),
        (
            "from collections import defaultdict\nmeters = defaultdict(Meter)",
            "meters['loss'].total = 1.0",
        ),
        ("meters = [Meter() for _ in range(100)]", "meters.append(Meter())"),
    ],
)
def test_a_container_of_objects_that_changes_its_length_is_named_once(rank, begin, change):
    one = rank(METERS + begin + "\n")
    one.values.begin()
    one.commit()
    assert one.values.changes_of_data(is_first=True) == []
    one.commit(change)
    assert [each[:9] for each in one.values.changes_of_data(is_first=False)] == ["`meters` "]
    one.commit("meters.clear()")
    assert one.values.changes_of_data(is_first=False) == []


def test_objects_that_are_added_before_the_first_loop_come_back(rank):
    one = rank(METERS)
    one.run("meters['more'] = Meter()")
    one.values.begin()
    saved = one.commit("meters['more'].total = 2.0")
    assert saved.record.values == {"meters[more].total": 2.0}
    assert one.values.changes_of_data(is_first=False) == []
    again = rank(METERS)
    again.run("meters['more'] = Meter()")
    again.restore(saved)
    again.values.begin()
    assert again.meters["more"].total == 2.0
    assert again.values.changes_of_data(is_first=False) == []


def test_objects_that_are_added_keep_what_they_have(rank):
    """They are not saved, so that nothing could be put back."""
    one = rank(METERS)
    one.values.begin()
    one.commit("meters['more'] = Meter()")
    one.commit("pair[0] = Meter()\nmeters['more'].total = 3.0")  # the former is followed
    one.values.rewind()
    assert one.meters["more"].total == 3.0


def test_containers_of_an_object_that_is_made_later_are_followed(rank):
    source = METERS + "class Trainer:\n    pass\ntrainer = None\n"
    make = "trainer = Trainer()\ntrainer.meters = [Meter()]\n"
    one = rank(source)
    one.commit(make)
    one.commit("trainer.meters[0].total = 3.0")
    assert one.saved().record.values["trainer.meters[0].total"] == 3.0
    assert one.values.changes_of_data(is_first=False) == []
    again = rank(source)
    again.run(make)
    again.restore(one.saved())
    assert again.trainer.meters[0].total == 3.0


def test_an_optimizer_of_the_scripts_own_keeps_its_attributes(rank):
    source = (
        "import torch\n"
        "class Slow(torch.optim.SGD):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n        self.count = 0\n"
        "    def step(self):\n"
        "        self.count += 1\n        self.state['k'] = 1 / self.count\n"
        "        return self.state\n"
        "net = Slow([torch.nn.Parameter(torch.zeros(1))], lr=1.0)\n"
    )
    assert rank(source).commit("net.step()").record.values == {"TrainState.net.count": 1}


def test_an_object_in_a_module_is_looked_into(rank):
    source = GUMBEL.replace("net = Gumbel()", "") + METERS
    source += "net = Gumbel()\nnet.layer.meter = Meter()\n"
    saved = rank(source).commit("net.layer.meter.total = 2.0")
    assert saved.record.values == {"TrainState.net.layer.meter.total": 2.0}


def test_an_ignored_attribute_is_left_alone(rank):
    one = rank(GUMBEL, ignored={"tau", "history"})
    assert set(one.commit(FORWARD).record.values) == {"TrainState.net.steps"}


def test_a_model_without_assigned_attributes_is_not_looked_at(rank):
    source = (
        "from torch import nn\n"
        "class Block(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(1, 1)\n        self.scale = 2.0\n"
        "    def forward(self, x):\n        return super().forward(x) * self.scale\n"
        "net = nn.Sequential(*[Block() for _ in range(200)])\n"
    )
    assert rank(source).values.owners().keys() == {
        "script.state.own.",
        "script.state.shared.",
        "script.",
        "script.TrainState.net.flags.",
    }


def test_a_long_source_is_read_fast():
    lines = [f"    def method_{i}(self, x):\n        self.v{i} = x + self.v{i}" for i in range(500)]
    text = "class Net:\n" + "\n".join(lines)
    took = []
    for _ in range(5):
        began = time.process_time()
        found = attributes.read([("__main__", text)])
        took.append(time.process_time() - began)
    assert len(found.of_self["__main__", "Net"]) == 500
    assert min(took) < 0.3  # 0.03 where nothing else runs


def test_a_tensor_that_is_too_large_is_said(rank, caplog):
    source = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.mean = torch.zeros(20_000)\n"
        "    def forward(self, x):\n        self.mean = self.mean + 1\n        return x\n"
        "net = Net()\n"
    )
    assert rank(source).commit(FORWARD).record.values == {}
    assert "TrainState.net.mean changes while training and is larger than 64 KiB" in caplog.text


@pytest.mark.parametrize(
    "made", ["random.Random(5)", "numpy.random.default_rng(5)", "torch.Generator()"]
)
def test_a_generator_in_a_module_is_given_out_although_nothing_assigns_it(rank, made):
    source = (
        "import random, numpy, torch\nfrom torch import nn\n"
        "class Drop(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        f"        self.luck, self.rate = {made}, 0.5\n"
        "net = nn.Sequential(nn.Linear(2, 2), Drop())\n"
    )
    owners = rank(source).values.owners()
    (found,) = (vars(each) for name, each in owners.items() if name.endswith("TrainState.net.1."))
    assert found.keys() == {"luck"}


def test_an_iterator_in_a_module_is_named_once(rank):
    source = (
        "import itertools, torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.turns, self.names = itertools.count(), itertools.count()\n"
        "    def forward(self, x):\n        return x * next(self.turns)\n"
        "net = Net()\n"
    )
    one = rank(source)
    (said,) = one.values.changes_of_data(is_first=True)
    assert said.startswith("`TrainState.net.turns` is an iterator, and begins anew after a")
    one.commit(FORWARD)
    assert one.values.changes_of_data(is_first=False) == []


def test_generators_in_attributes_are_given_out(rank):
    one = rank(GUMBEL)
    one.net.tau = nn.Identity()  # of any kind
    assert {type(each).__name__ for each in one.values.owners().values()} == {"SimpleNamespace"}


def test_flags_that_the_first_epoch_alone_sets_are_saved(rank):
    one = rank("from torch import nn\nnet = nn.Linear(1, 1)\n")
    one.run("net.bias.requires_grad_(False)")  # behind the top of its script
    one.values.begin()
    assert one.commit().record.values == {"TrainState.net.flags.requires_grad": "30"}


def test_what_the_script_keeps_on_its_parameters_comes_back(rank):
    source = (
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))\n"
        "for each in net.parameters():\n    each.ema, each.scale = 0.0, 2.0\n"
        "net[1].running_mean.seen = torch.zeros(2)\n"
        "def step():\n"
        "    for each in net.parameters():\n        each.ema = 0.5 * each.ema + each.scale\n"
        "    net[1].running_mean.seen.add_(1)\n"
        "    return net[1].running_mean.seen\n"
    )
    one = rank(source)
    saved = one.commit("step()", repeat=2)
    of_parameters = ("0.bias", "0.weight", "1.bias", "1.weight")
    assert saved.record.values.keys() == {
        *(f"TrainState.net.{each}.ema" for each in of_parameters),
        "TrainState.net.1.running_mean.seen",
    }
    again = rank(source)
    again.restore(saved)
    assert [each.ema for each in again.net.parameters()] == [3.0] * 4
    assert again.net[1].running_mean.seen.tolist() == [2, 2]


HOOKED = """
import torch
from functools import partial
from torch import nn

class Clip:
    def __init__(self):
        self.norms = []
    def __call__(self, grad):
        self.norms.append(1.0)
        return grad * len(self.norms)

class Meter:
    def __init__(self):
        self.seen = 0
    def look(self, module, args):
        self.seen += 1

def counting(box):
    calls = {"n": 0}
    def hook(module, *_):
        calls["n"] += 1
        box[0] += 2
    return hook

meter, clip = Meter(), Clip()
net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for each in net:
    each.register_forward_hook(counting([0]))
net.register_forward_pre_hook(meter.look)
net[0].register_forward_pre_hook(Meter().look)
net[0].weight.register_hook(Clip())
net[0].bias.register_post_accumulate_grad_hook(partial(lambda box, grad: box.append(1), []))
opt.register_step_post_hook(lambda *_: clip.norms.append(1))
opt.register_step_pre_hook(counting([5]))
"""


def test_what_hooks_of_modules_parameters_and_optimizers_count_comes_back(rank):
    one = rank(HOOKED, registered=("net", "opt"))
    step = f"{FORWARD}.sum().backward(); opt.step()"
    saved = one.commit(step, repeat=3)
    again = rank(HOOKED, registered=("net", "opt"))
    again.restore(saved)
    assert again.meter.seen == 3
    assert again.clip.norms == [1, 1, 1]
    assert again.commit().record.values == saved.record.values
    forward, pre = again.net[1]._forward_hooks, again.net[0]._forward_pre_hooks
    (hook,), (look,), (clip,) = (
        each.values() for each in (forward, pre, again.net[0].weight._backward_hooks)
    )
    assert sorted(str(each.cell_contents) for each in hook.__closure__) == ["[6]", "{'n': 3}"]
    assert look.__self__.seen == 3
    assert clip.norms == [1.0] * 3
    assert "meter.seen" in saved.record.values  # the name that the script has for it


def test_hooks_of_a_module_that_is_not_registered_are_followed(rank):
    one = rank(HOOKED, registered=())
    saved = one.commit(FORWARD, repeat=2)
    again = rank(HOOKED, registered=())
    again.restore(saved)
    assert again.commit().record.values == saved.record.values
    (hook,) = again.net[0]._forward_hooks.values()
    assert "{'n': 2}" in [str(each.cell_contents) for each in hook.__closure__]


def test_an_object_that_each_step_replaces_is_named_once_it_is_followed_no_more(rank):
    one = rank(
        "from dataclasses import dataclass, replace\n"
        "@dataclass(frozen=True)\nclass Progress:\n    n: int = 0\n"
        "progress = Progress()\n"
    )
    one.values.begin()
    said = []
    for step in range(1, 60):
        values = one.commit("progress = replace(progress, n=progress.n + 1)").record.values
        said += one.values.changes_of_data(is_first=False)
        assert values == ({} if said else {"progress.n": step})  # never an old one
    assert [each.split("`")[1] for each in said] == ["progress"]
