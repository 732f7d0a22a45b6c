"""A part of a replica's state as a file, written from a stream of bytes.

Standard library only: a process without torch writes checkpoints beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from worker_hooks.storage import safetensors_file
from worker_hooks.storage.checksum import Blocks, Bytes

SHARDING = "DCP_SHARDING_INFO"  # as torch's distributed checkpoints: where parts begin
OFFSETS = "saved_offsets"
GLOBAL_SHAPE = "global_shape"  # ours: the shape of a tensor that was cut
DISTRIBUTED = "distributed"  # ours: whether other ranks hold other parts of this same tensor
REST = "rest"  # ours: the state that is no tensor
OBJECTS = "objects"  # ours: values of pieces that belong to their writer
HAS = "has"  # ours: the tensors of a part of the writer's state, also those of no element


class WrittenShard(NamedTuple):
    """A shard on the disk. ``digest`` covers the entire state, whichever part the shard holds."""

    nbytes: int
    sha256: str
    digest: str


def write(
    path: Path,
    head: bytes,
    seed: str,
    state: Iterable[tuple[Bytes, bool]],
    buffers: Sequence[Bytes],
    advance: Callable[[int], None],
    *,
    is_whole: bool,
) -> WrittenShard:
    """Write the part, and take the digest of the entire state.

    Args:
        path: in a folder that exists; who completes the folder also syncs it.
        seed: what the digest covers besides the bytes, as for :func:`digest_of`.
        state: all of the state's bytes, and whether they belong to the part.
        buffers: the file's last bytes; the digest does not cover them.
        advance: called with the number of bytes done since the last call; may raise to give up.
        is_whole: whether the part is all of the state.

    Raises:
        OSError: the file could not be written, and is removed.
        ValueError: the bytes are not as many as the header says; the file is removed.
    """
    with safetensors_file.writing(path, head, advance) as file, Blocks() as whole:
        for piece, is_mine in state:
            if is_mine:
                file.blocks.add(piece)
            else:
                advance(len(piece))
            if not is_whole:
                whole.add(piece)
        # a part that is the entire state begins with the same blocks
        hashes = (file.blocks if is_whole else whole).hashes()
        for content in buffers:
            file.blocks.add(content)
        done = file.finish()
    return WrittenShard(done.nbytes, done.sha256, digest_of(seed, hashes))


def digest_of(seed: str, hashes: bytes) -> str:
    """The digest of a state.

    Args:
        seed: sha256, in hexadecimal, of the tensors' names and of everything that is no tensor.
        hashes: of all blocks of its bytes.
    """
    import hashlib  # loads OpenSSL, which msrun's start does not need

    return hashlib.sha256(bytes.fromhex(seed) + hashes).hexdigest()
