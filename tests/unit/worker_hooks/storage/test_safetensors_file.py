"""The safetensors format without its library, judged by the library."""

import errno
import hashlib
import json
import os
import resource
import threading

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import durable_file
from worker_hooks.storage.checksum import BLOCK
from worker_hooks.storage.safetensors_file import (
    BITS,
    Header,
    header,
    read_header,
    sha256_of,
    write,
)

OURS = {"F4_E2M1X2", "C32", "C128", "F8_E8M0"}  # stored in the guise of another type
LIBRARY = {name: bits for name, bits in BITS.items() if name not in OURS}


def quiet(_nbytes):
    pass


def noise(nbytes, seed=b"seed"):
    return hashlib.shake_128(seed).digest(nbytes)


def one(nbytes, name="a"):
    return [Entry(name, "U8", (nbytes,), nbytes)]


def saved(path, content, metadata=None):
    return write(path, header(one(len(content)), metadata or {}), [content], quiet)


def file_of(fields, data=b"", pad=b""):
    text = (fields if isinstance(fields, bytes) else json.dumps(fields).encode()) + pad
    return len(text).to_bytes(8, "little") + text + data


def test_the_library_reads_what_is_written(tmp_path):
    entries = [
        Entry(name, name, (4, 3), 12 * bits // 8) if bits > 4 else Entry(name, name, (4, 2), 4)
        for name, bits in LIBRARY.items()
    ]
    entries += [
        Entry("0-d", "F64", (), 8),
        Entry("empty", "F32", (3, 0), 0),
        Entry('"ü\n', "U8", (1,), 1),
    ]
    content = {entry.name: noise(entry.nbytes, entry.name.encode()) for entry in entries}
    done = write(tmp_path / "x", header(entries, {"k": "ü"}), content.values(), quiet)
    raw = (tmp_path / "x").read_bytes()
    assert done.nbytes == len(raw)
    read = dict(safetensors.deserialize(raw))
    assert {name: bytes(view["data"]) for name, view in read.items()} == content
    assert {name: (view["dtype"], tuple(view["shape"])) for name, view in read.items()} == {
        entry.name: (entry.dtype, entry.shape) for entry in entries
    }
    found = read_header(tmp_path / "x")
    assert found == Header(tuple(entries), {"k": "ü"}, found.data_offset)
    assert found.data_offset % 64 == 0
    assert len(raw) == found.data_offset + sum(entry.nbytes for entry in entries)


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {"b": torch.ones(2, 2), "a": torch.tensor(7)}
    save_file(tensors, tmp_path / "x", {"who": "library"})
    found = read_header(tmp_path / "x")
    assert found.metadata == {"who": "library"}
    assert set(found.entries) == {Entry("b", "F32", (2, 2), 16), Entry("a", "I64", (), 8)}


def test_types_of_our_own_travel_in_a_guise(tmp_path):
    entries = [
        Entry("double", "C128", (2, 3), 96),
        Entry("scalar", "C128", (), 16),
        Entry("half", "C32", (0,), 0),
        Entry("scale", "F8_E8M0", (4,), 4),
    ]
    write(tmp_path / "x", header(entries, {"k": "v"}), [bytes(116)], quiet)
    assert read_header(tmp_path / "x")[:2] == (tuple(entries), {"k": "v"})
    read = dict(safetensors.deserialize((tmp_path / "x").read_bytes()))
    shown = {name: (view["dtype"], view["shape"]) for name, view in read.items()}
    assert shown == {
        "double": ("F64", [2, 3, 2]),
        "scalar": ("F64", [2]),
        "half": ("F16", [0, 2]),
        "scale": ("U8", [4]),
    }


def test_an_empty_file_is_a_file(tmp_path):
    write(tmp_path / "x", header([], {}), [], quiet)
    assert read_header(tmp_path / "x")[:2] == ((), {})
    assert safetensors.deserialize((tmp_path / "x").read_bytes()) == []


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (one(1) + one(1), "two tensors would be called 'a'"),
        (one(1, "__metadata__"), "two tensors would be called '__metadata__'"),
        ([Entry("a", "F32", (2,), 4)], "is not 8 bytes long"),
        ([Entry("a", "F4", (3,), 1)], "does not fill its last byte"),
        ([Entry("a" * 100_000_001, "U8", (0,), 0)], "is over the format's"),
    ],
)
def test_a_header_that_no_reader_takes_is_refused(entries, why):
    with pytest.raises(ValueError, match=why):
        header(entries, {})


# --- checksums ---------------------------------------------------------------------------------


