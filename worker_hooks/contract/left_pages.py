"""What ranks on several machines that save without a controller find beside the checkpoints.

Status pages of dead ranks; and who has claimed an attempt: ranks that save it by themselves, or
another node, which takes the part of node 0 while its ranks live on.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from worker_hooks.contract.atomic_file import ensure_folder, write_atomic
from worker_hooks.contract.layout import DUMP, UNFINISHED

_PAGE = "page_"
_CLAIM = ".msrun-{}-attempt-"
TAKEN = "taken"  # another node decides, and replaces the ranks of the lost one
ALONE = "alone"  # ranks of the lost one save by themselves


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


def claim(place: Path, job: str, attempt: int, who: str) -> bool:
    """Claim an attempt of a job that saves to ``place``; whether nobody else had.

    Raises:
        OSError: the folder takes no file.
    """
    ensure_folder(place)
    path = _claim_path(place, job, attempt)
    of_thread = f"{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}"
    draft = path.with_name(f"{path.name}-{of_thread}")
    draft.write_text(who)
    try:
        os.link(draft, path)  # with its content, and never over another one
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
    return claimed(place, job, attempt) == who


def claimed(place: Path, job: str, attempt: int) -> str:
    """Who has claimed an attempt; empty: nobody."""
    try:
        return _claim_path(place, job, attempt).read_text()
    except OSError:
        return ""


def unclaim(place: Path, job: str) -> None:
    """The job is over, or is saved: remove what was claimed."""
    for path in place.glob(f"{_CLAIM.format(job)}*"):
        path.unlink(missing_ok=True)


def _claim_path(place: Path, job: str, attempt: int) -> Path:
    return place / f"{_CLAIM.format(job)}{attempt}"


def left_pages(folder: Path) -> dict[int, Path]:
    """What was left there, by rank."""
    found = (path for path in folder.glob(f"{_PAGE}*") if path.name[len(_PAGE) :].isdecimal())
    return {int(path.name[len(_PAGE) :]): path for path in found}
