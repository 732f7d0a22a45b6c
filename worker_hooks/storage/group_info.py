"""``group_info.pb``: which ranks hold the same state as one rank, in MindSpore's format.

It is protobuf, ``ParallelGroupMap``, of which a resume by hand needs one field: the list of ranks.
Nothing here trusts such a file, since the manifest has the groups. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from worker_hooks.contract.atomic_file import (
    describe_os_error,
    ensure_folder,
    read_small,
    write_atomic,
)
from worker_hooks.contract.env import GROUP_INFO_FILE
from worker_hooks.contract.layout import DumpLayout

log = logging.getLogger("msrun")

_RESTORE_LIST, _RANK = 2, 1  # numbers of fields: ckpt_restore_rank_list, and dim in it
_VARINT, _BYTES = 0, 2  # protobuf's wire types
_LONGEST = 10  # bytes of a number of 64 bits


def write_all(folder: Path, holders: Iterable[Sequence[int]]) -> None:
    """Write the file of every rank that holds some of these parts into a checkpoint.

    A copy of what the manifest says: without room there is none, and it need not survive a power
    cut.
    """
    parts_of: dict[int, list[int]] = {}
    for index, ranks in enumerate(holders):
        for rank in ranks:
            parts_of.setdefault(rank, []).append(index)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, parts in parts_of.items():
        alike.setdefault(tuple(parts), []).append(rank)
    for ranks in alike.values():
        for rank in ranks:
            path = folder / DumpLayout.group_info(rank)
            with contextlib.suppress(OSError):
                ensure_folder(path.parent)
                write_atomic(path, encode(ranks), durable=False, private=True)


def tell(path: str, rank: int, ranks: Sequence[int]) -> None:
    """Tell others by a file who holds the same, if MindSpore's variable names one.

    Args:
        path: the variable; empty: it is not set.
        ranks: its group; none: it is not known.
    """
    if not path or not ranks:
        return
    try:
        publish(path, rank, ranks)
    except OSError as error:
        log.warning("%s=%s: %s", GROUP_INFO_FILE, path, describe_os_error(error))


def publish(path: str, rank: int, ranks: Sequence[int]) -> None:
    """Write the file of one rank to where MindSpore's ``GROUP_INFO_FILE`` says.

    Args:
        path: the variable; all ranks of a job may have the same, so that a folder ``rank_{r}`` is
            put in front of the file's name, unless the path has it already.

    Raises:
        OSError: it cannot be written.
    """
    file, folder = Path(path), f"rank_{rank}"
    if folder not in file.parts:
        file = file.parent / folder / file.name
    ensure_folder(file.parent)
    write_atomic(file, encode(ranks), durable=False, private=True)


def encode(ranks: Iterable[int]) -> bytes:
    """The content of the file for the ranks of one group."""
    listed = b"".join(_number(_RANK << 3 | _VARINT) + _number(rank) for rank in ranks)
    return _number(_RESTORE_LIST << 3 | _BYTES) + _number(len(listed)) + listed


def restore_group_info_list(group_info_file_name: str) -> list[int]:
    """The ranks that hold the same state as the rank whose ``group_info.pb`` this is, with itself.

    Args:
        group_info_file_name: the path of the file; each rank has one in every dump and checkpoint
            of replica groups.

    Raises:
        TypeError: the path is no text.
        ValueError: there is no such file, or it names no ranks.
    """
    if not isinstance(group_info_file_name, str):
        raise TypeError(f"group_info_file_name must be a str, not {group_info_file_name!r}")
    try:
        content = read_small(Path(group_info_file_name))
    except OSError as error:
        raise ValueError(f"{group_info_file_name} cannot be read ({error.strerror})") from None
    try:
        ranks = list(_ranks(content))
    except (IndexError, TypeError):
        raise ValueError(f"{group_info_file_name} is damaged, or no group_info.pb") from None
    if not ranks:
        raise ValueError(f"{group_info_file_name} has no list of ranks to restore from")
    return ranks


def _ranks(content: bytes) -> Iterator[int]:
    for number, value in _fields(content):
        if number == _RESTORE_LIST:
            for inner, one in _fields(value):
                if inner == _RANK:
                    yield from [one] if isinstance(one, int) else _packed(one)


def _packed(content: bytes) -> Iterator[int]:
    at = 0
    while at < len(content):
        number, at = _number_at(content, at)
        yield number


def _fields(content: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a message: their numbers and values.

    Raises:
        IndexError, TypeError: it is none.
    """
    if isinstance(content, int):
        raise TypeError("a number is no message")
    at = 0
    while at < len(content):
        key, at = _number_at(content, at)
        value, at = _number_at(content, at)
        if key & 7 == _VARINT:
            yield key >> 3, value
        elif key & 7 == _BYTES and value <= len(content) - at:
            yield key >> 3, content[at : at + value]
            at += value
        else:
            raise IndexError("cut off, or of a kind that the message has not")


def _number(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 127:  # noqa: PLR2004  seven bits
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _number_at(content: bytes, at: int) -> tuple[int, int]:
    """The number that begins here, and where it ends."""
    value = 0
    for place in range(_LONGEST):
        value |= (content[at + place] & 127) << 7 * place
        if content[at + place] < 128:  # noqa: PLR2004
            return value, at + place + 1
    raise IndexError("a number of more than 64 bits")
