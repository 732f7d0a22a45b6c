"""Modules, tensors and objects of the script's own, and what is refused."""

import subprocess

import pytest
import torch
from support.pieces import bits, move, put, same, saved
from torch import nn

from worker_hooks.state.registry import pieces_of


def names(module, name="model"):
    (piece,) = pieces_of({name: module})
    return list(piece.tensors())


PLAIN_NAMES = ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]


def two_layers():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_wrappers_leave_no_trace_in_names():
    torch.manual_seed(0)
    module = two_layers()
    inside = two_layers()
    inside[1] = torch.compile(inside[1], backend="eager")
    doubly = two_layers()
    doubly[0] = nn.DataParallel(torch.compile(doubly[0], backend="eager"))
    variants = [
        module,
        torch.compile(module, backend="eager"),
        nn.DataParallel(module),
        nn.DataParallel(torch.compile(module, backend="eager")),
        inside,
        doubly,
    ]
    for variant in variants:
        assert names(variant) == PLAIN_NAMES
        move({"model": module}, {"model": variant})
        assert same([*module.parameters()], [*variant.parameters()])
    (piece,) = pieces_of({"model": variants[3]})
    assert piece.modules == (module,)


@pytest.mark.torch
def test_ddp_leaves_no_trace_in_names(tmp_path, warm_python):
    code = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from worker_hooks.state.registry import pieces_of
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
outer = DDP(torch.compile(net, backend="eager"))
inner = nn.Sequential(DDP(net[0]), net[1])
for model in (net, outer, torch.compile(outer, backend="eager"), inner):
    print(*pieces_of({{"model": model}})[0].tensors())
dist.destroy_process_group()
"""
    run = subprocess.run(
        [*warm_python.words, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert run.stdout.splitlines() == [" ".join(PLAIN_NAMES)] * 4


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_compiled_module_trains_on_with_what_was_restored():
    source, target = two_layers(), torch.compile(two_layers(), backend="eager")
    x = torch.randn(1, 2)
    target(x)  # compiled before
    move({"model": source}, {"model": target})
    assert torch.equal(target(x), source(x))


def test_a_module_called_module_keeps_its_name():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert names(Outer()) == ["model.module.weight", "model.module.bias"]


def test_tied_weights_are_under_each_name_and_stay_tied():
    def tied():
        model = nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.Linear(3, 4, bias=False)})
        model["c"] = model["b"]
        model["b"].weight = model["a"].weight
        return model

    one, two = tied(), tied()
    assert names(one) == ["model.a.weight", "model.b.weight", "model.c.weight"]
    assert set(names(one)) == {f"model.{key}" for key in one.state_dict()}
    move({"model": one}, {"model": two})
    assert two["a"].weight is two["b"].weight
    assert same(one.state_dict(), two.state_dict())


def test_frozen_parameters_stay_frozen():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight.requires_grad_(False)
    move({"model": one}, {"model": two})
    assert same(one.state_dict(), two.state_dict())
    assert not two.weight.requires_grad
    assert two.bias.requires_grad
    assert two.bias.is_leaf


ODD = {
    "bf16": torch.randn(3).bfloat16(),
    "fp16": torch.randn(3).half(),
    "fp64": torch.randn(3).double(),
    "fp8-e4m3": torch.randn(3).to(torch.float8_e4m3fn),
    "fp8-e5m2": torch.randn(3).to(torch.float8_e5m2),
    "fp8-e8m0": torch.tensor([1, 2, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "complex128": torch.randn(3, dtype=torch.complex128),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint64": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "bool": torch.tensor([True, False]),
    "0-d": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "nan": torch.tensor([0x7FC00ABC, 0x80000000 - 2**32], dtype=torch.int64)
    .to(torch.int32)
    .view(torch.float32),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.randn(8)[::2],
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("kind", ["parameter", "tensor"])
def test_every_kind_of_tensor_comes_back(value, kind):
    class Holder(nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.p = nn.Parameter(tensor, requires_grad=False)

    blank = (
        value.clone().view(-1).view(torch.uint8).zero_().view(value.dtype).view(value.shape)
        if value.is_contiguous()
        else torch.zeros_like(value)
    )
    if kind == "parameter":
        one, two = Holder(value), Holder(blank)
        move({"model": one}, {"model": two})
        assert bits(one.p) == bits(two.p)
        assert two.p.stride() == blank.stride()
    else:
        move({"table": value}, {"table": blank})
        assert bits(blank) == bits(value)


def test_a_trained_tensor_is_updated_in_place():
    one, two = torch.randn(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    (piece,) = pieces_of({"w": two})
    before, address = piece.marks(), two.data_ptr()
    move({"w": one}, {"w": two})
    assert torch.equal(one, two)
    assert (two.data_ptr(), two.requires_grad, two.is_leaf) == (address, True, True)
    assert piece.marks() != before


class Scaled(nn.Linear):
    factor = 1

    def get_extra_state(self):
        return {"factor": self.factor, "history": [torch.tensor(self.factor)]}

    def set_extra_state(self, state):
        self.factor = state["factor"]


def test_extra_state_comes_back_as_of_the_commit():
    one, two = (
        nn.Sequential(Scaled(1, 1), nn.Identity()),
        nn.Sequential(Scaled(1, 1), nn.Identity()),
    )
    one[0].factor = 5
    (piece,) = pieces_of({"model": one})
    commit = piece.snapshot()
    one[0].factor = 6
    value, small = piece.encode(commit)
    (other,) = pieces_of({"model": two})
    assert other.mismatches(piece.tensors() | small, value) == []
    other.restore(piece.tensors() | small, value)
    assert two[0].factor == 5


class Meter:
    """An object of the script's own; ``size`` decides whether it is large."""

    def __init__(self, size, value=0.0):
        self.state = {"shadow": {"w": torch.full((size,), value)}, "count": int(value)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_small_object_is_copied_at_the_commit():
    one, two = Meter(10, 3.0), Meter(10)
    (piece,) = pieces_of({"meter": one})
    commit = piece.snapshot()
    assert piece.tensors() == {}
    before = piece.marks()
    one.state["shadow"]["w"].add_(1)
    one.state["count"] += 1
    assert piece.marks() != before
    value, small = piece.encode(commit)
    pieces_of({"meter": two})[0].restore(small, value)
    assert same(two.state, Meter(10, 3.0).state)
    assert not piece.is_compared  # it may be the rank's own


def test_a_large_objects_tensors_are_live():
    one, two = Meter(20_000, 3.0), Meter(20_000)
    (piece,) = pieces_of({"meter": one})
    piece.snapshot()
    assert piece.tensors()["meter.shadow.w"].data_ptr() == one.state["shadow"]["w"].data_ptr()
    assert piece.encode(piece.snapshot())[1] == {}
    move({"meter": one}, {"meter": two})
    assert same(one.state, two.state)


def test_an_objects_optimizer_is_watched():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)

    class Wrapper(Meter):
        def __init__(self):
            super().__init__(1)
            self.optimizer = optimizer

    (piece,) = pieces_of({"optimizer": Wrapper()})
    assert piece.optimizers == (optimizer,)