def expected(raw):
    if len(raw) <= BLOCK:
        return hashlib.sha256(raw).hexdigest()
    head = 8 + int.from_bytes(raw[:8], "little")
    parts = [raw[:head], *(raw[at : at + BLOCK] for at in range(head, len(raw), BLOCK))]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@pytest.mark.parametrize("more", [-BLOCK, -BLOCK + 1, -100, -1, 0, 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("of_file", [True, False])
def test_the_checksum_of_writing_is_that_of_reading(tmp_path, more, of_file):
    head = len(header(one(BLOCK), {})) if of_file else 0
    content = noise(max(0, BLOCK + more - head))
    done = saved(tmp_path / "x", content)
    raw = (tmp_path / "x").read_bytes()
    assert done == (len(raw), expected(raw)) == (len(raw), sha256_of(tmp_path / "x", quiet))


@pytest.mark.parametrize("cut", [1 << 18, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 1 << 30])
def test_how_the_bytes_come_does_not_matter(tmp_path, cut):
    content = noise(3 * BLOCK + 1000)
    chunks = [content[at : at + cut] for at in range(0, len(content), cut)]
    chunks.insert(1, b"")
    told = []
    done = write(tmp_path / "x", header(one(len(content)), {}), chunks, told.append)
    raw = (tmp_path / "x").read_bytes()
    assert raw.endswith(content)
    assert done.sha256 == expected(raw)
    assert sum(told) == len(raw)


def test_every_byte_counts(tmp_path):
    content = noise(2 * BLOCK + 3)
    done = saved(tmp_path / "x", content)
    head = done.nbytes - len(content)
    for at in (0, 8, head - 1, head, head + BLOCK - 1, head + BLOCK, done.nbytes - 1):
        with open(tmp_path / "x", "r+b") as file:
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ 4]))
            file.flush()
            assert sha256_of(tmp_path / "x", quiet) != done.sha256
            file.seek(at)
            file.write(bytes([old]))
    assert sha256_of(tmp_path / "x", quiet) == done.sha256
    os.truncate(tmp_path / "x", done.nbytes - 1)
    assert sha256_of(tmp_path / "x", quiet) != done.sha256


