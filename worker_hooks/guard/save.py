"""Saves one rank's part of a dump, and says what became of it in the agent's words."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.tensors.shard import Replica, digest, quick_digest, write, write_quick

log = logging.getLogger("msrun")

_PLACE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EIO,
    errno.EFBIG,
    errno.ESTALE,
    errno.ENXIO,
    errno.ENOMEM,
}


class SaveSource(Protocol):
    """Whose state is saved."""

    def replica(self, step: int) -> Replica:
        """The replicated state as of the newest commit or, if torn but complete, of the next."""

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and batch of that step, as file names count them."""

    def version(self) -> int:
        """A number that changes whenever a replicated tensor is changed."""


def save(
    source: SaveSource,
    who: tuple[int, int],
    order: protocol.Save,
    frozen: int | None,
    advance: Callable[[int], None],
) -> protocol.Written | protocol.Digested:
    """Digest the replicated state, and write a part of it if that was ordered.

    Args:
        source: stands still.
        who: rank and attempt.
        order: what to do.
        frozen: the state's version, where it was torn but complete.
        advance: told of each few bytes more that are done; may raise, to give up.

    Raises:
        OSError: the folder, or the disk below it.
        RuntimeError: the state changed meanwhile.
    """
    replica = source.replica(order.step)  # may still copy what is small
    version = source.version() if frozen is None else frozen
    answer: protocol.Written | protocol.Digested
    if order.parts == 0:
        taken = (quick_digest if order.is_quick else digest)(replica, advance)
        answer = protocol.Digested(*who, order.dump_id, taken, order.round)
    elif order.is_quick:
        done = write_quick(Path(order.folder), replica, order.part, order.parts, advance)
        answer = protocol.Written(
            *who, order.dump_id, "", done.nbytes, "", done.digest, order.round
        )
    else:
        file = DumpLayout.shard(who[0], *source.position(order.step))
        path = Path(order.folder, file)
        path.parent.mkdir(exist_ok=True)
        done = write(path, replica, order.part, order.parts, advance)
        answer = protocol.Written(
            *who, order.dump_id, file, done.nbytes, done.sha256, done.digest, order.round
        )
    if source.version() != version:
        raise RuntimeError("the state changed while it was read")
    return answer


def failed(who: tuple[int, int], order: protocol.Save, error: Exception) -> protocol.SaveFailed:
    """What to answer instead. Called where the error is caught."""
    if isinstance(error, OSError):
        words, is_place = describe_os_error(error), error.errno in _PLACE_ERRORS
    else:
        log.error("rank %d cannot save step %d", who[0], order.step, exc_info=error)
        words, is_place = repr(error)[:2000], False
    return protocol.SaveFailed(*who, order.dump_id, words, is_place, order.round)
