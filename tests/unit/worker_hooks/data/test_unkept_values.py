"""What changes in training and is kept nowhere is named; what is kept, or made anew, is not."""

import sys
from types import ModuleType

import pytest

from worker_hooks.data.unkept_values import UnkeptValues
from worker_hooks.script.kept import ScriptValues


class Script:
    """A process whose ``__main__`` has a source; ``step`` is run in each step."""

    def __init__(self, monkeypatch, path, source):
        path.write_text(source)
        self.main = ModuleType("__main__")
        self.main.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        exec(compile(source, str(path), "exec"), vars(self.main))
        registered = {"net": self.main.net} if hasattr(self.main, "net") else {}
        self.values = ScriptValues(registered.items)
        self.values.exclude(registered.values())
        self.values.find(vars(self.main).get("train"))
        self.values.begin()
        self.watch, self.steps = UnkeptValues(self.values), 0

    def step(self, statement="step()"):
        exec(statement, vars(self.main))
        self.steps += 1
        self.values.look(is_commit=True)
        return [each.split("`")[1] for each in self.watch.changed(is_first=self.steps == 1)]


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_A_TEST", "")
    monkeypatch.setenv("OF_OTHERS", "")
    return lambda source: Script(monkeypatch, tmp_path / "train.py", source)


CHANGING = {
    "an array that is filled in place": ("rows = np.zeros((20000, 8))", "rows[7] += 1", "rows"),
    "one of an object": (
        "replay = SimpleNamespace(rows=np.zeros((20000, 8)), at=0)",
        "replay.rows[replay.at] = 1; replay.at += 1",
        "replay.rows",
    ),
    "an object that hands out items": (
        "class Bank:\n    def __getitem__(self, at): return at\nbank = Bank(); bank.count = 0",
        "bank.count += 1",
        "bank",
    ),
    "an object with slots": (
        "class Small:\n    __slots__ = ('n',)\nsmall = Small()\nsmall.n = 0",
        "small.n += 1",
        "small",
    ),
    "a dict of an own class": ("class Bag(dict): pass\nbag = Bag(n=0)", "bag['n'] += 1", "bag"),
    "a large deque that is full": (
        "big = deque(range(9000), maxlen=9000)",
        "big.append(-len(big))",
        "big",
    ),
    "a value of a thread": (
        "import threading\nlocal = threading.local(); local.n = 0",
        "local.n += 1",
        "local",
    ),
    "a context's variable": (
        "from contextvars import ContextVar\nscale = ContextVar('scale', default=1)",
        "scale.set(scale.get() + 1)",
        "scale",
    ),
    "an attribute whose name is computed": (
        "from torch import nn\nnet = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))\nsetattr(net[1], 'gain_' + 'a', 1.0)",
        "setattr(net[1], 'gain_' + 'a', net[1].gain_a + 1)",
        "net.1.gain_a",
    ),
    "an attribute of a parameter, whose name is computed": (
        "from torch import nn\nnet = nn.Sequential(nn.Linear(1, 1))\nsetattr(net[0].bias, 'gain_' + 'a', 1.0)",
        "setattr(net[0].bias, 'gain_' + 'a', net[0].bias.gain_a + 1)",
        "net.0.bias.gain_a",
    ),
    "the environment": (
        "import os\nif 'OF_A_TEST' in os.environ: pass",
        "import os; os.environ['OF_A_TEST'] += 'x'; os.environ['OF_OTHERS'] += 'x'",
        "os.environ['OF_A_TEST']",
    ),
    "a count": ("count = itertools.count()", "next(count)", "count"),
    "a generator": ("stages = (n for n in range(9))", "next(stages)", "stages"),
    "an argument's default": (
        "def seen(x, box=[]):\n    box.append(x)",
        "seen(1)",
        "seen(box=...)",
    ),
    "a function with arguments": (
        "add = partial(lambda box: box.append(1), [])",
        "add()",
        "add",
    ),
    "an object deep in others": (
        "class A:\n    pass\na = A(); a.b = A(); a.b.c = A(); a.b.c.d = A(); a.b.c.d.n = 0",
        "a.b.c.d.n += 1",
        "a.b.c.d",
    ),
    "a generator of numpy that cannot be saved": (
        "rng = np.random.Generator(np.random.SFC64(1)).bit_generator",
        "rng.random_raw()",
        "rng",
    ),
}
HEAD = "import itertools\nimport numpy as np\nfrom collections import deque\nfrom functools import partial\nfrom types import SimpleNamespace\n"


@pytest.mark.parametrize("what", CHANGING)
def test_what_nothing_keeps_is_named_as_it_changes(script, what):
    source, change, name = CHANGING[what]
    one = script(HEAD + source)
    assert one.step("pass") == []
    assert one.step(change) == [name]
    assert one.step(change) + one.step(change) == []  # it was said


