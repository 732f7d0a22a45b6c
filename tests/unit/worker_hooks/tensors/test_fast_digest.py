"""The sum that replicas compare: the same for the same bytes, however they lie and are cut."""

import os
import random
import struct
import threading
import zlib

import pytest
import torch
from support.tensors import DTYPES, bits, everything, layouts, noise

from worker_hooks.tensors.fast_digest import FastDigest
from worker_hooks.tensors.reader import PIECE
from worker_hooks.tensors.shard import Replica, quick_digest, write_quick

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

WORDS = 257
ROW = 8 * WORDS
SMALL = 64 << 10
EDGES = [
    size + more for size in (SMALL, 256 << 10, PIECE) for more in (-ROW, -1, 0, 1, ROW - 1, ROW)
]
OFF = [SMALL + 8, SMALL + 7, SMALL + 3 * ROW + 4, 130_003, 261_121, 3 * PIECE + 513]


@pytest.fixture(autouse=True)
def told_threads(request, monkeypatch):
    """How many threads torch is said to have: it decides how much is summed up at once."""
    count = getattr(request, "param", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def replica(tensors, rest="{}"):
    return Replica(tensors, (), rest, {})


def of(*tensors):
    return quick_digest(replica({f"{place:03}": each for place, each in enumerate(tensors)}))


def summed(content, *cuts):
    """The digest of one tensor's bytes, cut into pieces at these places."""
    found, memory = FastDigest([len(content)]), memoryview(content)
    for start, stop in zip((0, *cuts), (*cuts, len(content)), strict=True):
        found.add(memory[start:stop])
    return found.digest("")


def spelled_out(tensors):
    """The sum as it is described, without torch."""
    found = found_columns = 0
    for content in tensors:
        if len(content) < SMALL:
            found = zlib.crc32(content, found)
            continue
        whole, columns = len(content) // ROW * ROW, [0] * WORDS
        for at in range(0, whole, ROW):
            words = struct.unpack_from(f"<{WORDS}Q", content, at)
            found = zlib.crc32(struct.pack("<Q", sum(words) % 2**64), found)
            columns = [sum(each) % 2**64 for each in zip(columns, words, strict=True)]
        found = zlib.crc32(content[whole:], found)
        found_columns = zlib.crc32(struct.pack(f"<{WORDS}Q", *columns), found_columns)
    return f"quick--{found:08x}-{found_columns:08x}"


def octets(nbytes, seed=0):
    return bytearray(random.Random(seed).randbytes(nbytes))


# --- equal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("told_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("size", [0, 1, 7, 512, *EDGES[:12], *OFF[:5]])
def test_it_is_what_it_is_said_to_be_however_it_is_cut(size):
    content, chance = octets(size, size), random.Random(size)
    wanted = spelled_out([content])
    if not content:
        assert FastDigest([0, 0]).digest("") == wanted
        return
    assert summed(content) == wanted
    borders = {1, ROW - 1, ROW, ROW + 1, size // 2, size // ROW * ROW, size - 1}
    for cuts in (borders, chance.sample(range(size), min(40, size)), range(97, min(size, 4000))):
        assert summed(content, *sorted(cut for cut in cuts if 0 < cut < size)) == wanted


def test_tensors_follow_each_other():
    sizes = [5, 0, SMALL, 12, 0, SMALL + 9, SMALL - 1, 1, SMALL + ROW]
    contents = [octets(size, size) for size in sizes]
    found = FastDigest(iter(sizes))
    for content in filter(None, contents):
        found.add(memoryview(content)[: len(content) // 2 + 1])
        if rest := memoryview(content)[len(content) // 2 + 1 :]:
            found.add(rest)
    assert found.digest("") == spelled_out(contents)


@pytest.mark.parametrize("nbytes", [*EDGES, *OFF])
def test_no_layout_matters(nbytes):
    flat = noise((nbytes,), torch.uint8)
    wanted = of(flat)
    assert wanted[-8:] == summed(bytearray(bits(flat)[2]))[-8:]
    shifted = torch.empty(nbytes + 1, dtype=torch.uint8)[1:].copy_(flat)  # aligned to nothing
    assert of(shifted) == wanted
    assert of(flat.repeat_interleave(2)[::2]) == wanted
    assert of(torch.stack((flat, flat))[1]) == of(flat.expand(1, nbytes)[0]) == wanted


@pytest.mark.parametrize("shape", [(300, 301), (7, 3, 33, 65), (2, 3, 601, 401), (1, 90_001, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_no_order_in_memory_matters(shape, dtype):
    plain = noise(shape, dtype, 3)
    wanted = of(plain)
    for dims in {(0, len(shape) - 1), (0, 1), (1, len(shape) - 1)}:
        assert of(plain.transpose(*dims).contiguous().transpose(*dims)) == wanted
    if plain.dim() == 4:
        assert of(plain.to(memory_format=torch.channels_last)) == wanted
    wide = torch.cat((plain, plain), -1)
    assert of(wide[..., : shape[-1]]) == of(torch.nn.Parameter(plain, False)) == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_every_size(dtype):
    count = SMALL // dtype.itemsize
    tensors = [noise((count + more,), dtype, more) for more in (-1, 0, 1, 67)]
    wanted = spelled_out([bits(each)[2] for each in tensors])
    assert of(*tensors)[-8:] == wanted[-8:]
    assert of(*(each.clone() for each in tensors)) == of(*tensors)


def test_the_smallest_and_those_without_elements():
    tensors = everything()
    assert quick_digest(replica({name: each.clone() for name, each in tensors.items()})) == (
        quick_digest(replica(tensors))
    )
    assert of(torch.empty(0)) != of(torch.empty(0, 3)) != of()
    assert of(torch.empty(0), torch.ones(SMALL)) != of(torch.ones(SMALL), torch.empty(0))


def edges():
    return {f"edge {nbytes}": noise((nbytes,), torch.uint8, nbytes) for nbytes in (*EDGES, *OFF)}


@pytest.mark.parametrize(("made", "parts"), [(everything, 1), (edges, 5), (layouts, 3)])
def test_who_writes_a_part_says_the_same(tmp_path, made, parts):
    state = replica(made())
    done, wanted = [], quick_digest(state)
    for part in range(parts):
        path = tmp_path / str(part)
        path.touch()
        written = write_quick(path, state, part, parts, done.append)
        assert written == (path.stat().st_size, "", wanted)
    assert sum(done) == parts * sum(each.nbytes for each in state.tensors.values())


# --- different ----------------------------------------------------------------------------------


def negated(tensor, columns):
    other = tensor.clone()
    other[:, columns].neg_()
    return other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [slice(None), slice(1, None, 2), slice(1, 4, 2)])
def test_signs_that_change_together_show(dtype, columns):
    torch.manual_seed(3)
    tensor = torch.randn(256, 256).to(dtype)
    other = negated(tensor, columns)
    assert quick_digest(replica({"w": tensor})) != quick_digest(replica({"w": other}))


@pytest.mark.parametrize("first", [0, 100, 256, 30 * WORDS, 31 * WORDS - 1])
def test_a_run_of_signs_shows(first):
    tensor = noise((SMALL // 8 + WORDS,), torch.float64, 2)
    wanted, unseen = of(tensor), []
    for count in (*range(1, 2 * WORDS + 3), 4 * WORDS, 5 * WORDS + 1):
        other = tensor.clone()
        other[first : first + count].neg_()
        unseen += [count] * (of(other) == wanted)
    assert unseen == []


@pytest.mark.parametrize("fill", [0x00, 0xFF, None])
def test_every_flipped_bit_shows(fill):
    size = SMALL + 5 * ROW + 13
    content = octets(size) if fill is None else bytearray([fill]) * size
    wanted, last = summed(content), size // ROW * ROW
    unseen = []
    words = (0, 8, ROW - 8, ROW, 2 * ROW - 8, SMALL - 8, SMALL, last - ROW, last - 8)
    places = [word + byte for word in words for byte in range(8)] + list(range(last, size))
    for place in places:
        for bit in range(8):
            content[place] ^= 1 << bit
            unseen += [(place, bit)] * (summed(content) == wanted)
            content[place] ^= 1 << bit
    assert unseen == []
    assert summed(content) == wanted


@pytest.mark.parametrize("nbytes", [100, *EDGES])
def test_a_changed_element_shows_wherever_it_is(nbytes):
    tensor = noise((nbytes // 2,), torch.bfloat16).view(torch.int16)
    wanted, count = of(tensor), tensor.numel()
    borders = (0, ROW // 2, SMALL // 2, (256 << 10) // 2, PIECE // 2, count, count // 2)
    most = (32768 * 8 - ROW) // 2
    for place in {each + more for each in (*borders, most) for more in (-1, 0, 1)}:
        if 0 <= place < count:
            for change in (1, -256):
                tensor[place] += change
                assert of(tensor) != wanted
                tensor[place] -= change
    assert of(tensor) == wanted


def test_a_changed_element_shows_in_what_lies_out_of_order():
    tensor = noise((1030, 1050), torch.int32).t()
    wanted = of(tensor)
    for place in ((0, 0), (524, 1029), (1049, 1029)):
        tensor[place] += 1
        assert of(tensor) != wanted
        tensor[place] -= 1
    assert of(tensor) == wanted


def test_what_is_in_another_place_shows():
    one, two = noise((SMALL,), torch.uint8, 1), noise((SMALL,), torch.uint8, 2)
    assert of(one, two) != of(two, one)
    assert of(one[:9], two[:9]) != of(two[:9], one[:9])
    for width in (ROW, 8):  # rows, and words of one row
        whole = one[: len(one) // width * width]
        changed = whole.view(-1, width).clone()
        changed[[3, 4]] = changed[[4, 3]]
        assert of(changed.view(-1)) != of(whole)
    large = noise((2 * PIECE,), torch.uint8)
    assert of(large.roll(PIECE)) != of(large)


def test_what_the_same_bytes_are_of_shows():
    tensor = noise((SMALL, 2), torch.int16)
    assert of(tensor) != of(tensor.view(2, SMALL))
    assert of(tensor) != of(tensor.view(torch.float16))
    one, other = (quick_digest(replica({name: tensor})) for name in "ab")
    assert one != other
    assert quick_digest(replica({"a": tensor}, '{"lr": 0.1}')) != one


# --- beside a training --------------------------------------------------------------------------


@pytest.mark.usefixtures("two_threads")
def test_no_thread_stays():
    """Torch starts its threads for each of ours that asks, so a new one shows what they are."""
    state, left = replica({"w": noise((2 * PIECE + 999,), torch.uint8)}), []

    def compare():
        before = os.listdir("/proc/self/task")
        quick_digest(state)
        left.extend(set(os.listdir("/proc/self/task")) - set(before))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert left == []


def test_the_scripts_default_device_is_not_ours():
    tensor = noise((SMALL + 9,), torch.uint8)
    wanted = of(tensor[1:]), of(tensor[::2])
    with torch.device("meta"):
        assert (of(tensor[1:]), of(tensor[::2])) == wanted
    with torch.inference_mode():
        assert (of(tensor[1:]), of(tensor[::2])) == wanted
