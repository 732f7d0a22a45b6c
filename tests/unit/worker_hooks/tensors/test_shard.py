"""A replica's live state as a file: every kind of tensor, any number of writers, little memory."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.tensors import DTYPES, OURS, bits, everything, layouts, noise, tensors_of

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.checksum import BLOCK
from worker_hooks.storage.safetensors_file import read_header, sha256_of
from worker_hooks.tensors import shard
from worker_hooks.tensors.reader import PIECE
from worker_hooks.tensors.shard import Replica, digest, write
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def quiet(_nbytes):
    pass


def replica(tensors, buffers=(), rest="{}", **metadata):
    return Replica(tensors, buffers, rest, metadata)


# --- one file ----------------------------------------------------------------------------------


def test_every_type_comes_back_bit_by_bit(tmp_path):
    tensors = everything()
    done = write(tmp_path / "x", replica(tensors), 0, 1, quiet)
    assert done.sha256 == sha256_of(tmp_path / "x", quiet)
    assert done.nbytes == (tmp_path / "x").stat().st_size
    assert done.digest == digest(replica(tensors), quiet)
    found = {each.name: each for each in tensors_of(tmp_path / "x")}
    assert {name: bits(each.tensor) for name, each in found.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    assert all(each.global_shape == tuple(each.tensor.shape) for each in found.values())
    assert all(each.offsets == (0,) * each.tensor.dim() for each in found.values())


def test_the_library_reads_what_it_knows(tmp_path):
    tensors = everything()
    write(tmp_path / "x", replica(tensors, who="me"), 0, 1, quiet)
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.dtype not in OURS:
            assert bits(read[name]) == bits(tensor), name
    double = torch.view_as_complex(read["complex128.2x3x4"])
    assert bits(double) == bits(tensors["complex128.2x3x4"])
    with safe_open(tmp_path / "x", "pt") as file:
        told = file.metadata()
    assert (told["format"], told["DCP_VERSION"], told["who"], told["rest"]) == (
        "pt",
        "1.0",
        "me",
        "{}",
    )
    sharding = json.loads(told["DCP_SHARDING_INFO"])
    assert {name: place["saved_offsets"] for name, place in sharding.items()} == {
        name: [0] * tensor.dim() for name, tensor in read.items()
    }


def test_every_layout_comes_back_bit_by_bit(tmp_path):
    tensors = layouts()
    write(tmp_path / "x", replica(tensors), 0, 1, quiet)
    found = {each.name: bits(each.tensor) for each in tensors_of(tmp_path / "x")}
    assert found == {
        name: bits(tensor.resolve_conj().resolve_neg()) for name, tensor in tensors.items()
    }


def test_every_type_may_lie_anyhow(tmp_path):
    tensors = {str(dtype): noise((4, 6), dtype).t()[1:, ::2] for dtype in DTYPES}
    write(tmp_path / "x", replica(tensors), 0, 1, quiet)
    found = {each.name: bits(each.tensor) for each in tensors_of(tmp_path / "x")}
    assert found == {name: bits(tensor) for name, tensor in tensors.items()}


def test_tensors_lie_aligned(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.ones(3),
        "c": torch.ones(3).double(),
    }
    tensors["d"] = torch.ones(1, dtype=torch.complex128)
    write(tmp_path / "x", replica(tensors), 0, 1, quiet)
    found = read_header(tmp_path / "x")
    assert [entry.name for entry in found.entries] == ["d", "c", "b", "a"]
    assert found.data_offset % 64 == 0


def test_a_tensor_that_lies_badly_in_its_file_can_be_used(tmp_path):
    wanted = noise((3,), torch.complex128)
    entries = [Entry("odd", "U8", (1,), 1), entry_of("double", wanted)]
    safetensors_file.write(
        tmp_path / "x", safetensors_file.header(entries, {}), [b"1", to_bytes(wanted)], quiet
    )
    found = {each.name: each.tensor for each in tensors_of(tmp_path / "x")}["double"]
    assert found.data_ptr() % 16 == 0  # torch's own code crashes otherwise
    assert bits(found.clone()) == bits(wanted)


def test_a_read_tensor_is_not_the_file(tmp_path):
    write(tmp_path / "x", replica({"a": torch.ones(4)}), 0, 1, quiet)
    before = (tmp_path / "x").read_bytes()
    (found,) = tensors_of(tmp_path / "x")
    found.tensor.zero_()
    assert (tmp_path / "x").read_bytes() == before


def test_buffers_are_saved_and_not_compared(tmp_path):
    def state(value):
        buffer = torch.full((3,), value)
        return replica({"w": torch.ones(2)}, [(entry_of("bn.mean", buffer), to_bytes(buffer))])

    done = [write(tmp_path / str(value), state(value), 0, 1, quiet) for value in (1.0, 2.0)]
    assert done[0].digest == done[1].digest == digest(state(3.0), quiet)
    assert done[0].sha256 != done[1].sha256
    assert load_file(tmp_path / "2.0")["bn.mean"].tolist() == [2.0] * 3


def test_two_of_one_name_are_refused(tmp_path):
    state = replica({"w": torch.ones(2)}, [(Entry("w", "U8", (1,), 1), memoryview(b"1"))])
    with pytest.raises(ValueError, match="two tensors would be called 'w'"):
        write(tmp_path / "x", state, 0, 1, quiet)


def test_an_empty_state_is_a_file(tmp_path):
    done = write(tmp_path / "x", replica({}), 0, 1, quiet)
    assert list(tensors_of(tmp_path / "x")) == []
    assert done.digest == digest(replica({}), quiet) != digest(replica({}, rest="[]"), quiet)


def lazy():
    return torch.nn.LazyLinear(3).weight


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


def fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "not strided but sparse_coo"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "not strided but sparse_csr"),
        (lambda: torch.ones(2, device="meta"), "on the meta device"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "a NestedTensor, which",
        ),
        (quantized, "quantized"),
        (lazy, "not initialized"),
        (fake, "a FakeTensor, which"),
        (
            lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
            "elements of type torch.bits8",
        ),
    ],
)
def test_what_has_no_plain_bytes_is_named(tmp_path, make, why):
    state = replica({"good": torch.ones(1), "bad": make()})
    with pytest.raises(TypeError, match=f"tensor 'bad' cannot be saved: (it is )?{why}"):
        write(tmp_path / "x", state, 0, 1, quiet)
    with pytest.raises(TypeError, match="'bad'"):
        digest(state, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_subclass_with_ways_of_its_own_is_its_elements(tmp_path):
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ in {"detach", "contiguous", "view"}:
                raise AssertionError(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    odd = torch.arange(6.0).reshape(2, 3).as_subclass(Odd)
    write(tmp_path / "x", replica({"odd": odd}), 0, 1, quiet)
    assert load_file(tmp_path / "x")["odd"].tolist() == [[0, 1, 2], [3, 4, 5]]


# --- the digest --------------------------------------------------------------------------------


def test_replicas_of_another_layout_have_one_digest():
    tensors = layouts()
    same = {
        name: tensors[name].resolve_conj().resolve_neg().contiguous() for name in reversed(tensors)
    }
    assert digest(replica(tensors), quiet) == digest(replica(same, other="metadata"), quiet)


def test_every_bit_counts():
    tensors = {
        "a": noise((3, 2), torch.float32),
        "b": noise((1300, 1700), torch.bfloat16),
        "c": torch.ones(()),
    }
    rightly = digest(replica(tensors), quiet)
    seen = {rightly}
    for name, at, bit in (
        ("a", 0, 0),
        ("a", 23, 7),
        ("b", 0, 1),
        ("b", BLOCK, 3),
        ("b", -1, 6),
        ("c", 3, 7),
    ):
        raw = tensors[name].view(-1).view(torch.uint8)
        raw[at] ^= 1 << bit
        seen.add(digest(replica(tensors), quiet))
        raw[at] ^= 1 << bit
    assert len(seen) == 7
    assert digest(replica(tensors), quiet) == rightly


def test_more_than_bits_counts():
    one = torch.ones(2, 3)
    states = [
        replica({"a": one}),
        replica({"b": one}),
        replica({"a": one.t()}),
        replica({"a": one.view(torch.int32)}),
        replica({"a": one, "b": torch.ones(0)}),
        replica({"a": one}, rest="[]"),
    ]
    assert len({digest(state, quiet) for state in states}) == len(states)


def test_a_digest_says_how_far_it_is():
    told = []
    digest(replica({"a": torch.zeros(3, 1 << 20), "b": torch.zeros(5)}), told.append)
    assert sum(told) == (12 << 20) + 20
    assert max(told) == PIECE


def test_a_state_of_many_blocks_has_the_digest_of_its_definition(tmp_path):
    tensors = {"a": noise((BLOCK + 5,), torch.uint8), "b": noise((BLOCK,), torch.int16)}
    told = [[("b", "I16", [BLOCK], 2 * BLOCK), ("a", "U8", [BLOCK + 5], BLOCK + 5)], "rest"]
    data = bytes(to_bytes(tensors["b"])) + bytes(to_bytes(tensors["a"]))
    blocks = [hashlib.sha256(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK)]
    first = hashlib.sha256(json.dumps(told).encode()).digest()
    wanted = hashlib.sha256(first + b"".join(blocks)).hexdigest()
    buffers = [(Entry("c", "U8", (BLOCK,), BLOCK), memoryview(bytes(BLOCK)))]
    state = replica(tensors, buffers, "rest")
    assert [write(tmp_path / "x", state, 1, n, quiet).digest for n in (2, 3)] == [wanted] * 2
    assert write(tmp_path / "x", state, 0, 1, quiet).digest == wanted == digest(state, quiet)
    assert shard.SHARDING in read_header(tmp_path / "x").metadata


# --- several writers ---------------------------------------------------------------------------


def mixed():
    return {
        **everything(),
        **layouts(),
        "table": noise((1003, 1000), torch.float32, 1),
        "wide": noise((1, 1, 3, 1_000_000), torch.complex128, 2),
        "row": noise((1, 2_000_001), torch.uint8, 3),
        "tiny rows": noise((1_500_000, 1), torch.bool, 4),
    }


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_parts_are_equal_and_make_up_the_whole(tmp_path, parts):
    tensors = mixed()
    buffer = torch.arange(3)
    state = replica(tensors, [(entry_of("buffer", buffer), to_bytes(buffer))], rest='{"lr":1}')
    whole, places = {}, {}
    sizes = []
    for part in range(parts):
        told = []
        done = write(tmp_path / str(part), state, part, parts, told.append)
        assert done.digest == digest(state, quiet)
        assert done.sha256 == sha256_of(tmp_path / str(part), quiet)
        assert sum(told) >= sum(tensor.nbytes for tensor in tensors.values())
        sizes.append(done.nbytes)
        assert read_header(tmp_path / str(part)).metadata["rest"] == '{"lr":1}'
        for name, tensor, offsets, shape in tensors_of(tmp_path / str(part)):
            assert (name == "buffer") <= (part == 0)
            target = whole.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
            assert tuple(target.shape) == shape
            for dim, (at, size) in enumerate(zip(offsets, tensor.shape, strict=True)):
                target = target.narrow(dim, at, size)
            target.copy_(tensor)
            places[name] = places.get(name, 0) + tensor.numel()
    wanted = {
        name: tensor.resolve_conj().resolve_neg()
        for name, tensor in {**tensors, "buffer": buffer}.items()
    }
    assert {name: bits(tensor) for name, tensor in whole.items()} == {
        name: bits(t) for name, t in wanted.items()
    }
    assert places == {name: tensor.numel() for name, tensor in wanted.items()}  # each element once
    row = tensors["wide"].nbytes // 3  # cannot be cut finer
    assert max(sizes) - min(sizes) <= 2 * row


@pytest.mark.parametrize(("part", "parts"), [(0, 0), (1, 1), (-1, 2), (2, 2)])
def test_there_is_no_such_part(tmp_path, part, parts):
    with pytest.raises(ValueError, match=f"no part {part} of {parts}"):
        write(tmp_path / "x", replica({}), part, parts, quiet)


def test_more_writers_than_tensors(tmp_path):
    state = replica({"a": torch.ones(3), "b": torch.ones(0)})
    for part in range(4):
        write(tmp_path / str(part), state, part, 4, quiet)
    names = [name for part in range(4) for name in load_file(tmp_path / str(part))]
    assert sorted(names) == ["a", "b"]
