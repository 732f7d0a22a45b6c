"""Objects that train beside the registered state are named once they have changed."""

import copy
import gc
import sys
from types import ModuleType

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from worker_hooks.script import unregistered
from worker_hooks.script.unregistered import Unregistered
from worker_hooks.script.watch import groups_of
from worker_hooks.state.registry import pieces_of, saved_state

never = frozenset().__contains__


@pytest.fixture
def script(monkeypatch, tmp_path):
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


class Model:
    """A registered model with its optimizer, and what may stand beside it."""

    def __init__(self, main, registered=("net", "opt")):
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.opt = torch.optim.Adam(self.net.parameters())
        vars(main).update(net=self.net, opt=self.opt)
        self.main = main
        self.watch = Unregistered({each: getattr(self, each) for each in registered})
        self.said = []

    def begin(self, is_ignored=never, **values):
        vars(self.main).update(values)
        self.said = self.watch.begin(groups_of(None), [sys._getframe(1)], is_ignored)

    def step(self, is_kept=never, scheduler=None):
        self.net(torch.ones(1, 4)).sum().backward()
        self.opt.step()
        if scheduler is not None:
            scheduler.step()
        self.said += self.watch.changed(is_kept)
        return self.said


def test_an_average_of_the_weights_is_named_once_it_has_changed(script):
    model = Model(script)
    ema, quiet = AveragedModel(model.net), AveragedModel(model.net)
    teacher = copy.deepcopy(model.net)  # frozen
    wrapped = torch.nn.ModuleList([model.net])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model.begin(lambda name: name == "quiet")
    assert (model.step(), teacher is None, wrapped is None, scaler is None) == (
        [],
        False,
        False,
        False,
    )
    ema.update_parameters(model.net)
    quiet.update_parameters(model.net)
    (said,) = model.step()
    assert said == (
        "`ema` (AveragedModel) changes while training and is not registered, so it begins anew "
        "after a replacement or resume: give it to TrainState(ema=ema)"
    )
    assert model.step() == model.step() == [said]


def test_a_change_through_data_is_seen(script):
    model = Model(script)
    model.begin(teacher=copy.deepcopy(model.net))
    for each in script.teacher.parameters():
        each.data.mul_(0.5)
    (said,) = model.step()
    assert said.startswith("`teacher` (Sequential)")


