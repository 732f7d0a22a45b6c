"""All randomness as bytes: exact to the last spare normal number, and cheap."""

# ruff: noqa: NPY002  numpy's functions of old are what is tested

import ctypes
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from worker_hooks.contract.status_page import Entry, Page, create
from worker_hooks.rng import generators
from worker_hooks.rng import randomness as rng
from worker_hooks.rng.generators import stream_of
from worker_hooks.rng.randomness import Randomness, derive, private_streams, process_streams

pytestmark = pytest.mark.usefixtures("own_randomness")

ROOT = Path(__file__).parents[4]


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def draw():
    """Some of everything; an odd count of normal numbers leaves a spare one behind."""
    return (
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        random.randrange(10**9),
    )


def saved(randomness):
    return randomness.split(randomness.capture())


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_what_is_drawn_after_a_restore_is_what_was_drawn_before(draws):
    seed(1)
    for _ in range(draws):
        draw()
    randomness = Randomness()
    state = saved(randomness)
    expected = [draw() for _ in range(3)]
    seed(2)
    draw()
    assert Randomness().restore(state) == ()
    assert [draw() for _ in range(3)] == expected


def test_spare_normal_numbers_are_a_part_of_it():
    seed(3)
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(())
    state = saved(Randomness())
    expected = random.gauss(0, 1), np.random.randn(), torch.randn(()).item()
    seed(4)
    Randomness().restore(state)
    assert (random.gauss(0, 1), np.random.randn(), torch.randn(()).item()) == expected


def test_no_spare_number_is_left_where_there_was_none():
    seed(3)
    state = saved(Randomness())
    expected = random.gauss(0, 1), np.random.randn()
    seed(4)
    random.gauss(0, 1)
    np.random.randn()
    Randomness().restore(state)
    assert (random.gauss(0, 1), np.random.randn()) == expected


def test_capturing_draws_nothing():
    seed(5)
    expected = draw()
    seed(5)
    Randomness().capture()
    derive(saved(Randomness()), 3)
    assert draw() == expected


def test_entries_are_what_is_written_and_fit_a_page():
    seed(6)
    randomness = Randomness()
    names = [entry.name for entry in randomness.entries]
    assert names == ["rng.torch", "rng.numpy", "rng.python"]
    assert randomness.entries[0] == Entry("rng.torch", "U8", (2527,), 2527)
    fd = create(0, 0, randomness.entries)
    page = Page(fd)
    expected = randomness.capture()
    page.write(1, 0, 1, b"{}", randomness.fill, is_commit=True)
    assert page.record(1).payload == expected
    __import__("os").close(fd)


def test_fill_writes_no_byte_too_many():
    randomness = Randomness()
    room = ctypes.create_string_buffer(b"\xa5" * (randomness.nbytes + 64))
    assert randomness.fill(ctypes.addressof(room)) == randomness.nbytes
    assert room.raw[randomness.nbytes : -1] == b"\xa5" * 64
    assert room.raw[: randomness.nbytes] == randomness.capture()


def test_fast_and_slow_ways_write_the_same_bytes(monkeypatch):
    seed(7)
    random.gauss(0, 1)
    np.random.randn()
    fast = Randomness()
    assert fast._streams["rng.python"]._at and fast._streams["rng.numpy"]._at
    assert fast._streams["rng.numpy"]._gauss_at
    monkeypatch.setattr(generators, "_python_state", lambda _: None)
    monkeypatch.setattr(generators, "_numpy_state", lambda _: None)
    slow = Randomness()
    assert slow._streams["rng.python"]._at is None
    assert slow.capture() == fast.capture()


@pytest.mark.parametrize("lost", ["_numpy_state", "_numpy_gauss", "_python_state"])
def test_each_slow_way_is_exact(monkeypatch, lost):
    monkeypatch.setattr(generators, lost, lambda _: None)
    seed(8)
    draw()
    state = saved(Randomness())
    expected = draw()
    seed(9)
    Randomness().restore(state)
    assert draw() == expected


def test_another_interpreter_takes_the_slow_way(monkeypatch):
    monkeypatch.setattr(generators.sys, "implementation", types.SimpleNamespace(name="other"))
    assert generators._python_state(random.Random(1)) is None
    assert generators._numpy_gauss(np.random.mtrand._rand) is None
    monkeypatch.undo()
    monkeypatch.setattr(generators, "_random", types.SimpleNamespace(Random=object))
    assert generators._python_state(random.Random(1)) is None


@pytest.mark.parametrize("number", range(20))
def test_states_are_found_whatever_they_are(number):
    source, rng_state = random.Random(number), np.random.RandomState(number)
    for _ in range(number * 31):
        source.gauss(0, 1)
        rng_state.randn()
    for thing, kind in ((source, generators.PythonStream), (rng_state, generators.NumpyStream)):
        stream = kind(thing)
        assert stream._at
        state = Randomness({"x": stream}).capture()
        expected = [thing.gauss(0, 1) if thing is source else thing.randn() for _ in range(5)]
        stream.restore(state)
        assert [
            thing.gauss(0, 1) if thing is source else thing.randn() for _ in range(5)
        ] == expected


