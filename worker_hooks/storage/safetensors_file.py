"""The safetensors format: files are written as a stream; of existing ones the header is read.

A file is the header's length (8 bytes, little endian), the header (JSON, padded with spaces) and
the tensors' bytes without gaps. The reference library must have everything in memory to write it;
its readers can read what is written here.

Element types that the format or its torch reader does not know are stored as another type;
``msrun_dtypes`` in the file's metadata names the true ones.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.atomic_file import open_regular
from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import checksum
from worker_hooks.storage.checksum import BLOCK, Blocks, Bytes
from worker_hooks.storage.durable_file import DurableFile

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4_E2M1X2": 8,
    "C32": 32,
    "C128": 128,
}
"""Bits of an element, by the format's names and, the last three, by ours."""

_STORED_AS: dict[str, tuple[str, tuple[int, ...]]] = {
    "C128": ("F64", (2,)),
    "C32": ("F16", (2,)),
    "F4_E2M1X2": ("U8", ()),
    "F8_E8M0": ("U8", ()),
}
"""The type in the file, and the dimensions that it adds at the end of the shape."""

_METADATA = "__metadata__"
_DTYPES = "msrun_dtypes"
_COUNT = 8  # bytes of the header's length
_ALIGNED = 64  # bytes; the format asks for 8, but torch's complex128 for 16
_LIMIT = 100_000_000  # bytes of a header, the library's
_KEYS = {"dtype", "shape", "data_offsets"}


class WrittenFile(NamedTuple):
    """A file on the disk; ``sha256`` is its checksum as of :func:`sha256_of`."""

    nbytes: int
    sha256: str


class Header(NamedTuple):
    """The header of a file; ``data_offset`` is where the first tensor begins."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    data_offset: int


class Writing(NamedTuple):
    """A file being written; the tensors' bytes go to ``blocks``, in the header's order."""

    head: bytes
    file: DurableFile
    blocks: Blocks

    def finish(self) -> WrittenFile:
        """Wait until all is on the disk.

        Raises:
            OSError: it is not.
            ValueError: the number of bytes is not that of the header.
        """
        wanted = _data_nbytes(self.head)
        given = self.blocks.nbytes
        if given != wanted:
            raise ValueError(f"{given} bytes of tensors were written, the header says {wanted}")
        is_short = self.file.nbytes + sum(map(len, self.blocks.pending)) <= BLOCK
        whole = [memoryview(self.head), *self.blocks.pending] if is_short else []
        self.blocks.flush()
        if is_short:
            sha256 = checksum.sha256(whole).hex()
        else:
            head = checksum.sha256([memoryview(self.head)])
            sha256 = checksum.combined(head, self.blocks.hashes())
        self.file.finish()
        return WrittenFile(self.file.nbytes, sha256)


def stored(entry: Entry) -> Entry:
    """The entry as it is in the file: with another type, if its own is not supported."""
    if entry.dtype not in _STORED_AS:
        return entry
    dtype, more = _STORED_AS[entry.dtype]
    return entry._replace(dtype=dtype, shape=(*entry.shape, *more))


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """A file's first bytes, up to the first tensor.

    Args:
        entries: the tensors, in the order in which their bytes follow.
        metadata: text for readers of the file.

    Raises:
        ValueError: a name appears twice, a size does not fit the shape, or the header is too long
            for the library.
    """
    true_dtypes = {entry.name: entry.dtype for entry in entries if entry.dtype in _STORED_AS}
    texts = {**metadata, **({_DTYPES: json.dumps(true_dtypes)} if true_dtypes else {})}
    fields: dict[str, Any] = {_METADATA: texts} if texts else {}
    at = 0
    for entry in entries:
        if entry.name in fields or entry.name == _METADATA:
            raise ValueError(f"two tensors would be called {entry.name!r}")
        if entry.nbytes != _nbytes(entry):
            raise ValueError(f"{entry} is not {_nbytes(entry)} bytes long")
        dtype, shape = stored(entry)[1:3]
        offsets = [at, at + entry.nbytes]
        fields[entry.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_COUNT + len(text)) % _ALIGNED)
    if len(text) > _LIMIT:
        raise ValueError(f"a header of {len(text)} bytes is over the format's {_LIMIT}")
    return len(text).to_bytes(_COUNT, "little") + text


def write(
    path: Path, head: bytes, chunks: Iterable[Bytes], advance: Callable[[int], None]
) -> WrittenFile:
    """Write a file to the disk, whatever its size with at most 64 MB of memory.

    Args:
        path: in a folder that exists; who completes the folder also syncs it.
        head: of :func:`header`.
        chunks: the tensors' bytes, in pieces of any size.
        advance: called with the number of bytes that reached the disk since the last call; may
            raise to give up.

    Raises:
        OSError: the file could not be written, and is removed.
        ValueError: the number of bytes is not that of the header; the file is removed.
    """
    with writing(path, head, advance) as file:
        for chunk in chunks:
            file.blocks.add(chunk)
        return file.finish()


@contextmanager
def writing(path: Path, head: bytes, advance: Callable[[int], None]) -> Iterator[Writing]:
    """As :func:`write`, for a caller that adds the bytes itself, then calls ``finish``."""
    with DurableFile(path, advance) as file, Blocks(file.write) as blocks:
        file.write([memoryview(head)])
        yield Writing(head, file, blocks)


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """The checksum of a file on the disk; the plain sha256 if the file is at most 4 MiB long.

    Raises:
        OSError: it cannot be read.
    """
    return checksum.of_file(path, advance)


def read_header(
    path: Path, at: int = 0, nbytes: int | None = None, *, is_cut: bool = False
) -> Header:
    """The header of a file on the disk.

    Args:
        at: where it begins there, if it is in another one.
        nbytes: its size; ``None``: up to the other one's end.
        is_cut: it may end behind its header, as the tensors are elsewhere.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or no safetensors file; the message says why.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size - at
        if nbytes is not None:
            size = nbytes if is_cut else min(size, nbytes)
        file.seek(at)
        count = int.from_bytes(file.read(_COUNT), "little")
        if size < _COUNT or count > size - _COUNT:
            raise ValueError(f"{path} ends before its header does")
        if count > _LIMIT:
            raise ValueError(f"{path} is no safetensors file: its header has {count} bytes")
        text = file.read(count)
    if len(text) < count:
        raise ValueError(f"{path} ends before its header does")
    if not text.startswith(b"{"):
        raise ValueError(f"{path} is no safetensors file: its header is not JSON")
    try:
        entries, metadata = _parsed(text, size - _COUNT - count)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from None
    return Header(entries, metadata, at + _COUNT + count)


