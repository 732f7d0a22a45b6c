"""Status pages of dead ranks, left to ranks on other machines that save without a controller."""

from __future__ import annotations

from pathlib import Path

from worker_hooks.contract.atomic_file import ensure_folder, write_atomic
from worker_hooks.contract.layout import DUMP, UNFINISHED

_PAGE = "page_"


def notes_folder(place: str, job: str) -> Path:
    """Where ranks of a job that save to ``place`` talk to each other without a controller."""
    return Path(place, f"{DUMP}alone-{job}{UNFINISHED}")


def leave_page(folder: Path, rank: int, content: bytes) -> None:
    """Leave the page of a dead rank; empty: nothing is known of it but its death.

    Raises:
        OSError: it cannot be written.
    """
    ensure_folder(folder)
    if content:
        write_atomic(folder / f"{_PAGE}{rank}", content, durable=False)


def left_pages(folder: Path) -> dict[int, Path]:
    """What was left there, by rank."""
    found = (path for path in folder.glob(f"{_PAGE}*") if path.name[len(_PAGE) :].isdecimal())
    return {int(path.name[len(_PAGE) :]): path for path in found}