def test_what_is_given_another_object_later_is_named(script):
    one = script(
        "import enum\nfrom torch import nn\nfrom torch.nn import functional as F\n"
        "class Phase(enum.Enum):\n    WARM, MAIN = 1, 2\n"
        "class Stage:\n    def __init__(self): self.seen = 0\n"
        "class Trainer:\n    def __init__(self):\n"
        "        self.criterion, self.reg = nn.MSELoss(), F.l1_loss\n"
        "        self.phase, self.best = Phase.WARM, None\n"
        "        self.stages = [Stage(), Stage()]\n"
        "        self.stage, self.noise = self.stages[0], Stage()\n"
        "net, each, trainer = nn.Linear(1, 1), F.relu, Trainer()\n"
        "def step():\n    global each\n    each = F.tanh if each is F.relu else F.relu\n"
    )
    assert [one.step() for _ in range(3)] == [[], [], []]
    assert one.step(
        "step(); trainer.criterion, trainer.reg, trainer.phase, trainer.best = "
        "nn.L1Loss(), F.mse_loss, Phase.MAIN, nn.Linear(1, 1)"
    ) == ["trainer.criterion", "trainer.reg", "trainer.phase", "trainer.best"]
    change = "trainer.noise = Stage(); trainer.noise.seen = 3"  # whose attributes are kept
    assert one.step(change) == []
    assert one.step("trainer.stage = trainer.stages[1]") == ["trainer.stage"]


def test_what_a_parameter_is_given_while_training_is_named(script):
    one = script(
        "import torch\nfrom torch import nn\nnet = nn.Linear(1, 1)\n"
        "def step():\n"
        "    if not hasattr(net.bias, 'seen'):\n        net.bias.seen = 0\n"
        "        net.bias.mean = torch.zeros(1)\n"
        "    net.bias.seen += 1\n    net.bias.mean.add_(1)\n    return net.bias.mean\n"
    )
    assert one.step() == []
    assert one.step() == ["net.bias.seen", "net.bias.mean"]


def test_what_is_kept_or_read_or_wraps_what_is_registered_is_not_named(script):
    one = script(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Data(Dataset):\n    def __init__(self): self.reads = 0\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, at):\n        self.reads += 1\n        return torch.ones(1)\n"
        "class Meter:\n    def __init__(self): self.total, self.history = 0.0, []\n"
        "net, data, meter, meters = nn.Linear(1, 1), Data(), Meter(), [Meter(), Meter()]\n"
        "loader, wrapped, counts, lost = DataLoader(data), net, {}, None\n"
        "def step():\n    global lost, wrapped\n"
        "    [*loader]; meter.total += 1; meter.history.append(1); meters[0].total += 1\n"
        "    counts[len(counts)] = 1\n"
        "    if len(counts) == 3:\n        wrapped = nn.Sequential(net)\n"
        "    lost = torch.ones(3)\n"
    )
    assert [one.step() for _ in range(8)] == [[]] * 8


COLLECTING = (
    "import torch\nfrom torch import nn\n"
    "net, found, bank = nn.Linear(1, 40000), {}, torch.zeros(40000)\n"
    "def keep(module, args, out):\n    found['out'], found['parts'] = out, [out + 1, (out,)]\n"
    "net.register_forward_hook(keep)\n"
    "def step():\n    net(torch.ones(1, 1))\n"
)


def test_large_activations_that_each_step_collects_anew_are_not_named(script):
    one = script(COLLECTING)
    assert [one.step() for _ in range(4)] == [[]] * 4
    assert one.values.large == set()
    assert one.values.count == 0


def test_what_lies_beside_activations_is_named(script):
    one = script(COLLECTING)
    one.step("step(); found['bank'] = bank")
    assert one.values.large == {"found"}


def test_one_container_in_two_places_is_named_once(script):
    one = script(
        f"{HEAD}from torch.utils.data import DataLoader\n"
        "cfg = {'loader': DataLoader([1])}\ntrain = partial(print, cfg=cfg)\n"
    )
    assert one.step("pass") == []
    assert one.step("cfg['memo'] = 1") == ["cfg", "train"]  # and not train.cfg


def test_an_ignored_value_is_not_named(script):
    one = script("import numpy as np\nrows = np.zeros((20000, 8))\n")
    one.values.ignored.add("rows")
    assert one.step("rows[0] += 1") == []


def test_what_each_step_makes_anew_is_said_to_be_harmless_and_how_to_say_so(script):
    source = "import torch\nclass Trainer: pass\ntrainer = Trainer(); trainer.noise = None\n"
    change = "trainer.noise = torch.distributions.Normal(torch.randn(3), 1.0)"
    one = script(source)
    exec(change, vars(one.main))
    one.values.look(is_commit=True)
    (told,) = one.watch.changed(is_first=True)
    assert told.endswith(
        "that is harmless if each step sets it before it reads it: then say "
        "state.ignore('trainer.noise')"
    )
    other = script(source)
    other.values.ignored.add("trainer.noise")
    assert [other.step(change) for _ in range(3)] == [[]] * 3