def test_several_under_one_name():
    gen, dis = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (gen, dis)]
    pieces = pieces_of(
        {
            "model": {"gen": gen, "dis": dis},
            "optimizer": optimizers,
            "scheduler": None,
            "w": (torch.ones(1),),
        }
    )
    assert [piece.name for piece in pieces] == [
        "model.gen",
        "model.dis",
        "optimizer.0",
        "optimizer.1",
        "w.0",
    ]
    put(pieces, *saved(pieces))


def test_what_cannot_be_registered_is_named():
    sparse = torch.ones(2).to_sparse()
    cases = [
        ({"rate": 3}, TypeError, "rate is of type int and cannot be saved"),
        ({"model": [nn.Linear(1, 1), "x"]}, TypeError, r"model\.1 is of type str"),
        ({"model": nn.Linear}, TypeError, "model is of type type"),
        ({"model": {1, 2}}, TypeError, "model is of type set"),
        (
            {"model": nn.Sequential(nn.LazyLinear(3))},
            TypeError,
            r"model\.0\.weight.*not initialized",
        ),
        ({"model": nn.Linear(1, 1, device="meta")}, TypeError, r"model\.weight.*meta"),
        ({"table": sparse}, TypeError, "table.*sparse"),
        (
            {"model": nn.Linear(1, 1), "model.weight": torch.ones(1)},
            ValueError,
            r"both be saved as model\.weight",
        ),
    ]
    for objects, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            pieces_of(objects)


def test_a_state_that_cannot_be_saved_is_said_at_once():
    meter = Meter(1)
    meter.state["hook"] = print
    with pytest.raises(TypeError, match=r"meter\.hook is a builtin_function_or_method"):
        pieces_of({"meter": meter})
    meter.state_dict = lambda: 1 / 0
    with pytest.raises(
        TypeError, match="meter cannot be saved: reading its state: ZeroDivisionError"
    ):
        pieces_of({"meter": meter})


def test_mismatches_are_all_named():
    one = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    two = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4), nn.Linear(4, 1).half())
    (piece,), (other,) = pieces_of({"model": one}), pieces_of({"model": two})
    found = other.mismatches(piece.tensors(), piece.encode(piece.snapshot())[0])
    assert found == [
        "missing in it: model.2.bias, model.2.weight",
        "unknown to this script: model.0.bias",
        "model.1.bias is float32[2] there and float32[4] here",
        "model.1.weight is float32[2, 3] there and float32[4, 3] here",
    ]


def test_an_optimizer_of_other_parameters_does_not_fit():
    optimizers = [
        torch.optim.Adam(layer.parameters())
        for layer in (nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    ]
    one, two = (pieces_of({"optimizer": each})[0] for each in optimizers)
    value, _ = one.encode(one.snapshot())
    assert two.mismatches({}, value) == ["optimizer had groups of [2] parameters and has [1]"]
