"""A history that grows is encoded as any value is, and what it had before is not encoded again."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from worker_hooks.script import growing
from worker_hooks.script.growing import LONG, GrowingText, is_growing
from worker_hooks.script.watch import Variable
from worker_hooks.tensors import state_json

ITEMS = [0.1, -0.0, math.nan, math.inf, 3, 1 << 70, True, None, 'a"b\n', b"x", (1, 2.5), 1j]


def whole(value):
    return state_json.dumps(state_json.encode(value, "v")[0])


def changed(value, draw):
    """Somewhere in it: an item is appended, replaced or removed, or a list is cleared."""
    where = draw.choice([value, *value.values()]) if isinstance(value, dict) else value
    item = draw.choice(ITEMS)
    if isinstance(where, dict):
        if where and draw.random() < 0.2:
            del where[draw.choice([*where])]
        else:
            where[draw.choice(["a", "b", 7, (1, 2), f"k{len(where)}"])] = draw.choice(
                [item, [item] * 40]
            )
    elif isinstance(where, list):
        match draw.randrange(12):
            case 0:
                where.clear()
            case 1 | 2 if where:
                where[draw.randrange(len(where))] = item
            case 3 if where:
                del where[draw.randrange(len(where))]
            case _:
                where.append(item)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "kind", [list, dict, OrderedDict, lambda each: defaultdict(list, each), Counter]
)
def test_its_text_is_that_of_the_value_as_it_is(seed, kind):
    draw = random.Random(seed)
    value = [1.5] * LONG if kind is list else kind({"loss": [0.5] * LONG, "best": 3})
    text = GrowingText()
    for _ in range(300):
        changed(value, draw)
        if is_growing(value):
            assert text.text(value, "v") == whole(value)


@pytest.mark.parametrize(
    "value",
    [
        [float(each) for each in range(500)],
        [(each, str(each)) for each in range(500)],
        dict.fromkeys(range(500), 0.5),
        {f"step {each}": 0.5 for each in range(500)},
        {"loss": [float(each) for each in range(500)], "lr": [0.1] * 500},
        defaultdict(list, {"loss": [float(each) for each in range(500)], "lr": [0.1] * 500}),
        {f"class {each}": [] for each in range(100)} | {"loss": [0.5] * 500},
    ],
    ids=["list", "pairs", "by number", "by name", "in a dict", "by default", "in a large dict"],
)
def test_only_what_is_new_is_encoded(monkeypatch, value):
    text, encoded = GrowingText(), []
    text.text(value, "v")
    encode = state_json.encode
    monkeypatch.setattr(
        growing.state_json,
        "encode",
        lambda each, path: (encoded.append(each), encode(each, path))[1],
    )
    if isinstance(value, dict) and "loss" in value:
        value["loss"].append(7.5)
    elif isinstance(value, dict):
        value[type(next(iter(value)))(7_000_000)] = 7.5
    else:
        value.append((7, "x"))
    found = text.text(value, "v")
    monkeypatch.undo()
    assert found == whole(value)
    assert len(encoded) <= (250 if len(value) == 101 else 6)


def test_what_is_no_plain_value_is_left_to_others():
    assert GrowingText().text([torch.zeros(1)] * LONG, "v") is None
    assert GrowingText().text([object()] * LONG, "v") is None
    assert GrowingText().text({"a": [1] * LONG, "b": torch.zeros(3)}, "v") is None
    assert not is_growing([1] * (LONG - 1))
    assert not is_growing((1,) * LONG)


def test_a_variable_packs_a_history_as_before():
    holder = {"history": {"loss": [0.5] * LONG, "step": [1] * LONG}}
    variable = Variable("history", holder, "history")
    for step in range(5):
        holder["history"]["loss"].append(step / 3)
        assert variable.look()
        variable.pack()
        assert variable.packed.text == whole(holder["history"])


def test_a_variable_that_is_too_large_is_not_packed(monkeypatch):
    holder = {"history": [(each, 0.5) for each in range(9000)]}
    variable = Variable("history", holder, "history")
    assert variable.look()
    assert variable.is_large
    monkeypatch.setattr(state_json, "encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(ValueError, match="too large"):
        variable.pack()
    assert variable.packed is None
