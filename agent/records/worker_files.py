"""The files that workers write: made before they start, kept when they are started again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from worker_hooks.contract import atomic_file
from worker_hooks.contract.env import AGENT_ERROR_FILE
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import WorkerOrder

Trouble = Callable[[Path, OSError], None]


def make(orders: Sequence[WorkerOrder], trouble: Trouble) -> None:
    """Make every file and folder that the orders name, unless it exists."""
    make_folders(orders, trouble)
    for path in {Path(stream) for order in orders for stream in (order.stdout, order.stderr)}:
        make_file(path, trouble)


def make_folders(orders: Sequence[WorkerOrder], trouble: Trouble) -> None:
    """Make the folders for the orders' error files."""
    for folder in {Path(order.environ[AGENT_ERROR_FILE]).parent for order in orders}:
        make_folder(folder, trouble)


def make_folder(folder: Path, trouble: Trouble) -> None:
    """Make a folder and its parents."""
    try:
        atomic_file.ensure_folder(folder)
    except OSError as error:
        trouble(folder, error)


def make_file(path: Path, trouble: Trouble) -> None:
    """Make an empty file, unless it exists."""
    make_folder(path.parent, trouble)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        trouble(path, error)


def keep(layout: RunLayout, attempt: int, orders: Sequence[WorkerOrder]) -> None:
    """Give the worker logs of a past attempt their final names."""
    for order in orders:
        with contextlib.suppress(OSError):  # the folder is gone: there is nothing to keep
            kept = layout.earlier_worker_log(order.rank, attempt)
            os.rename(layout.worker_log(order.rank), kept)


def remove(layout: RunLayout, orders: Sequence[WorkerOrder]) -> None:
    """Remove the files of the orders whose names belong to their attempt alone."""
    for order in orders:
        names = {order.environ[AGENT_ERROR_FILE], order.stdout, order.stderr}
        for name in names - {str(layout.worker_log(order.rank))}:
            with contextlib.suppress(OSError):
                os.unlink(name)


def open_next(
    layout: RunLayout, ranks: Iterable[int], trouble: Trouble
) -> Iterator[tuple[int, int]]:
    """Open the future logs of these ranks, while their present logs are still in use.

    Returns:
        Rank and descriptor.
    """
    for rank in ranks:
        path = layout.next_worker_log(rank)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            yield rank, os.open(path, flags, 0o644)
        except OSError as error:
            trouble(path, error)


def rename_next(layout: RunLayout, rank: int, trouble: Trouble) -> None:
    """Give a rank's next log its final name, which is free by now."""
    log = layout.worker_log(rank)
    try:
        os.rename(layout.next_worker_log(rank), log)
    except FileNotFoundError:
        return  # it was renamed before
    except OSError as error:
        trouble(log, error)


def remove_next(layout: RunLayout, rank: int) -> None:
    """Remove a rank's next log, unless it was renamed."""
    with contextlib.suppress(OSError):
        os.unlink(layout.next_worker_log(rank))