def test_any_file_has_a_checksum(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff" * (BLOCK + 1))
    told = []
    assert sha256_of(tmp_path / "x", told.append) == expected(b"\xff" * (BLOCK + 1))
    assert sum(told) == BLOCK + 1
    (tmp_path / "y").write_bytes(b"")
    assert sha256_of(tmp_path / "y", quiet) == hashlib.sha256(b"").hexdigest()
    with pytest.raises(FileNotFoundError):
        sha256_of(tmp_path / "none", quiet)


# --- writing -----------------------------------------------------------------------------------


def test_without_threads_it_only_takes_longer(tmp_path, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    content = noise(3 * BLOCK + 1)
    wanted = saved(tmp_path / "x", content)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert saved(tmp_path / "x", content) == wanted
    assert sha256_of(tmp_path / "x", quiet) == wanted.sha256


def test_a_disk_may_take_less_than_it_is_given(tmp_path, monkeypatch):
    whole = os.writev
    takes = iter([1, 3, 4095] * 5000)

    def short(fd, pieces):
        return whole(fd, [b"".join(pieces)[: next(takes)]])

    content = noise(10_000)
    pieces = [content[at : at + 7] for at in range(0, len(content), 7)]  # more than a writev takes
    monkeypatch.setattr(os, "writev", short)
    write(tmp_path / "x", header(one(len(content)), {}), pieces, quiet)
    assert (tmp_path / "x").read_bytes().endswith(content)


def einval(*_args):
    durable_file.ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize("way", [None, einval])
def test_a_system_that_cannot_write_ranges_syncs_all(tmp_path, monkeypatch, way):
    monkeypatch.setattr(durable_file, "_sync_file_range", way)
    monkeypatch.setattr(durable_file, "WINDOW", 1 << 20)
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda _fd: synced.append(1))
    content = noise(6 * BLOCK)
    told = []
    write(tmp_path / "x", header(one(len(content)), {}), [content], told.append)
    assert (tmp_path / "x").read_bytes().endswith(content)
    assert sum(told) == os.path.getsize(tmp_path / "x")
    assert len(told) > len(synced) >= 2


def test_it_says_how_far_the_disk_is(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_file, "WINDOW", 1 << 20)
    told = []
    content = noise(6 * BLOCK)
    write(tmp_path / "x", header(one(len(content)), {}), [content], told.append)
    assert max(told) <= 2 << 20
    assert sum(told) == os.path.getsize(tmp_path / "x")


def test_a_dying_disk_is_named(tmp_path, monkeypatch):
    def dying(*_args):
        durable_file.ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(durable_file, "_sync_file_range", dying)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/x'") as caught:
        saved(tmp_path / "x", bytes(5 * BLOCK))
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("room", [100, BLOCK - 1, BLOCK + 1])
def test_a_full_disk_leaves_nothing(tmp_path, room):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            saved(tmp_path / "x", bytes(3 * BLOCK))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_a_place_that_is_none_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none/x"):
        saved(tmp_path / "none" / "x", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError) as caught:
        saved(tmp_path / "link", b"1")
    assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("given", [BLOCK - 1, 3 * BLOCK - 1, 3 * BLOCK + 1])
def test_bytes_that_do_not_fit_the_header_are_no_file(tmp_path, given):
    with pytest.raises(ValueError, match=f"{given} bytes of tensors were written"):
        write(tmp_path / "x", header(one(3 * BLOCK), {}), [bytes(given)], quiet)
    assert os.listdir(tmp_path) == []


def test_whoever_gives_up_leaves_nothing(tmp_path):
    def enough(_nbytes):
        raise InterruptedError("enough")

    def broken():
        yield bytes(2 * BLOCK)
        raise KeyError("no more")

    with pytest.raises(InterruptedError):
        write(tmp_path / "x", header(one(3 * BLOCK), {}), [bytes(3 * BLOCK)], enough)
    with pytest.raises(KeyError):
        write(tmp_path / "x", header(one(3 * BLOCK), {}), broken(), quiet)
    assert os.listdir(tmp_path) == []


# --- damage ------------------------------------------------------------------------------------

A = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
B = {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "ends before its header"),
        (b"\0" * 7, "ends before its header"),
        (b"\0" * 8, "is no safetensors file"),
        (b"\xff" * 16, "ends before its header"),
        (file_of(b"[]"), "is no safetensors file"),
        (file_of(b" {}"), "is no safetensors file"),
        (file_of(b"{"), "has a damaged header"),
        (file_of(b'{"\xff":1}'), "has a damaged header"),
        (file_of(b'{"a":' + b"[" * 100_000), "has a damaged header"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "has a damaged header"),
        (file_of({"a": A})[:-1], "ends before its header"),
        (file_of({"a": A}, b"1"), "there are 1 bytes of data instead of 2"),
        (file_of({"a": A}, b"123"), "there are 3 bytes of data instead of 2"),
        (file_of({"a": B}, b"1234"), "a hole or an overlap before 'a'"),
        (file_of({"a": A, "b": {**A}}, b"12"), "a hole or an overlap before 'b'"),
        (file_of({"a": {**A, "shape": [3]}}, b"12"), "the size of 'a' does not fit"),
        (file_of({"a": {**A, "shape": [-2]}}, b"12"), "not made of numbers"),
        (file_of({"a": {**A, "shape": [2.0]}}, b"12"), "not made of numbers"),
        (file_of({"a": {**A, "shape": 2}}, b"12"), "not made of numbers"),
        (file_of({"a": {**A, "data_offsets": [True, 2]}}, b"12"), "not made of numbers"),
        (file_of({"a": {**A, "data_offsets": [0, 2, 2]}}, b"12"), "no begin and end"),
        (file_of({"a": {**A, "data_offsets": [2, 0]}}, b"12"), "hole or an overlap"),
        (file_of({"a": {**A, "dtype": "X8"}}, b"12"), "the unknown type 'X8'"),
        (file_of({"a": {**A, "dtype": ["U8"]}}, b"12"), "not described as a tensor"),
        (file_of({"a": {"dtype": "U8"}}, b"12"), "not described as a tensor"),
        (file_of({"a": 1}), "not described as a tensor"),
        (
            file_of(b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), b"12"),
            "a name appears twice",
        ),
        (file_of({"__metadata__": {"k": 1}}), "its metadata is not text"),
        (file_of({"__metadata__": []}), "its metadata is not text"),
        (file_of({"__metadata__": {"msrun_dtypes": "{"}}), "has a damaged header"),
        (file_of({"__metadata__": {"msrun_dtypes": '{"a":"C32"}'}}), "'a', which is not there"),
        (
            file_of({"__metadata__": {"msrun_dtypes": '{"a":"C32"}'}, "a": A}, b"12"),
            "cannot be of type 'C32'",
        ),
        (
            file_of({"__metadata__": {"msrun_dtypes": '{"a":"U8"}'}, "a": A}, b"12"),
            "cannot be of type 'U8'",
        ),
    ],
)
def test_damage_is_said_in_a_sentence(tmp_path, raw, why):
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ValueError, match=why) as caught:
        read_header(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_header_over_the_limit_is_not_read(tmp_path):
    with open(tmp_path / "x", "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(ValueError, match="its header has 200000000 bytes"):
        read_header(tmp_path / "x")


def test_no_flipped_bit_or_cut_surprises_the_reader(tmp_path):
    entries = [Entry("a", "F32", (2, 2), 16), Entry("b", "C128", (1,), 16)]
    write(tmp_path / "x", header(entries, {"k": "v"}), [bytes(32)], quiet)
    raw = (tmp_path / "x").read_bytes()
    whole = read_header(tmp_path / "x")
    for size in range(len(raw)):
        (tmp_path / "x").write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"ends before|bytes of data"):
            read_header(tmp_path / "x")
    taken = 0
    for bit in range(0, 8 * whole.data_offset, 3):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x").write_bytes(flipped)
        try:
            found = read_header(tmp_path / "x")
        except ValueError:
            continue
        # such as another letter in a name; the checksum tells
        taken += 1
        assert found != whole or bit // 8 >= len(raw[: whole.data_offset].rstrip())
    assert 0 < taken < 2 * whole.data_offset