def test_schedulers_optimizers_and_scalers_in_variables_are_named(script):
    model = Model(script, registered=("net",))
    sched = torch.optim.lr_scheduler.StepLR(model.opt, 1)
    model.begin()
    said = model.step(scheduler=sched)
    assert [each.partition(" changes")[0] for each in said] == ["`opt` (Adam)", "`sched` (StepLR)"]
    assert "TrainState(sched=sched)" in said[1]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_is_not_registered_with_its_scheduler(script, kind):
    """Plain SGD has nothing but the rate, which the scheduler sets."""
    model = Model(script)
    model.opt = script.opt = kind(model.net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(model.opt, 1)
    model.watch = Unregistered({"net": model.net, "scheduler": scheduler})
    model.begin()
    (said,) = model.step(scheduler=scheduler)
    assert said.startswith(f"`opt` ({kind.__name__}) changes while training and is not registered")


class Shares(torch.optim.Optimizer):
    """As ``ZeroRedundancyOptimizer``: another one has its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.optim = torch.optim.Adam(self.param_groups[0]["params"])

    def step(self, closure=None):
        self.optim.step(closure)


def test_an_optimizer_whose_state_another_one_has_is_named(script):
    model = Model(script)
    model.opt = script.opt = Shares(model.net.parameters())
    model.watch = Unregistered({"net": model.net})
    model.begin()
    (said,) = model.step()
    assert said.startswith("`opt` (Shares) changes while training and is not registered")


def test_so_is_one_of_which_only_that_other_one_is_registered_once_its_rate_changes(script):
    model = Model(script)
    model.opt = script.opt = Shares(model.net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(model.opt, 1)
    model.watch = Unregistered({"all": [model.net, model.opt.optim, scheduler]})
    model.begin()
    (said,) = model.step(scheduler=scheduler)
    assert said.startswith("`opt` (Shares) changes while training and is not registered")


def test_a_global_scheduler_is_saved_as_the_scripts_own_values_are(script):
    model = Model(script)
    model.begin(sched=torch.optim.lr_scheduler.StepLR(model.opt, 1))
    assert model.step(scheduler=script.sched) == []


def test_wrappers_of_registered_objects_and_parts_of_them_are_no_state_of_their_own(script):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

        @property
        def state(self):
            return self.optimizer.state

    model = Model(script)
    warmup = torch.optim.lr_scheduler.LinearLR(model.opt)
    both = torch.optim.lr_scheduler.ChainedScheduler([warmup])
    model.watch = Unregistered({"model": model.net, "opt": model.opt, "both": both})
    wrapped, part = Wrapper(model.opt), model.net[0]
    model.begin()
    assert model.step(scheduler=both) == []
    assert (wrapped, part) != (None, None)


def test_what_the_loops_variables_keep_is_not_named(script):
    class Mean:
        def __init__(self):
            self.total = torch.zeros(2)

    Mean.__module__ = "__main__"
    model = Model(script)
    kept, other = Mean(), Mean()
    model.begin()
    kept.total += 1
    other.total += 1
    said = model.step(lambda name: name == "kept")
    assert [each.partition(" changes")[0] for each in said] == ["`other` (Mean)"]


def test_a_parameter_that_is_in_no_registered_module_is_named_at_once(script):
    model = Model(script)
    scale = torch.nn.Parameter(torch.ones(3, 2))
    model.opt.add_param_group({"params": [scale]})
    model.begin()
    (said,) = model.said
    assert said.startswith("the optimizer updates a parameter of shape (3, 2) that is in no")


def test_a_module_of_its_own_is_named_itself(script):
    model = Model(script)
    head = torch.nn.Linear(4, 1)
    model.opt.add_param_group({"params": head.parameters()})
    model.begin()
    assert model.said == []
    head(torch.ones(4)).sum().backward()
    (said,) = model.step()
    assert said.startswith("`head` (Linear)")


class Sharded(torch.Tensor):
    """As DTensor: to read an element is a collective."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.reshape:
            raise AssertionError("a collective that the other ranks do not join")
        return super().__torch_function__(function, types, args, kwargs or {})


class Odd:
    def __getattr__(self, name):
        raise ValueError(name)


def test_what_cannot_be_read_is_left_alone_and_a_sharded_tensor_is_not_read(script):
    model = Model(script)
    sharded = torch.nn.Linear(2, 2)
    sharded.weight = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(Sharded))
    assert type(sharded.weight) is Sharded
    without_memory, lazy = torch.nn.Linear(2, 2, device="meta"), torch.nn.LazyLinear(2)
    model.begin(odd=Odd(), sharded=sharded)
    with torch.no_grad():
        sharded.weight.add_(1)
        lazy(torch.ones(1, 3))
    said = model.step()
    assert [each.partition(" changes")[0] for each in said] == ["`sharded` (Linear)"]
    assert without_memory.weight.is_meta


def test_what_is_gone_is_not_kept_alive(script):
    model = Model(script)
    model.begin(scratch=copy.deepcopy(model.net))
    del script.scratch
    assert model.step() == []
    assert not model.watch._candidates


class Noam:
    """The warm-up of "Attention is all you need", as it is written in many tutorials."""

    def __init__(self, optimizer, *, saves):
        self.optimizer, self.saves, self.n = optimizer, saves, 0

    def step(self):
        self.n += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.n / 100
        self.optimizer.step()

    def state_dict(self):
        state = {"n": self.n}
        match self.saves:
            case "nested":
                state["adam"] = {"of": self.optimizer.state_dict()}
            case "copied":
                state["adam"] = copy.deepcopy(self.optimizer.state_dict())
            case "its state":
                state |= self.optimizer.state_dict()["state"]
            case "before":
                state["adam"] = {"state": {}, "param_groups": [{"lr": 0.0}]}
        return state

    def load_state_dict(self, state):
        raise NotImplementedError


def of_pieces(objects):
    """What is saved of these at a commit."""
    pieces = pieces_of(objects)

    def state_of(name):
        for each in pieces:
            each.snapshot()
        return saved_state(pieces, name)

    return state_of


