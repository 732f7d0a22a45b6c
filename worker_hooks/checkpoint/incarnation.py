"""The incarnation of a training: one name for all of its ranks, another for each attempt."""

from __future__ import annotations

import re
import secrets
from datetime import timedelta
from pathlib import Path

from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import BREAKPOINT, UNFINISHED

_AGREE_S = 300.0  # for all ranks to come to their first checkpoint


def current(env: RankEnv) -> str:
    """The present incarnation; without msrun the ranks agree on a name through their store.

    Raises:
        CheckpointError: they have no store.
    """
    if env.record_id:
        return f"{env.record_id}-{env.attempt}"
    if env.world_size == 1:
        return secrets.token_hex(6)
    try:
        return _agree(env)
    except Exception as error:
        raise CheckpointError(
            f"ranks cannot agree on a checkpoint ({error}): start them with msrun, or call "
            "torch.distributed.init_process_group first"
        ) from error


def owner_of(path: Path, prefix: str) -> str:
    """The incarnation that made this unfinished folder or announcement; empty: it is neither."""
    name = re.escape(prefix)
    folder = rf"{name}(?:_\d+)?-\d+_\d+(?:{BREAKPOINT})?\.(.+){UNFINISHED}"
    match = re.fullmatch(rf"{folder}|\.{name}\.(.+)\.due{UNFINISHED}", path.name)
    return "" if match is None else match[1] or match[2]


def is_past(incarnation: str, record_id: str, attempt: int) -> bool:
    """Whether it is an earlier attempt of this run; unknown without msrun."""
    run, _, number = incarnation.rpartition("-")
    return run == record_id != "" and number.isdecimal() and int(number) < attempt


def _agree(env: RankEnv) -> str:
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore("msrun checkpoints", _get_default_store())
    key = f"attempt {env.attempt}"
    if env.rank == 0:
        store.set(key, secrets.token_hex(6))
    store.wait([key], timedelta(seconds=_AGREE_S))
    return bytes(store.get(key)).decode()
