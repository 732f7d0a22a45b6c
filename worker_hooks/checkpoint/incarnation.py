"""Which life of a training this is: a name that all of its ranks know, and no other life has."""

from __future__ import annotations

import re
import secrets
from datetime import timedelta
from pathlib import Path

from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import BREAKPOINT, UNFINISHED

_AGREE_S = 300.0  # for all ranks to come to their first checkpoint


def named(env: RankEnv) -> str:
    """The name; without msrun ranks agree on one through their process group's store, once.

    Raises:
        CheckpointError: they cannot.
    """
    if env.record_id:
        return f"{env.record_id}-{env.attempt}"
    if env.world_size == 1:
        return secrets.token_hex(6)
    try:
        return _agreed(env)
    except Exception as error:
        raise CheckpointError(
            f"ranks cannot agree on a checkpoint ({error}): start them with msrun, or call "
            "torch.distributed.init_process_group first"
        ) from error


def owner(path: Path, prefix: str) -> str:
    """The life that left this unfinished folder, or this announcement; empty: it is neither."""
    name = re.escape(prefix)
    folder = rf"{name}(?:_\d+)?-\d+_\d+(?:{BREAKPOINT})?\.(.+){UNFINISHED}"
    match = re.fullmatch(rf"{folder}|\.{name}\.(.+)\.due{UNFINISHED}", path.name)
    return "" if match is None else match[1] or match[2]


def is_past(life: str, record_id: str, attempt: int) -> bool:
    """Whether it is a life of this run before this attempt; without msrun nobody can tell."""
    run, _, number = life.rpartition("-")
    return run == record_id != "" and number.isdecimal() and int(number) < attempt


def _agreed(env: RankEnv) -> str:
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore("msrun checkpoints", _get_default_store())
    key = f"attempt {env.attempt}"
    if env.rank == 0:
        store.set(key, secrets.token_hex(6))
    store.wait([key], timedelta(seconds=_AGREE_S))
    return bytes(store.get(key)).decode()
