"""A look finds what changes in a data set, whatever it is; a digest tells batches apart."""

import functools
import logging
import random
from collections import deque
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from worker_hooks.data.look import MOST, digest, first_change, generators, look, with_opened


class Thing:
    def __init__(self):
        self.calls = 0
        self.words = ["a", "b"] * 500
        self.cache = {}
        self.tensor = torch.zeros(100_000)
        self.array = np.zeros(5)
        self.objects = np.array([None, "x"], dtype=object)
        self.inner = SimpleNamespace(rng=random.Random(1), bits=np.random.default_rng(1))
        self.call = functools.partial(max, [1])
        self.transform = lambda x: x + self.inner.rng.random()
        self.recent = deque([1])
        self.buffer = bytearray(8)
        self.myself = self


def change(thing, what):
    exec(what, {"it": thing, "torch": torch, "BytesIO": BytesIO})


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("it.calls += 1", "d.calls"),
        ("it.words.append('c')", "d.words"),
        ("it.cache[1] = 2", "d.cache"),
        ("it.tensor[50_000] = 1", "d.tensor"),  # in its middle, which its version tells
        ("it.tensor.data[-1] = 1", "d.tensor"),
        ("it.array[2] = 7", "d.array"),
        ("it.objects[1] = 'y'", "d.objects"),
        ("it.inner.rng.random()", "d.inner.rng"),
        ("it.inner.bits.random()", "d.inner.bits"),
        ("it.call.args[0].append(2)", "d.call.args[0]"),
        ("it.recent[0] = 2", "d.recent[0]"),
        ("it.buffer[1] = 1", "d.buffer"),
        ("it.another = None", "d.another"),
        ("del it.calls", "d.calls"),
    ],
)
def test_each_of_these_changes_is_found(what, where):
    thing = Thing()
    before = look({"d": thing})
    assert first_change(before, look({"d": thing})) == ""
    change(thing, what)
    assert first_change(before, look({"d": thing})) == where


class Reader:
    def __init__(self):
        self.place = 0


@pytest.mark.parametrize(
    "what", ["it.file = BytesIO()", "it.table = torch.ones(3)", "it.late = object()"]
)
def test_what_is_opened_at_its_first_use_is_no_change_and_looked_at_from_then_on(what):
    thing = SimpleNamespace(file=None, table=None)
    before = look({"d": thing})
    change(thing, what)
    now = look({"d": thing})
    assert first_change(before, now)
    before = with_opened(before, now)
    assert first_change(before, now) == ""
    thing.file, thing.table, thing.late = 1, 2, 3
    assert first_change(before, look({"d": thing}))


def test_what_was_opened_and_moves_on_is_a_change():
    thing = SimpleNamespace(reader=None)
    before = look({"d": thing})
    thing.reader = Reader()
    before = with_opened(before, look({"d": thing}))
    thing.reader.place += 1
    now = look({"d": thing})
    assert first_change(with_opened(before, now), now) == "d.reader.place"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (1, "d.late"),
        ("word", "d.late"),
        ([], "d.late"),
        ({}, "d.late"),
        (random.Random(1), "d.late"),
        (np.random.default_rng(1), "d.late"),
    ],
)
def test_what_may_collect_or_count_or_draw_is_not_opened(value, where):
    thing = SimpleNamespace(late=None)
    before = look({"d": thing})
    thing.late = value
    now = look({"d": thing})
    assert first_change(with_opened(before, now), now) == where


def test_a_cache_that_grows_is_a_change_whatever_it_holds():
    thing = SimpleNamespace(cache={})
    before = look({"d": thing})
    thing.cache[1] = torch.ones(3)
    now = look({"d": thing})
    assert first_change(with_opened(before, now), now) == "d.cache"


def test_generators_that_are_restored_may_draw():
    thing = SimpleNamespace(own=torch.Generator(), numpy=np.random.default_rng())
    ignored = generators({"d": thing})
    before = look({"d": thing}, ignored)
    torch.rand(3, generator=thing.own)
    thing.numpy.random()
    assert first_change(before, look({"d": thing}, ignored)) == ""


def test_what_only_serves_may_change():
    """A logger refers to all loggers; the owner of a method may be a whole training."""
    owner = Thing()
    thing = SimpleNamespace(log=logging.getLogger("a look"), call=owner.__init__, kind=Thing)
    before = look({"d": thing})
    logging.getLogger("a look at another")
    owner.calls += 1
    assert first_change(before, look({"d": thing})) == ""


def test_a_look_ends():
    assert len(look({"d": [[number] for number in range(10**5)]})) <= MOST
    many = {str(number): [[], [[]]] for number in range(10**4)}
    assert len(look(many)) <= MOST


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(9), "y": [1, "b"]},
        {"x": torch.zeros(9), "y": [1, "c"]},
        {"x": torch.zeros(3, 3), "y": [1, "b"]},
        {"x": torch.zeros(9, dtype=torch.int32), "y": [1, "b"]},
        {"x": np.zeros(9), "y": [1, "b"]},
        {"x": torch.zeros(9), "y": (1, "b")},
        {"x": torch.zeros(9), "y": [1, "b", None]},
        [torch.zeros(9), [1, "b"]],
        SimpleNamespace(x=torch.zeros(9)),
        None,
    ],
)
def test_other_batches_have_other_digests(other):
    batch = {"x": torch.zeros(9), "y": [1, "b"]}
    assert digest(batch) == digest({"x": torch.zeros(9), "y": [1, "b"]})
    assert digest(batch) != digest(other)


def test_the_end_of_a_large_tensor_counts_and_what_lies_between_elements_does_not():
    large = torch.zeros(10**6)
    before = digest(large)
    large[-1] = 1
    assert digest(large) != before
    spread = torch.zeros(10, 2)
    known = digest(spread[:, 0])
    spread[:, 1] = 1
    assert digest(spread[:, 0]) == known
    assert digest(torch.zeros(2, dtype=torch.bfloat16)) != digest(
        torch.ones(2, dtype=torch.bfloat16)
    )


def test_a_view_whose_memory_is_freed_is_not_read():
    """As FSDP's parameters are between two steps; the process ended by SIGSEGV."""
    whole = torch.zeros(1 << 20)
    parts = {"part": whole[1 << 19 :], "turned": whole.view(2, -1).t(), "whole": whole}
    before = look(parts, frozenset())
    whole.untyped_storage().resize_(0)
    assert look(parts, frozenset()) != before
    assert look(parts, frozenset()) == look(parts, frozenset())


def test_a_tensor_of_another_class_is_not_read():
    class Shown(torch.Tensor):
        pass

    shown = torch.zeros(3).as_subclass(Shown)
    assert look({"one": shown}, frozenset()) == look({"one": shown}, frozenset())


def test_a_path_that_was_opened_has_not_changed():
    """Its slots remember its text, its hash, its parts."""
    files = [Path("/a/b"), Path("/a/c")]
    before = look({"files": files}, frozenset())
    assert (hash(files[0]), str(files[1])) is not None
    assert look({"files": files}, frozenset()) == before


def test_of_a_large_transposed_array_a_corner_is_looked_at():
    wide = np.zeros((1 << 12, 1 << 8)).T
    shown = np.broadcast_to(np.zeros(1), (1 << 20, 1 << 20))  # 8 TB, if it were copied
    expanded = torch.zeros(1).expand(1 << 20, 1 << 20)
    roots = {"wide": wide, "shown": shown, "expanded": expanded}
    before = look(roots, frozenset())
    wide[0, 0] = 1
    assert look(roots, frozenset()) != before
