"""What ranks on several machines that save without a controller find beside the checkpoints.

Status pages of dead ranks, and copies of those of node 0's ranks; and who has claimed an attempt:
ranks that save it by themselves, or another node, which takes the part of node 0 while its ranks
live on.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from worker_hooks.contract.atomic_file import ensure_folder, write_atomic
from worker_hooks.contract.layout import DUMP, UNFINISHED

_PAGE = "page_"
_COPY = "copy_"
_CLAIM = ".msrun-{}-attempt-"
TAKEN = "taken"  # another node decides, and replaces the ranks of the lost one
ALONE = "alone"  # ranks of the lost one save by themselves


def notes_folder(place: str, job: str) -> Path:
    """Where ranks of a job that save to ``place`` talk to each other without a controller."""
    return Path(place, f"{DUMP}alone-{job}{UNFINISHED}")


def leave_page(
    folder: Path, rank: int, content: bytes, *, is_copy: bool = False, is_late: bool = False
) -> None:
    """Leave the page of a dead rank; empty: nothing is known of it but its death.

    Args:
        folder: as :func:`notes_folder`.
        rank: whose page it is.
        content: of the page.
        is_copy: of a rank that may live, and whose own page is newer then.
        is_late: the others may be done, and have removed the folder: it is not made again.

    Raises:
        OSError: it cannot be written.
    """
    if not is_late:
        ensure_folder(folder)
    if content:
        name = f"{_COPY if is_copy else _PAGE}{rank}"
        write_atomic(folder / name, content, durable=False)


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


def left_pages(folder: Path, *, copies: bool = False) -> dict[int, Path]:
    """The pages of dead ranks that were left there, by rank; or the copies."""
    kind = _COPY if copies else _PAGE
    found = (path for path in folder.glob(f"{kind}*") if path.name[len(kind) :].isdecimal())
    return {int(path.name[len(kind) :]): path for path in found}
