"""An optimizer's state finds its parameter by name: a script may give them in another order, not other ones."""

import json
import logging

import pytest
import torch
from support.meshes import mesh_seen_by
from support.pieces import same, saved
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from worker_hooks.state.registry import as_now, pieces_of, restore_alike
from worker_hooks.tensors.placements import part_of

LAYERS = 4  # of equal shapes: nothing but a name tells one from the other


def net(mesh=None):
    made = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(LAYERS))
    for number, layer in enumerate(made):
        whole = torch.full((3, 3), float(number))
        if mesh is not None:
            whole = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
        layer.weight = nn.Parameter(whole)
    return made


def grouped(module, groups):
    return [
        {"params": [module[number].weight for number in group], "lr": 0.1 * (index + 1)}
        for index, group in enumerate(groups)
    ]


def trained(groups, mesh=None, make=torch.optim.AdamW, has_model=True, **options):
    """The piece of an optimizer whose parameters have had different gradients."""
    module = net(mesh)
    optimizer = make(grouped(module, groups), **options)
    for number, layer in enumerate(module):
        layer.weight.grad = torch.full_like(layer.weight, float(number + 1))
    optimizer.step(lambda: torch.zeros(()))
    objects = {"model": module} if has_model else {}
    *_, piece = pieces_of({**objects, "optimizer": optimizer})
    return piece


def put(source, target):
    """Whatever keeps the one state from going to the other's parameters; empty: it is there."""
    tensors, values = saved([source])
    value = as_now(target, values["optimizer"], lambda _: (6, 3))
    found = target.mismatches(tensors, value)
    if not found:
        target.restore(tensors, value)
    return found


def averages(piece):
    """The layers' first moments, by what the weights are called."""
    (optimizer,) = piece.optimizers
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {
        name: part_of(optimizer.state[one]["exp_avg"]).clone()
        for name, one in zip(piece.names(), parameters, strict=True)
    }


ORDERS = {
    "reversed": ([[0, 1, 2, 3]], [[3, 2, 1, 0]]),
    "turned": ([[0, 1, 2, 3]], [[1, 2, 3, 0]]),
    "within groups": ([[0, 1], [2, 3]], [[1, 0], [3, 2]]),
    "the same": ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_state_goes_to_the_parameter_of_its_name(order, is_cut, caplog):
    caplog.set_level(logging.INFO)
    with mesh_seen_by(0) as mesh:
        then, now = ORDERS[order]
        source = trained(then, mesh if is_cut else None)
        target = trained(now, mesh if is_cut else None)
        wanted = averages(source)
        for held in target.optimizers[0].state.values():
            for each in held.values():
                part_of(each).zero_()
        assert put(source, target) == []
        found = averages(target)
        assert found.keys() == wanted.keys() == {f"model.{n}.weight" for n in range(LAYERS)}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert [group["lr"] for group in target.optimizers[0].param_groups] == [
            0.1 * (index + 1) for index in range(len(now))
        ]
        said = "optimizer: the parameters were in another order, and are known by their names"
        assert (said in caplog.messages) == (then != now)


OTHERS = {
    "had its parameters in another order, and in other groups": (
        ([[0, 1], [2, 3]], [[2, 3], [0, 1]]),
        {},
    ),
    "had its parameters in another order, and it may have state of all of them together": (
        ([[0, 1, 2, 3]], [[3, 2, 1, 0]]),
        {"make": torch.optim.LBFGS},
    ),
    "had other parameters; on one side only: model.0.weight, model.3.weight": (
        ([[0, 1, 2]], [[1, 2, 3]]),
        {},
    ),
    "had groups of [2, 1] parameters and has [1, 2]": (
        ([[0, 1], [2]], [[0], [1, 2]]),
        {},
    ),
}


@pytest.mark.parametrize("said", OTHERS)
def test_what_is_not_well_defined_is_refused(said):
    (then, now), options = OTHERS[said]
    source = trained(then, **options)
    target = trained(now, **options)
    assert put(source, target) == [f"optimizer {said}"]


def test_tensors_that_no_module_has_are_known_by_their_index():
    source = trained([[0, 1, 2, 3]], has_model=False)
    target = trained([[0, 1, 2, 3]], has_model=False)
    assert source.names() == [""] * 4
    assert put(source, target) == []


def test_some_without_a_name_keep_the_others_where_they_are():
    own = nn.Parameter(torch.zeros(3, 3))

    def pieces(order):
        module = net()
        optimizer = torch.optim.AdamW([module[n].weight if n >= 0 else own for n in order])
        return pieces_of({"model": module, "optimizer": optimizer})[1]

    assert pieces([0, -1, 1]).names() == ["model.0.weight", "", "model.1.weight"]
    assert put(pieces([0, -1, 1]), pieces([0, -1, 1])) == []
    assert put(pieces([0, -1, 1]), pieces([1, -1, 0])) == [
        "optimizer had its parameters in another order, and some are in no registered module"
    ]


def test_a_file_without_names_is_read_by_index():
    source = trained([[0, 1, 2, 3]])
    target = trained([[3, 2, 1, 0]])
    tensors, values = saved([source])
    del values["optimizer"]["names"]
    value = as_now(target, values["optimizer"], lambda _: (3, 3))
    assert target.mismatches(tensors, value) == []
    target.restore(tensors, value)
    then, now = list(averages(source).values()), list(averages(target).values())
    assert all(map(torch.equal, then, now))


def test_names_are_text_and_those_of_the_registration():
    piece = trained([[0, 1, 2, 3]])
    names = json.loads(json.dumps(piece.encode(piece.snapshot())[0]))["names"]
    assert names == [f"model.{n}.weight" for n in range(LAYERS)]
    piece.name_parameters = dict  # as inside a step, when a module may hold others
    assert piece.names() == names
    (optimizer,) = piece.optimizers
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert piece.names() == [""] * (LAYERS + 1)


@pytest.mark.parametrize(("now", "has_state"), [([[0, 1]], True), ([[1, 0]], False)])
def test_groups_that_are_there_already_are_put_back_in_their_order_alone(now, has_state):
    source = trained([[0, 1], [2, 3]])
    tensors, values = saved([source])
    module = net()
    optimizer = torch.optim.AdamW(grouped(module, now))
    _, piece = pieces_of({"model": module, "optimizer": optimizer})
    restore_alike(piece, tensors, {}, values["optimizer"])
    assert bool(optimizer.state) == has_state
    if has_state:
        assert same(
            optimizer.state[module[1].weight]["exp_avg"], tensors["optimizer.state.1.exp_avg"]
        )


def test_a_shared_parameter_has_its_first_name():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    module = nn.Sequential(one, two)
    _, piece = pieces_of({"model": module, "optimizer": torch.optim.SGD(module.parameters(), 0.1)})
    assert piece.names() == ["model.0.weight", "model.0.bias", "model.1.bias"]


def test_a_registered_tensor_has_a_name_too():
    scale = torch.zeros(1, requires_grad=True)
    *_, piece = pieces_of({"scale": scale, "optimizer": torch.optim.SGD([scale], 0.1)})
    assert piece.names() == ["scale"]
