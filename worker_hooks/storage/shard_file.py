"""A part of a replica's state as a file, from bytes that somebody hands over in their order.

Standard library only: a process without torch writes checkpoints beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from worker_hooks.storage import safetensors_file
from worker_hooks.storage.checksum import Blocks, Bytes


class WrittenShard(NamedTuple):
    """A shard that is on the disk. ``digest`` is of the whole state, whatever part it holds."""

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
    """Write the part, and take the digest of the whole.

    Args:
        path: in a folder that exists; its fsync is left to whoever completes the folder.
        head: the file's header.
        seed: what the digest covers beside the bytes, as :func:`digest_of` takes it.
        state: all of the state's bytes, and whether they belong to the part.
        buffers: the file's last bytes, of no account in the digest.
        advance: told of each few bytes more that are done; may raise, to give up.
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
        # the part that is the whole has data that begin with the same blocks
        hashes = (file.blocks if is_whole else whole).hashes()
        for content in buffers:
            file.blocks.add(content)
        done = file.finish()
    return WrittenShard(done.nbytes, done.sha256, digest_of(seed, hashes))


def digest_of(seed: str, hashes: bytes) -> str:
    """The digest of a state.

    Args:
        seed: sha256, in hexadecimal, of its tensors' names and of all that is no tensor.
        hashes: of all blocks of its bytes.
    """
    import hashlib  # loads OpenSSL, which a start of msrun does without

    return hashlib.sha256(bytes.fromhex(seed) + hashes).hexdigest()
