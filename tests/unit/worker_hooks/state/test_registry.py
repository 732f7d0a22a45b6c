"""Every kind of registered object is taken apart and put together again, bit for bit."""

import copy
import math
import timeit
import warnings

import pytest
import torch
from support.meshes import mesh_seen_by
from support.pieces import OPTIMIZERS, groups, move, net, put, same, saved, step, trained
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from worker_hooks.state.registry import boxes_of, pieces_of, scripts_tensors


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_comes_back_and_trains_on_alike(make, steps):
    model, optimizer = trained(make, steps)
    fresh = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    other = make(fresh)
    move({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(optimizer.state_dict(), other.state_dict())
    assert same(list(model.parameters()), list(fresh.parameters()))
    step(model, optimizer, 2, seed=2)
    step(fresh, other, 2, seed=2)
    assert same(optimizer.state_dict(), other.state_dict())
    assert same(list(model.parameters()), list(fresh.parameters()))


class Wide(torch.optim.Optimizer):
    """Keeps its state in a wider type than the parameters', a counter, and a total for all."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "betas": [0.9, torch.tensor(0.5)]})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        self.state["total"] = self.state.get("total", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                held["mean"] = (
                    held.get("mean", torch.zeros_like(p, dtype=torch.float32)) * 0.9 + p.grad
                )
                held["count"] = held.get("count", 0) + 1
                held["factors"] = [held["count"] / 3, None]
                p.add_(held["mean"].to(p.dtype), alpha=-group["lr"])


def test_state_wider_than_the_parameters_is_not_cast():
    model, optimizer = trained(lambda m: Wide(m.parameters()), dtype=torch.bfloat16)
    fresh, other = trained(lambda m: Wide(m.parameters()), 0, dtype=torch.bfloat16)
    move({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    held = other.state[fresh[0].weight]
    assert (held["mean"].dtype, held["count"], held["factors"]) == (torch.float32, 3, [1.0, None])
    assert other.state["total"] == 3
    assert same(optimizer.state_dict(), other.state_dict())
    assert same(list(model.parameters()), list(fresh.parameters()))


def test_an_optimizers_tensors_have_torchs_indices():
    model, optimizer = trained(OPTIMIZERS["momentum"])
    (piece,) = pieces_of({"optimizer": optimizer})
    assert sorted(piece.tensors()) == [f"optimizer.state.{n}.momentum_buffer" for n in range(4)]
    buffer = optimizer.state[model[2].bias]["momentum_buffer"]
    assert piece.tensors()["optimizer.state.3.momentum_buffer"].data_ptr() == buffer.data_ptr()


def test_a_snapshot_keeps_what_was_set_at_the_commit():
    _, optimizer = trained(OPTIMIZERS["Adam"])
    scheduler = lrs.MultiStepLR(optimizer, [1, 5], gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["tags"] = ["a", ["b"]]
    pieces = pieces_of({"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler})
    then = [piece.snapshot() for piece in pieces]
    before = [copy.deepcopy(each.state_dict()) for each in (optimizer, scheduler, scaler)]
    optimizer.step()
    scheduler.step()
    scheduler.milestones[3] = 9
    optimizer.param_groups[0]["tags"][1].append("c")
    scaler.update(2.0)
    optimizer.param_groups[0]["lr"].fill_(7)
    for piece, snapshot in zip(pieces, then, strict=True):
        value, small = piece.encode(snapshot)
        piece.restore(piece.tensors() | small, value)
    assert same([each.state_dict() for each in (optimizer, scheduler, scaler)], before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_there_or_not_as_they_were(set_to_none):
    model = net()
    unused = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([unused, *model.parameters()], lr=0.1)
    step(model, optimizer, 2, set_to_none=set_to_none)
    fresh, also = net(), nn.Parameter(torch.ones(1))
    other = torch.optim.AdamW([also, *fresh.parameters()], lr=0.1)
    move({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert also.grad is None
    assert [p.grad is None for p in fresh.parameters()] == [set_to_none] * 4
    assert set_to_none or not any(p.grad.any() for p in fresh.parameters())


def test_gradients_of_a_backward_under_way_are_not_taken_for_kept_ones():
    model, optimizer = trained(OPTIMIZERS["momentum"])
    (piece,) = pieces_of({"optimizer": optimizer})
    commit = piece.snapshot()
    model(torch.ones(1, 4)).sum().backward()
    value, small = piece.encode(commit)
    piece.restore(piece.tensors() | small, value)
    assert all(p.grad is None for p in model.parameters())


def test_state_lies_in_memory_as_the_parameter_does():
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    (model, optimizer), (fresh, other) = make(0), make(1)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, values = saved(pieces_of({"m": model, "o": optimizer}))
    put(
        pieces_of({"m": fresh, "o": other}), {n: t.contiguous() for n, t in tensors.items()}, values
    )
    assert other.state[fresh.weight]["exp_avg"].stride() == fresh.weight.stride()
    assert same(optimizer.state_dict(), other.state_dict())


class Sparing(torch.optim.SGD):
    """An optimizer with its own way to save."""

    def state_dict(self):
        return {"lr": self.param_groups[0]["lr"], "times": getattr(self, "times", 0)}

    def load_state_dict(self, state_dict):
        self.param_groups[0]["lr"], self.times = state_dict["lr"], state_dict["times"]


def test_an_optimizers_own_way_to_save_is_respected():
    one, two = (Sparing(net().parameters(), lr=rate) for rate in (0.3, 0.1))
    one.times = 4
    move({"optimizer": one}, {"optimizer": two})
    assert (two.param_groups[0]["lr"], two.times) == (0.3, 4)
    (piece,) = pieces_of({"optimizer": one})
    assert piece.optimizers == (one,)
    assert piece.is_compared


class Warmup:
    def __init__(self, steps):
        self.steps, self.seen = steps, []

    def __call__(self, epoch):
        self.seen.append(epoch)
        return min(1.0, (epoch + 1) / self.steps)


class Custom(lrs.LRScheduler):
    def __init__(self, optimizer, shape):
        self.shape = shape
        super().__init__(optimizer)

    def get_lr(self):
        return [self.shape(self.last_epoch) * each for each in self.base_lrs]


SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.2, total_iters=6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "CyclicLR-own": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Warmup(2)),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, 20, three_phase=True),
    "LambdaLR": lambda o: lrs.LambdaLR(o, [Warmup(5), lambda epoch: 0.9**epoch]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, [lambda epoch: 1 - epoch / 100] * 2),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SWALR": lambda o: SWALR(o, 0.05, 4),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o,
        [lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.StepLR(o, 1)], [1]), lrs.ExponentialLR(o, 0.9)],
        [4],
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o), lrs.MultiStepLR(o, [3])]
    ),
    "custom": lambda o: Custom(o, lambda epoch: 1 / (epoch + 1)),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_scheduler_comes_back_and_goes_on_alike(make, steps):
    def begin():
        model = net()
        optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def go(optimizer, scheduler, count):
        rates = []
        for n in range(count):
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SequentialLR uses what torch deprecates
                scheduler.step(*([n % 2] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
            rates.append(
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            )
        return rates

    (one, first), (two, second) = begin(), begin()
    go(one, first, steps)
    (piece,) = pieces_of({"scheduler": first})
    before = piece.marks()
    move({"optimizer": one, "scheduler": first}, {"optimizer": two, "scheduler": second})
    assert piece.marks() == before
    assert same(one.state_dict(), two.state_dict())
    assert same(go(one, first, 5), go(two, second, 5))
    assert piece.marks() != before


@pytest.mark.parametrize("used", [True, False])
def test_a_gradient_scaler_comes_back(used):
    one, two = (torch.amp.GradScaler("cpu", init_scale=1024.3, growth_interval=n) for n in (3, 2))
    model, optimizer = trained(OPTIMIZERS["SGD"])
    (piece,) = pieces_of({"scaler": one})
    if used:
        for bad in (False, True, False):
            marks = piece.marks()
            one.scale(model(torch.full((1, 4), math.inf if bad else 1.0)).sum()).backward()
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
            assert piece.marks() != marks
    move({"scaler": one}, {"scaler": two})
    assert same(one.state_dict(), two.state_dict())


def test_a_scaler_that_is_switched_off_has_no_state():
    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", 4.0)
    for source, target in ((off, off), (off, on), (on, off)):
        move({"scaler": source}, {"scaler": target})
    assert on.get_scale() == 4.0


def test_what_every_commit_costs():
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 3)
    step(model, optimizer)
    pieces = pieces_of({"model": model, "optimizer": optimizer, "scheduler": scheduler})

    def commit():
        for piece in pieces:
            piece.snapshot()
            piece.marks()

    assert (
        min(timeit.repeat(commit, number=200, repeat=20)) / 200 < 60e-6
    )  # 8 us when nobody else runs


def test_of_a_distributed_tensor_the_part_of_this_rank_comes_back():
    """As of an average of distributed weights."""
    with mesh_seen_by(1) as mesh:
        ema, other = (
            [DTensor.from_local(torch.full((2, 3), n), mesh, [Shard(0)], run_check=False)]
            for n in (3.0, 0.0)
        )
        (piece,) = pieces_of({"ema": ema})
        value, _ = piece.encode(piece.snapshot())
        here = {"ema.0": ((4, 3), (2, 0), (2, 3))}
        assert boxes_of(piece, value) == here
        value["of"][1:3] = [3, 0], [1, 3]  # as saved on another mesh
        assert boxes_of(piece, value) == here
        assert scripts_tensors([piece])["ema.0"] is ema[0]
        ema[0].mul_(2)
        move({"ema": ema}, {"ema": other})
        assert other[0].to_local().eq(6).all()


def test_a_distributed_tensor_within_an_object_is_refused_with_what_to_do():
    """As of an average in a class of the script's own."""

    class Average:
        def __init__(self, mesh):
            self.shadow = {"w": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])}

        def state_dict(self):
            return {"shadow": self.shadow, "updates": 3}

        def load_state_dict(self, state):
            pass

    with mesh_seen_by(1) as mesh:
        with pytest.raises(
            TypeError, match=r"^ema has a DTensor in its state_dict, .* ema=\[\.\.\.\]"
        ):
            pieces_of({"ema": Average(mesh)})
        pieces_of({"ema": Average(mesh).shadow})


def test_an_average_of_the_model_comes_back():
    model, optimizer = trained(OPTIMIZERS["momentum"])
    model.append(nn.BatchNorm1d(3))
    one, two = (AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2))
    pieces = pieces_of({"ema": one})
    for _ in range(3):
        step(model, optimizer)
        before = pieces[0].marks()
        one.update_parameters(model)
        assert pieces[0].marks() != before
    assert set(pieces[0].tensors()) == {f"ema.module.{key}" for key, _ in model.named_parameters()}
    move({"ema": one}, {"ema": two})
    assert same(list(one.parameters()), list(two.parameters()))
    assert one.module[0].weight.ne(model[0].weight).any()
