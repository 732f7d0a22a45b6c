"""A torch generator's state, read from memory: what ``get_state`` says, in every state of it."""

import ctypes

import pytest
import torch

from worker_hooks.rng import torch_engine
from worker_hooks.rng.generators import TorchStream


def drawn(seed, *draws):
    generator = torch.Generator().manual_seed(seed)
    for count, dtype in draws:
        torch.randn(count, generator=generator, dtype=dtype)
    return generator


def saved(generator):
    stream = TorchStream(generator)
    room = ctypes.create_string_buffer(stream.nbytes)
    stream.writer(ctypes.addressof(room))()
    return room.raw


STATES = {
    "fresh": (),
    "one float": ((1, torch.float32),),
    "one double": ((1, torch.float64),),
    "both": ((3, torch.float32), (5, torch.float64)),
    "many": ((10_000, torch.float32),),
    "at the end of its words": ((624, torch.float32),),
}


@pytest.mark.parametrize("draws", STATES.values(), ids=STATES)
@pytest.mark.parametrize("seed", [0, 7, (1 << 63) + 5])
def test_a_state_read_from_memory_goes_on_as_the_generator(seed, draws):
    generator = drawn(seed, *draws)
    state = saved(generator)
    assert len(state) == torch_engine.NBYTES
    other = torch.Generator()
    TorchStream(other).restore(state)
    assert saved(other) == state
    for dtype in (torch.float32, torch.float64):
        expected = torch.randn(3, generator=generator, dtype=dtype)
        assert torch.equal(torch.randn(3, generator=other, dtype=dtype), expected)
        assert torch.rand(700, generator=other).equal(torch.rand(700, generator=generator))


def test_spare_normal_numbers_that_are_gone_are_not_written_again():
    generator = drawn(3, (1, torch.float64))
    room = ctypes.create_string_buffer(torch_engine.NBYTES)
    write = TorchStream(generator).writer(ctypes.addressof(room))
    write()
    torch.randn(1, generator=generator, dtype=torch.float64)  # the spare one
    write()
    assert room.raw == saved(generator)
    torch.randn(1, generator=generator, dtype=torch.float64)
    write()
    assert room.raw == saved(generator)


def test_where_memory_is_laid_out_otherwise_the_public_way_is_taken(monkeypatch):
    monkeypatch.setattr(torch_engine, "_offset", lambda: None)
    generator = drawn(5, (9, torch.float32))
    state = saved(generator)
    assert state == bytes(generator.get_state().tolist())
    other = torch.Generator()
    TorchStream(other).restore(state)
    assert torch.equal(torch.rand(9, generator=other), torch.rand(9, generator=generator))


def test_a_state_of_another_size_is_none():
    with pytest.raises(ValueError, match="2526 bytes instead of 2527"):
        torch_engine.public(bytes(2526))
