"""A script's values as bytes and back: the same value, and where it can be the same object."""

import json
import math
from collections import deque

import numpy as np
import pytest
import torch

from worker_hooks.script import values
from worker_hooks.script.values import LargeValueError, Script

SAMES = {
    "int": 1 << 70,
    "float": -0.0,
    "nan": math.nan,
    "infinity": math.inf,
    "text": 'a "text"',
    "none": None,
    "bytes": b"\0\1",
    "tuple": (1, (2.5, None), "x"),
    "list": [1, [2], {"a": 3}],
    "floats": [0.1, math.inf, -0.0],
    "deque": deque([1.5, 2.5], maxlen=3),
    "dict": {"a": [1], 2: {"b": 0.5}},
    "set": {1, 2},
    "tensor": torch.arange(6.0).reshape(2, 3),
    "tensors": {"w": torch.ones(2), "b": [torch.zeros(1)]},
    "array": np.arange(4, dtype="int16"),
    "number": np.float32(0.1),
}


def back(value, now=None):
    packed = values.pack(value, "it")
    script = Script.split(
        values.join({"it": packed}, {"it": 7}, {"it"}, is_settled=True) + b"\0" * 9
    )
    record = script.record
    assert (record.was, record.late, record.is_settled) == ({"it": 7}, {"it"}, True)
    assert record.now == {"it": packed.checksum}
    return values.unpack(record.values["it"], script.tensors, now)


@pytest.mark.parametrize("kind", SAMES)
def test_a_value_comes_back(kind):
    value = SAMES[kind]
    again = back(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert getattr(again, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("kind", ["list", "floats", "deque", "dict", "set", "tensor", "array"])
def test_an_object_that_can_change_stays_the_same_one(kind):
    value = SAMES[kind]
    changed = back(value)
    if kind in {"tensor", "array"}:
        changed += 1
    else:
        changed.clear()
    assert repr(changed) != repr(value)
    assert back(value, changed) is changed
    assert repr(changed) == repr(value)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, [2]], lambda it: it[1].append(3)),
        ({"a": 1}, lambda it: it.update(a=True)),
        (deque([1], maxlen=2), lambda it: it.append(1)),
        (torch.zeros(2), lambda it: it.data.add_(1)),  # torch's counter does not see it
        ({"w": torch.zeros(2)}, lambda it: it["w"].add_(1)),
        (np.zeros(2), lambda it: it.__setitem__(0, 1)),
    ],
)
def test_a_change_in_place_is_seen(value, change):
    before = values.mark(value)
    assert values.mark(value) == before
    change(value)
    assert values.mark(value) != before


@pytest.mark.parametrize("value", [torch.zeros(20_000), list(range(10_000)), np.zeros(10_000)])
def test_a_large_value_is_refused(value):
    with pytest.raises(LargeValueError):
        values.mark(value)
    with pytest.raises(ValueError, match=r"^state\.own\.it has .*: at most 64 KiB are saved$"):
        values.check_own(value, "state.own.it")


@pytest.mark.parametrize("value", [object(), print, torch.nn.Linear(1, 1), [object()]])
def test_what_is_no_value_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"state\.own\.it"):
        values.check_own(value, "state.own.it")


class KeptElsewhere(torch.Tensor):
    """As DTensor: its own memory is at address 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls() if "detach" in func.__name__ or "alias" in func.__name__ else NotImplemented


@pytest.mark.parametrize("value", [KeptElsewhere(), [KeptElsewhere()]], ids=["bare", "in a list"])
@pytest.mark.parametrize("look", [values.mark, lambda value: values.pack(value, "it")])
def test_a_tensor_that_keeps_its_elements_elsewhere_is_refused_unread(look, value):
    with pytest.raises(TypeError, match="keeps its elements elsewhere"):
        look(value)


def test_a_container_of_parameters_is_no_value():
    with pytest.raises(TypeError):
        values.check({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_no_values_are_few_bytes_that_say_so():
    assert Script.split(values.join({}, {})).record.values == {}
    assert Script.split(b"").record.values == {}
    assert json.loads("{}") == Script.split(bytes(64)).record.values


@pytest.mark.parametrize("kind", [list, deque, lambda each: {"losses": list(each)}])
def test_a_history_of_tensors_is_large_as_to_look_at_each_takes_long(kind):
    some = [torch.tensor(float(each)) for each in range(129)]
    values.check(kind(some[:100]))
    values.mark(kind(some[:100]))
    for look in (values.check, values.mark):
        with pytest.raises(LargeValueError, match="tensors"):
            look(kind(some))
