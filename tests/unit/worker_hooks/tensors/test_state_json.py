"""Nested state goes to JSON and comes back the same, type for type and bit for bit."""

import json
import math
import struct
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch

from worker_hooks.tensors import state_json


def trip(value):
    """There, through text, and back."""
    encoded, tensors = state_json.encode(value, "thing")
    text = state_json.dumps(encoded)
    return state_json.decode(json.loads(text), tensors)


PLAIN = [
    None,
    True,
    False,
    0,
    -7,
    2**63 - 1,
    2**63,
    -(2**200),
    10**6000,  # more digits than Python reads in decimal
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    1 + 2j,
    complex(-0.0, math.inf),
    "",
    "snow \u2603 \ud800 lone \x00",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    [1, [2.5, None]],
    (),
    (1, (2, [3])),
    {},
    {"a": 1, "b": {"c": []}},
    {1: "one", "1": "text", (2, 3): None, None: 0, 1.5: 2, False: 3},
    {"$": "tensor", "v": "x"},  # looks like ours
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({30: 1, 80: 2}),
    defaultdict(list, {"k": [1]}),
    defaultdict(int, {3: 4}),
    defaultdict(None, {3: 4}),
    set(),
    {3, 1, 2},
    {("a", 1), ("b", 2)},
    frozenset({"x", "y"}),
    deque([1, 2], maxlen=5),
    deque(),
    range(1, 10, 3),
    slice(None, 5, 2),
    torch.Size([2, 3]),
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    torch.device("cpu"),
]


@pytest.mark.parametrize(
    "value",
    PLAIN,
    ids=lambda value: type(value).__name__,  # the same in every process that collects
)
def test_what_python_knows_comes_back(value):
    back = trip(value)
    assert type(back) is type(value)
    assert back == value
    if type(value) is not int or value < 2**64:
        assert repr(back) == repr(value)  # the sign of zero, the order of keys, maxlen, factories


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000000", "7ff8000000000abc"])
def test_every_nan_keeps_its_bits(bits):
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", trip([value])[0]).hex() == bits


NUMBERS = [
    np.float32(1.1),
    np.float64(-0.0),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(3.5),
    np.zeros((0, 4)),
    np.array([np.nan, -0.0, np.inf]),
    np.random.default_rng(0).random((50, 40)),  # more than is kept in the text
    np.arange(4, dtype=">u4"),
]


@pytest.mark.parametrize(
    "value", NUMBERS, ids=lambda value: f"{value.dtype.str}{list(value.shape)}{value.nbytes}"
)
def test_numpy_numbers_come_back(value):
    back = trip({"n": value})["n"]
    assert type(back) is type(value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert back.tobytes() == value.tobytes()
    if isinstance(back, np.ndarray):
        assert back.flags.writeable


def test_large_arrays_are_not_in_the_text():
    encoded, tensors = state_json.encode(np.zeros(10_000), "thing")
    assert len(state_json.dumps(encoded)) < 200
    assert [tensor.nbytes for tensor in tensors.values()] == [80_000]


@pytest.mark.torch
def test_numpy_is_not_imported_for_it():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from worker_hooks.tensors import state_json\n"
        "print(state_json.decode(*state_json.encode({'a': (1, {2})}, 'x')))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "{'a': (1, {2})}"


def test_tensors_are_taken_out_by_path():
    w, b = torch.randn(2, 3), torch.tensor(True)
    encoded, tensors = state_json.encode({"layers": [{"w": w}, (b,)], "n": 1}, "ema")
    assert list(tensors) == ["ema.layers.0.w", "ema.layers.1.0"]
    assert tensors["ema.layers.0.w"].data_ptr() == w.data_ptr()  # not copied
    assert state_json.names_in(encoded) == set(tensors)
    back = state_json.decode(encoded, tensors)
    assert torch.equal(back["layers"][0]["w"], w)
    assert back["layers"][1][0].dtype == torch.bool


def test_names_of_tensors_do_not_collide():
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    back = trip({1: one, "1": two, "a": {"b": one}, "a.b": three})
    assert [back[1].item(), back["1"].item(), back["a"]["b"].item(), back["a.b"].item()] == [
        1,
        2,
        1,
        3,
    ]


def test_a_parameter_comes_back_as_a_plain_tensor():
    back = trip(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@pytest.mark.parametrize(
    "tensor", [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t()]
)
def test_the_layout_in_memory_comes_back(tensor):
    encoded, tensors = state_json.encode(tensor, "t")
    stored = {name: each.contiguous() for name, each in tensors.items()}
    back = state_json.decode(encoded, stored)
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_a_conjugated_view_is_resolved():
    value = torch.tensor([1 + 2j]).conj()
    assert trip(value).tolist() == [1 - 2j]


def test_sets_are_the_same_text_in_every_process():
    one, two = {f"k{n}" for n in range(50)}, {f"k{n}" for n in reversed(range(50))}
    assert state_json.dumps(state_json.encode(one, "s")[0]) == state_json.dumps(
        state_json.encode(two, "s")[0]
    )


class Thing:
    pass


class Point(NamedTuple):
    x: int
    y: int


def test_what_cannot_be_saved_is_named():
    cases = [
        ({"fn": lambda: 0}, r"sched\.fn is a function"),
        ({"a": [1, {"b": Thing()}]}, r"sched\.a\.1\.b is a Thing"),
        ({"p": Point(1, 2)}, r"sched\.p is a Point"),
        ({"e": OSError}, r"sched\.e is a type"),
        ({"m": types.MappingProxyType({})}, r"sched\.m is a mappingproxy"),
        ({"d": defaultdict(lambda: 0)}, r"sched\.d is a defaultdict of <lambda>"),
        ({"d": defaultdict(Thing)}, r"sched\.d is a defaultdict of Thing"),
        ({"n": np.array(["x"])}, r"sched\.n is a numpy <U1"),
        ({"n": np.array([Thing()])}, r"sched\.n is a numpy object"),
        ({torch.tensor(1): 2}, r"sched has a tensor in a set or as a key"),
        ({"s": torch.ones(2).to_sparse()}, r"sched\.s.*sparse"),
        ({"s": torch.ones(2, device="meta")}, r"sched\.s.*meta"),
    ]
    for value, sentence in cases:
        with pytest.raises(TypeError, match=sentence):
            state_json.encode(value, "sched")


def test_what_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        state_json.encode(value, "thing")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "Popen", "v": ["true"]},
        {"$": "default", "v": [], "of": "eval"},
        {"$": "dtype", "v": "torch.load"},
        {"$": "tensor", "v": "gone"},
        {"$": "number", "dtype": "O", "v": ""},
        {"$": "ndarray", "dtype": "<f8", "shape": [3], "v": "AAAA"},
        {"$": "bytes", "v": "not base64!"},
        {"$": "float", "v": "00"},
        {"$": "int", "v": "zz"},
        {"$": ["list"], "v": 1},
        {"$": "tuple"},
    ],
)
def test_a_file_can_only_name_what_is_in_the_table(value):
    with pytest.raises(ValueError, match="cannot be decoded"):
        state_json.decode({"a": [value]}, {})
