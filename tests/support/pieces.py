"""Models with optimizers, saved and put back as a dump would, and compared bit by bit."""

import json

import torch
from torch import nn

from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors import state_json


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.detach().contiguous().view(-1).view(torch.uint8).tolist(),
    )


def same(one, two):
    """Equal in types, order and every bit; tensors by their bytes, objects by their attributes."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and bits(one) == bits(two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return repr(one) == repr(two)


def saved(pieces):
    """What a dump would hold of them: tensors copied, values through text."""
    tensors, values = {}, {}
    for piece in pieces:
        value, small = piece.encode(piece.snapshot())
        tensors |= {name: each.detach().clone() for name, each in (piece.tensors() | small).items()}
        values[piece.name] = json.loads(state_json.dumps(value))
    return tensors, values


def put(pieces, tensors, values):
    for piece in pieces:
        mine = {
            name: each
            for name, each in tensors.items()
            if name == piece.name or name.startswith(piece.name + ".")
        }
        assert piece.mismatches(mine, values[piece.name]) == []
        piece.restore(tensors, values[piece.name])


def move(source, target):
    """The state of objects, put into others of the same kind."""
    put(pieces_of(target), *saved(pieces_of(source)))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def trained(make, steps=3, dtype=torch.float32, model=None):
    """A model and its optimizer after some steps."""
    model = net(dtype) if model is None else model
    optimizer = make(model)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps=1, seed=1, set_to_none=True):
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())

    def closure():
        optimizer.zero_grad(set_to_none)
        loss = model(x).float().square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        x = torch.randn(5, 4, generator=generator).to(first.dtype)
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    optimizer.zero_grad(set_to_none)


def groups(model):
    return [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]


OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "AdamW-amsgrad": lambda m: torch.optim.AdamW(groups(m), lr=0.01, amsgrad=True),
    "AdamW-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=4),
    "LBFGS-wolfe": lambda m: torch.optim.LBFGS(
        m.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    ),
    "Muon": lambda m: torch.optim.Muon([m[0].weight, m[2].weight]),
}