def test_a_size_that_does_not_fit_is_named_and_changes_nothing():
    seed(10)
    state = saved(Randomness())
    state["rng.numpy"] = b"short"
    del state["rng.python"]
    seed(11)
    expected = np.random.rand(), random.random()
    seed(11)
    assert set(Randomness().restore(state)) == {"rng.numpy", "rng.python"}
    assert (np.random.rand(), random.random()) == expected


def test_bytes_that_are_no_state_are_refused():
    state = saved(Randomness())
    zeros = {name: bytes(len(each)) for name, each in state.items()}
    zeros["rng.torch"] = b"\xff" * len(state["rng.torch"])
    assert set(Randomness().restore(zeros)) >= {"rng.numpy", "rng.torch"}


def test_another_bit_generator_of_numpy_is_noticed():
    randomness = Randomness()
    assert randomness.is_complete()
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert not randomness.is_complete()
        state = saved(randomness)
        assert "rng.numpy" not in process_streams()
        assert set(state["rng.numpy"]) == {0}
        assert Randomness().restore(state) == ()
        np.random.set_bit_generator(np.random.MT19937(5))
        assert not randomness.is_complete()
        expected = saved(Randomness())["rng.numpy"]
        assert saved(randomness)["rng.numpy"] == expected
    finally:
        np.random.set_bit_generator(own)
    assert randomness.is_complete()
    assert randomness.restore(state) == ("rng.numpy",)