@pytest.mark.parametrize("saves", ["nested", "copied", "its state"])
def test_a_wrapper_that_saves_its_optimizer_is_not_named(script, saves):
    model = Model(script)
    model.opt = script.opt = Noam(model.opt, saves=saves)
    registered = {"model": model.net, "warm": model.opt}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    assert [model.step() for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize("saves", ["nothing", "before"])
def test_an_optimizer_that_a_registered_wrapper_leaves_out_is_named(script, saves):
    model = Model(script)
    adam = script.adam = model.opt
    model.opt = script.opt = Noam(adam, saves=saves)
    registered = {"model": model.net, "warm": model.opt}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    (said,) = model.step()
    assert said == (
        "`warm.optimizer` (Adam) changes while training and is not registered, so it begins anew "
        "after a replacement or resume: the state_dict of `warm` leaves it out: register it as well"
    )
    both = registered | {"adam": adam}
    model.watch, model.said = Unregistered(both, of_pieces(both)), []
    model.begin()
    assert model.step() == model.step() == []


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("is_wrapper", [False, True])
def test_the_base_optimizer_of_one_that_saves_itself_alone_is_named(script, kind, is_wrapper):
    """As SAM's ``base_optimizer``: torch's ``state_dict`` does not look into attributes."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            self.base_optimizer = kind(self.param_groups, **settings)
            self.param_groups = self.base_optimizer.param_groups

        def step(self, closure=None):
            self.base_optimizer.step(closure)

    model = Model(script)
    model.opt = script.opt = Sam(model.net.parameters())
    registered = {"model": model.net, "optimizer": [model.opt] if is_wrapper else model.opt}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    (said,) = model.step()
    name = "optimizer.0" if is_wrapper else "optimizer"
    assert said.startswith(f"`{name}.base_optimizer` ({kind.__name__}) changes while training")
    assert said.endswith(f"the state_dict of `{name}` leaves it out: register it as well")


def test_an_optimizer_that_shares_its_state_with_its_base_saves_it(script):
    """As ``Lookahead`` of the usual kind."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            self.base = base
            self.param_groups, self.state, self.defaults = base.param_groups, base.state, {}

        def step(self, closure=None):
            self.base.step(closure)

        def state_dict(self):
            return {"fast": self.base.state_dict(), "n": 1}

        def load_state_dict(self, state):
            raise NotImplementedError

    model = Model(script)
    model.opt = script.opt = Lookahead(model.opt)
    registered = {"model": model.net, "optimizer": model.opt}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    assert model.step() == model.step() == []


def test_what_a_registered_trainer_or_module_hides_is_named(script):
    class Trainer:
        def __init__(self, net, opt):
            self.net, self.opt = net, opt
            self.averages = [AveragedModel(net)]
            self.schedule = torch.optim.lr_scheduler.StepLR(opt, 1)

        def state_dict(self):
            return {"net": self.net.state_dict(), "opt": self.opt.state_dict()}

        def load_state_dict(self, state):
            raise NotImplementedError

    model = Model(script)
    trainer = script.trainer = Trainer(model.net, model.opt)
    model.net.shadow = [copy.deepcopy(model.net)]  # which its state_dict does not see
    registered = {"trainer": trainer}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    trainer.averages[0].update_parameters(model.net)
    with torch.no_grad():
        model.net.shadow[0][0].weight.mul_(0.5)
    said = model.step(scheduler=trainer.schedule)
    names = {each.partition(" changes")[0] for each in said}
    assert names == {
        "`trainer.averages.0` (AveragedModel)",
        "`trainer.schedule` (StepLR)",
        "`trainer.net.shadow.0` (Sequential)",
    }


def test_schedulers_within_a_scheduler_are_saved_by_it(script):
    model = Model(script)
    both = torch.optim.lr_scheduler.SequentialLR(
        model.opt,
        [
            torch.optim.lr_scheduler.LinearLR(model.opt),
            torch.optim.lr_scheduler.StepLR(model.opt, 1),
        ],
        milestones=[2],
    )
    registered = {"model": model.net, "optimizer": model.opt, "scheduler": both}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    assert [model.step(scheduler=both) for _ in range(4)] == [[]] * 4


def test_what_wraps_a_registered_optimizer_within_another_object_is_it(script):
    """As the ``optimizers`` of Accelerate's scheduler."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

    class Schedule:
        def __init__(self, schedule, *optimizers):
            self.schedule, self.optimizers = schedule, list(optimizers)

        def state_dict(self):
            return self.schedule.state_dict()

        def load_state_dict(self, state):
            raise NotImplementedError

    model = Model(script)
    schedule = Schedule(torch.optim.lr_scheduler.StepLR(model.opt, 1), Wrapper(model.opt))
    registered = {"model": model.net, "optimizer": model.opt, "scheduler": schedule}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    assert [model.step(scheduler=schedule.schedule) for _ in range(4)] == [[]] * 4


def test_of_many_alike_tensors_few_are_compared_in_full(script, monkeypatch):
    class Deep:
        def __init__(self, net, opt):
            self.net, self.opt = net, opt

        def state_dict(self):
            return copy.deepcopy({"net": self.net.state_dict(), "opt": self.opt.state_dict()})

        def load_state_dict(self, state):
            raise NotImplementedError

    model = Model(script)
    model.net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), *(torch.nn.Linear(4, 4) for _ in range(20))
    )
    model.opt = torch.optim.Adam(model.net.parameters())
    registered = {"trainer": Deep(model.net, model.opt)}
    model.watch = Unregistered(registered, of_pieces(registered))
    model.begin()
    calls, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *two: calls.append(1) or equal(*two))
    assert model.step() == []
    assert len(calls) <= 6 * 42  # each parameter, its two averages, and counts that are all alike


class Compression:
    """The state of a hook, in the way of PowerSGD's."""

    __slots__ = ["iter", "process_group"]

    def __init__(self):
        self.iter, self.process_group = 0, None


def compress(state, _bucket):
    state.iter += 1


class Kept:
    """Saves the state of a hook."""

    def __init__(self, hook):
        self.hook = hook

    def state_dict(self):
        return {"iter": self.hook.iter}

    def load_state_dict(self, state):
        self.hook.iter = state["iter"]


@pytest.fixture
def ddp(monkeypatch):
    """Makes what passes for a DDP with a hook that has this state."""
    monkeypatch.setattr(unregistered, "DistributedDataParallel", torch.nn.Identity)

    def make(state):
        made = torch.nn.Identity()
        made._comm_hooks = [(compress, state)]
        return made

    return make


def test_the_state_of_a_communication_hook_is_named_once_it_has_changed(script, ddp):
    model, state, idle = Model(script), Compression(), Compression()
    model.begin(wrapped=ddp(state), other=ddp(idle), plain=ddp(None))
    assert model.step() == []
    state.iter += 1
    (said,) = model.step()
    assert said.startswith("the state of the hook `wrapped.compress` (Compression), through")
    state.iter += 1
    assert len(model.step()) == len(model.step()) == 1


def test_the_state_of_a_communication_hook_may_be_kept_or_ignored(script, ddp):
    kept, ignored = Compression(), Compression()
    model = Model(script)
    objects = {"net": model.net, "opt": model.opt, "hook": Kept(kept)}
    model.watch = Unregistered(objects)
    model.begin({"other.compress"}.__contains__, wrapped=ddp(kept), other=ddp(ignored))
    kept.iter, ignored.iter = 1, 1
    assert model.step() == []


def test_a_hook_of_a_model_that_is_gone_is_forgotten(script, ddp):
    model, state = Model(script), Compression()
    model.begin(wrapped=ddp(state))
    del script.wrapped
    gc.collect()
    state.iter += 1
    assert model.step() == []


class ModelAverager:
    """As torch's, which needs a process group: it has no state_dict."""

    def __init__(self):
        self.step = 0


def test_an_average_over_ranks_that_counts_its_calls_is_named_with_what_helps(script):
    model, averager = Model(script), type("Periodic", (ModelAverager,), {})()
    model.begin(averager=averager)
    averager.step += 1
    (said,) = model.step()
    assert said.startswith("`averager` (Periodic) changes while training")
    assert said.endswith(
        "set averager.step to the count of its calls, such as state.step, before the loop"
    )


def test_a_data_set_of_the_scripts_own_is_left_to_its_loader(script):
    of = {"__module__": "__main__", "__len__": lambda _: 1, "__getitem__": lambda _, at: at}
    data, other = type("Data", (Dataset,), of)(), type("Other", (), of)()
    data.share = other.share = 1.0
    model = Model(script)
    model.begin()
    data.share = other.share = 0.5
    (named,) = model.step()
    assert "`other` (Other)" in named