def _data_nbytes(head: bytes) -> int:
    fields = json.loads(head[_COUNT:])
    ends = (field["data_offsets"][1] for name, field in fields.items() if name != _METADATA)
    return max(ends, default=0)


def _nbytes(entry: Entry) -> int:
    bits = math.prod(entry.shape) * BITS[entry.dtype]
    if bits % 8:
        raise ValueError(f"{entry.name!r} does not fill its last byte")
    return bits // 8


def _parsed(text: bytes, size: int) -> tuple[tuple[Entry, ...], dict[str, str]]:
    fields = json.loads(text, object_pairs_hook=_unique)
    metadata = _texts(fields.pop(_METADATA, {}))
    true_dtypes = _texts(json.loads(metadata.pop(_DTYPES, "{}")))
    entries = _entries(fields, size)
    if missing := true_dtypes.keys() - {entry.name for entry in entries}:
        raise ValueError(f"a type is said of {min(missing)!r}, which is not there")
    found = tuple(_with_true_dtype(entry, true_dtypes.get(entry.name)) for entry in entries)
    return found, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name appears twice")
    return fields


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its metadata is not text")
    return value


def _entries(fields: dict[str, Any], size: int) -> list[Entry]:
    """The tensors in the order of their bytes, which fill ``size`` bytes without a gap."""
    found = [(_span(name, field), name, field) for name, field in fields.items()]
    entries, at = [], 0
    for (start, end), name, field in sorted(found, key=lambda each: each[0]):
        if field["dtype"] not in BITS:
            raise ValueError(f"{name!r} has the unknown type {field['dtype']!r}")
        if start != at:
            raise ValueError(f"there is a hole or an overlap before {name!r}")
        entry = Entry(name, field["dtype"], tuple(field["shape"]), end - start)
        if entry.nbytes != _nbytes(entry):
            raise ValueError(f"the size of {name!r} does not fit its shape")
        entries.append(entry)
        at = end
    if at != size:
        raise ValueError(f"there are {size} bytes of data instead of {at}")
    return entries


def _span(name: str, field: Any) -> tuple[int, int]:
    if not isinstance(field, dict) or field.keys() != _KEYS or not isinstance(field["dtype"], str):
        raise ValueError(f"{name!r} is not described as a tensor")
    for numbers in (field["shape"], field["data_offsets"]):
        if not isinstance(numbers, list) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise ValueError(f"{name!r} has a shape or place that is not made of numbers")
    if len(field["data_offsets"]) != 2:  # noqa: PLR2004  begin and end
        raise ValueError(f"{name!r} has a place that is no begin and end")
    start, end = field["data_offsets"]
    return start, end


def _with_true_dtype(entry: Entry, dtype: str | None) -> Entry:
    """The entry with the type that it had before it was stored."""
    if dtype is None:
        return entry
    inner, more = _STORED_AS.get(dtype, ("", ()))
    shape = entry.shape[: len(entry.shape) - len(more)]
    true = entry._replace(dtype=dtype, shape=shape)
    if inner != entry.dtype or stored(true) != entry:
        raise ValueError(f"{entry.name!r} cannot be of type {dtype!r}")
    return true
