"""The fast digest of a tensor on an accelerator: the device sums up, and the host sees the sums.

They are 1/257 of the bytes. The digest is the one that :class:`FastDigest` finds in the same bytes
on a host, so replicas compare wherever they are. What fills no row, small tensors, and tensors
whose elements are not in order, are read as on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from worker_hooks.device import devices
from worker_hooks.device.side_stream import SideStream
from worker_hooks.tensors.fast_digest import ROW, SMALL, WORDS, FastDigest
from worker_hooks.tensors.reader import PIECE, Reader
from worker_hooks.tensors.tensor_bytes import entry_of, plain, view

log = logging.getLogger("msrun")

PART = 64 << 20  # bytes; what a device sums up at once
_BUFFERS = 4  # page-locked pieces: two are read and written, and writers of files hold some more


def is_summed_there(tensor: torch.Tensor, reader: Reader) -> bool:
    """Whether the device sums up this tensor, so that it need not be read for its digest."""
    return reader.side(tensor.device) is not None and _table(tensor) is not None


def add_tensor(
    found: FastDigest, tensor: torch.Tensor, reader: Reader, advance: Callable[[int], None]
) -> None:
    """Continue a digest by all of a tensor.

    Args:
        tensor: on any device, in any layout.
        reader: reads what the device does not sum up.
        advance: called with each count of bytes that are done; may raise, to give up.

    Raises:
        RuntimeError: the device has failed.
    """
    side, at = reader.side(tensor.device), 0
    table = None if side is None else _table(tensor)
    if side is not None and table is not None:
        for part in table.split(side.most_rows):  # type: ignore[no-untyped-call]
            sums = side.sums(part)
            if sums is None:
                log.warning("%s does nothing beside other work: it is read whole", tensor.device)
                break
            found.add_sums(sums)
            at += part.nbytes
            advance(part.nbytes)
    for piece in reader.pieces(_octets(tensor)[at:] if at else tensor):
        found.add(piece)
        advance(len(piece))


@torch.inference_mode(False)  # its memory is written in other threads, too
def side_streams(tensors: Iterable[torch.Tensor]) -> dict[torch.device, SideStream]:
    """One for each accelerator that has tensors to be summed up. Training must have begun there.

    ``tensors``: those that will be read, or others as large.
    """
    largest: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if not devices.is_on_host(tensor) and (table := _table_if_any(tensor)) is not None:
            was = largest.setdefault(tensor.device, table)
            largest[tensor.device] = max(was, table, key=len)
    found = {}
    for device, table in largest.items():
        try:
            found[device] = side = _side_stream(device)
            side.warm(table)
        except RuntimeError as error:
            found.pop(device, None)
            log.warning("what is on %s is read as a whole for its digests: %s", device, error)
    return found


def _side_stream(device: torch.device) -> SideStream:
    stream, words = torch.Stream(device), PART // ROW + WORDS
    # Below 1 MiB, so it lies in the segment of 2 MiB that torch's reductions on this stream take
    # their memory from: that one is in use, and empty_cache() does not give it back.
    with stream:
        sums = torch.empty(words, dtype=torch.int64, device=device)
    landing = _locked(words * sums.itemsize)
    if landing is None:
        landing = torch.empty(words * sums.itemsize, dtype=torch.uint8, device="cpu")
    locked = [_locked(PIECE) for _ in range(_BUFFERS)]
    buffers = [view(each) for each in locked if each is not None]
    return SideStream(stream, torch.Event(device), sums, landing.view(torch.int64), buffers)


def _locked(nbytes: int) -> torch.Tensor | None:
    """Page-locked memory of the host; ``None``: the accelerator has none, or no more."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None


def _table_if_any(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        entry_of("", tensor)
    except TypeError:  # saving it will say why it cannot be
        return None
    return _table(tensor)


def _table(tensor: torch.Tensor) -> torch.Tensor | None:
    """The rows of a tensor's words where they lie; ``None``: it is not to be summed up there."""
    if tensor.nbytes < SMALL or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    octets = _octets(tensor)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:
        return None
    return octets[: len(octets) // ROW * ROW].view(torch.int64).view(-1, WORDS)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).view(-1).view(torch.uint8)