def test_a_process_without_numpy_has_no_numpy_randomness():
    code = """
import sys; sys.modules["numpy"] = None
import warnings; warnings.simplefilter("ignore")
import torch
from worker_hooks.rng.randomness import Randomness
print([entry.name for entry in Randomness().entries], Randomness().is_complete())
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['rng.torch', 'rng.python'] True"


def test_numpy_that_comes_later_is_noticed(monkeypatch):
    monkeypatch.setattr(rng, "numpy_random", lambda: None)
    early = Randomness()
    assert early.is_complete()
    monkeypatch.undo()
    assert not early.is_complete()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("cuda", ["rng.cuda.0", "rng.cuda.2"]),
        ("xpu", ["rng.xpu.0", "rng.xpu.1", "rng.xpu.2"]),
        ("npu", ["rng.npu.0", "rng.npu.1", "rng.npu.2"]),  # torch has it once torch_npu is imported
    ],
)
def test_devices_in_use_are_a_part_of_it(monkeypatch, kind, names):
    devices = [torch.Generator().manual_seed(each) for each in range(3)]
    before, is_used = Randomness(), False
    of_kind = types.SimpleNamespace(is_initialized=lambda: is_used, default_generators=devices)
    monkeypatch.setattr(torch, kind, of_kind, raising=False)
    found = types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", [True, False, True].__getitem__, raising=False
    )
    assert before.is_complete()  # nothing was drawn on them
    is_used = True
    assert not before.is_complete()
    randomness = Randomness()
    assert [entry.name for entry in randomness.entries][3:] == names
    state = saved(randomness)
    expected = [torch.rand(3, generator=each).tolist() for each in devices]
    randomness.restore(state)
    assert torch.rand(3, generator=devices[0]).tolist() == expected[0]
    assert torch.rand(3, generator=devices[2]).tolist() == expected[2]


def test_cuda_is_never_initialised_for_it():
    assert not torch.cuda.is_initialized()
    Randomness().capture()
    assert not torch.cuda.is_initialized()


def test_a_new_ranks_randomness_is_its_own_and_always_the_same():
    seed(12)
    state = saved(Randomness()) | {
        "rng.cuda.0": bytes(16),
        "rng.npu.0": bytes(5056),  # a generator of another kind
        "data.start.x": b"not a source",
    }
    told = {rank: derive(state, rank) for rank in (4, 5)}
    assert told[4] == derive(state, 4)
    assert told[4].keys() == {"rng.torch", "rng.numpy", "rng.python", "rng.cuda.0"}
    drawn = []
    for rank in (4, 5, 4):
        assert Randomness().restore(told[rank]) == ()
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    flat = [str(number) for draws in drawn[:2] for number in draws]
    assert len(set(flat)) == len(flat)
    assert len(told[4]["rng.cuda.0"]) == 16
    assert told[4]["rng.cuda.0"] != told[5]["rng.cuda.0"]


class Owner:
    def __init__(self, number):
        self.torch = torch.Generator().manual_seed(number)
        self.again = self.torch
        self.python = random.Random(number)
        self.old = np.random.RandomState(number)
        self.new = np.random.default_rng(number)
        self.fast = np.random.Generator(np.random.SFC64(number))
        self.system = random.SystemRandom()
        self.shared = torch.default_generator
        self.other = [1, 2]

    def draw(self):
        return (
            torch.rand(3, generator=self.torch).tolist(),
            [self.python.gauss(0, 1) for _ in range(3)],
            self.old.randn(3).tolist(),
            self.new.integers(1000, size=3, dtype=np.uint32).tolist(),
            self.fast.random(3).tolist(),
        )


def test_generators_of_objects_are_found_once_and_restored():
    one, two = Owner(1), Owner(2)
    found = private_streams({"a": one, "b": None, "c": 3})
    assert list(found) == ["a.torch", "a.python", "a.old", "a.new", "a.fast"]
    one.draw()
    state = saved(Randomness(found))
    expected = one.draw()
    Randomness(private_streams({"a": two})).restore(state)
    assert two.draw() == expected


def test_a_capture_is_cheap():
    randomness = Randomness()
    room = ctypes.create_string_buffer(randomness.nbytes)
    address = ctypes.addressof(room)

    def by_the_libraries():
        torch.get_rng_state(), random.getstate(), np.random.get_state()

    def best_ns(capture):
        taken = []
        for _ in range(2000):
            began = time.perf_counter_ns()
            capture()
            taken.append(time.perf_counter_ns() - began)
        return sorted(taken)[len(taken) // 10]

    ratios = (
        best_ns(lambda: randomness.fill(address)) / best_ns(by_the_libraries) for _ in "12345"
    )
    assert min(ratios) < 0.7  # 0.42 here, and they have written nothing down


CHANGES = {
    "nothing": lambda: None,
    "torch's": lambda: torch.rand(1),
    "all words of torch's": lambda: torch.rand(5000),
    "one normal number of torch's": lambda: torch.randn(()),
    "one double of torch's": lambda: torch.randn((), dtype=torch.float64),
    "torch's seed": lambda: torch.manual_seed(int(torch.randint(1 << 40, ()))),
    "numpy's": np.random.rand,
    "all words of numpy's": lambda: np.random.rand(5000),
    "one normal number of numpy's": np.random.randn,
    "Python's": random.random,
    "all words of Python's": lambda: [random.random() for _ in range(700)],
    "one normal number of Python's": lambda: random.gauss(0, 1),
    "Python's seed": lambda: random.seed(random.random()),
}


def recorder(randomness):
    room = ctypes.create_string_buffer(randomness.nbytes)
    return room, randomness.recorder(ctypes.addressof(room))


def test_whatever_changes_a_state_has_it_written_again():
    seed(10)
    randomness = Randomness()
    room, states = recorder(randomness)
    choose = random.Random(11)
    states.write()
    for name in choose.choices(list(CHANGES), k=3000):
        CHANGES[name]()
        states.write()
        assert room.raw == randomness.capture(), name


def test_a_state_that_has_not_changed_is_not_copied_again():
    seed(12)
    randomness = Randomness()
    room, states = recorder(randomness)
    states.write()
    room[:] = bytes(len(room))
    states.write()
    assert not any(room.raw)
    random.random()  # as the last of the three
    states.write()
    written = [any(octets) for octets in randomness.split(room.raw).values()]
    assert written == [False, False, True]


def test_another_bit_generator_of_numpy_is_seen():
    seed(13)
    randomness = Randomness()
    room, states = recorder(randomness)
    states.write()
    mine = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        states.write()
    finally:
        np.random.set_bit_generator(mine)
    assert not any(randomness.split(room.raw)["rng.numpy"])


@pytest.mark.parametrize("lost", ["_numpy_state", "_numpy_gauss", "_python_state"])
def test_what_cannot_be_probed_is_always_written(monkeypatch, lost):
    monkeypatch.setattr(generators, lost, lambda _: None)
    seed(14)
    randomness = Randomness()
    room, states = recorder(randomness)
    for _ in range(3):
        states.write()
        assert not states.sees_all
        assert room.raw == randomness.capture()
        random.random()
        np.random.rand()


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_any_generator_of_numpy_continues_and_spawns_as_it_would_have(kind):
    old, new = (np.random.Generator(getattr(np.random, kind)(3)) for _ in range(2))
    old.random(5)
    old.integers(9, dtype="i4")
    old.spawn(2)
    saved = captured(old)
    expected = old.random(3), old.spawn(1)[0].random(3)
    stream_of(new).restore(saved)
    assert (new.random(3) == expected[0]).all()
    assert (new.spawn(1)[0].random(3) == expected[1]).all()


def test_the_state_of_a_generator_always_has_room():
    source = np.random.Generator(np.random.Philox(1))
    stream = stream_of(source)
    source.spawn(20)
    for _ in range(2000):
        source.integers(9, dtype="i4")
        assert captured(source, stream)


def test_a_sequence_of_seeds_goes_on_and_back():
    old, new = np.random.SeedSequence(1), np.random.SeedSequence(1)
    before = captured(old)
    old.spawn(3)
    stream_of(new).restore(captured(old))
    assert old.spawn(1)[0].spawn_key == new.spawn(1)[0].spawn_key == (3,)
    stream_of(old).restore(before)
    assert (old.spawn(1)[0].spawn_key, old.entropy) == ((0,), 1)
    assert (old.generate_state(2) == np.random.SeedSequence(1).generate_state(2)).all()


def captured(generator, stream=None):
    stream = stream or stream_of(generator)
    memory = ctypes.create_string_buffer(stream.nbytes)
    stream.writer(ctypes.addressof(memory))()
    return memory.raw
