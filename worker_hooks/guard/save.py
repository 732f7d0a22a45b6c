"""Saves one rank's part of a dump; the result is a message to the agent."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import FOLDER_MODE, describe_os_error
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.snapshot import NotSavableError
from worker_hooks.tensors.shard import digest, quick_digest, write, write_quick

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


class SaidDigests:
    """What this rank has said to hold when it was asked last."""

    def __init__(self) -> None:
        self._dump_id = -1
        self._by_share: dict[int, str] = {}

    def note(self, answer: protocol.Written | protocol.Digested) -> None:
        """It has said this."""
        if answer.dump_id != self._dump_id:
            self._dump_id, self._by_share = answer.dump_id, {}
        self._by_share[answer.share] = answer.digest

    def __str__(self) -> str:
        """The digests of all parts that it holds, as a checkpoint in memory has them."""
        return ",".join(digest for _, digest in sorted(self._by_share.items()))


class _Answer(TypedDict):
    """The fields that every answer to an order has."""

    rank: int
    attempt: int
    dump_id: int
    round: int
    share: int


def save(
    source: CommittedState,
    env: RankEnv,
    order: protocol.Save,
    frozen_version: int | None,
    advance: Callable[[int], None],
) -> protocol.Written | protocol.Digested:
    """Digest the replicated state, and write a part of it if that was ordered.

    Args:
        source: its state does not change meanwhile.
        frozen_version: the state's version if it was torn but complete.
        advance: called with each count of bytes that are done; may raise, to give up.

    Raises:
        OSError: the folder, or the disk below it, fails.
        NotSavableError: the state changed meanwhile, or is none of a step.
    """
    replica = source.replica(order.step, order.without)  # may still copy what is small
    version = source.version(order.step) if frozen_version is None else frozen_version
    file, shard = "", None
    if order.parts == 0:
        digested = (quick_digest if order.is_quick else digest)(replica, advance)
    elif order.is_quick:
        shard = write_quick(Path(order.folder), replica, order.part, order.parts, advance)
    else:
        file = DumpLayout.shard(env.rank, *source.position(order.step), order.share)
        path = Path(order.folder, file)
        path.parent.mkdir(FOLDER_MODE, exist_ok=True)
        shard = write(path, replica, order.part, order.parts, advance)
    if source.version(order.step) != version:
        raise NotSavableError("the state changed while it was read")
    if why := source.why_moved():
        raise NotSavableError(why)
    if frozen_version is None and (why := source.why_unknown()):  # by now
        raise NotSavableError(why)
    if shard is None:
        return protocol.Digested(**_answer_to(order, env), digest=digested)
    return protocol.Written(
        **_answer_to(order, env),
        file=file,
        nbytes=shard.nbytes,
        sha256=shard.sha256,
        digest=shard.digest,
    )


def failed(env: RankEnv, order: protocol.Save, error: Exception) -> protocol.SaveFailed:
    """The answer instead, to be made where the error is caught."""
    if isinstance(error, OSError):
        why, is_place = describe_os_error(error), error.errno in _PLACE_ERRORS
    elif isinstance(error, NotSavableError):
        why, is_place = str(error)[:2000], False
        log.error("rank %d cannot save step %d: %s", env.rank, order.step, why)
    else:
        log.error("rank %d cannot save step %d", env.rank, order.step, exc_info=error)
        why, is_place = repr(error)[:2000], False
    return protocol.SaveFailed(**_answer_to(order, env), why=why, is_place=is_place)


def _answer_to(order: protocol.Save, env: RankEnv) -> _Answer:
    return {
        "rank": env.rank,
        "attempt": env.attempt,
        "dump_id": order.dump_id,
        "round": order.round,
        "share": order.share,
    }
