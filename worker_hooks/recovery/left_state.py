"""What ranks have in their memory, for those that save without msrun while others are dead.

Without msrun nobody else reads it. A rank's page says who keeps its memory, and the forkserver lets
that process live as long as peers save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from worker_hooks.contract.atomic_file import FOLDER_MODE
from worker_hooks.contract.process_stat import name_of
from worker_hooks.contract.status_page import Page
from worker_hooks.machine.kept_memory import KEEPER, StateMap
from worker_hooks.machine.left_memory import LeftMemory
from worker_hooks.recovery.peer_notes import PeerNote
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.manifest import REPLICATED, Shard

Groups = tuple[tuple[int, ...], ...]


class LeftPlan(NamedTuple):
    """What is to be read in memory."""

    step: int
    readers: Mapping[int, tuple[int, ...]]  # whose memory, and of which ranks it is the state


def plan_left(
    step: int,
    groups: Collection[tuple[int, ...]],
    whole: Collection[int],
    left: Mapping[int, Collection[int]],
) -> LeftPlan | None:
    """What of the state only memory has; ``None``: nothing, or it is not there either.

    If some part is there only as of an older step, all of that is read, where all parts are.

    Args:
        step: the newest that ranks hold.
        groups: the ranks that hold the same, of all ranks.
        whole: those that live and hold the step.
        left: by rank the steps that are whole in its memory; no rank that lives changes that.
    """
    lost = [group for group in groups if not {*whole} & {*group}]
    held = [{each for rank in group for each in left.get(rank, ())} for group in groups]
    older = max((each for each in set.intersection(*held) if each < step), default=0)
    for of, parts in ((step, lost), (older, groups)):
        readers = [next((r for r in group if of in left.get(r, ())), None) for group in parts]
        if lost and None not in readers:
            pairs = zip(readers, parts, strict=True)
            return LeftPlan(of, {rank: group for rank, group in pairs if rank is not None})
    return None


def left_steps(pages: Mapping[int, Page]) -> dict[int, tuple[int, ...]]:
    """By rank, the steps that its memory holds whole; its process has ended, or stands still."""
    found = {}
    for rank, page in pages.items():
        with _opened(page) as memory:
            states = [] if memory is None else memory.states()
            found[rank] = tuple(state.step for state in states)
    return found


@contextmanager
def _opened(page: Page) -> Iterator[LeftMemory | None]:
    keeper, board = page.keeper
    file = None
    if keeper and name_of(keeper) == KEEPER:
        with suppress(OSError):
            file = open(f"/proc/{keeper}/mem", "rb", buffering=0)  # noqa: SIM115
    if file is None:
        yield None
        return
    with file:
        yield LeftMemory(file.fileno(), board)


def write_left(
    page: Page, step: int, folder: Path, place: str, advance: Callable[[int], None]
) -> PeerNote:
    """Write what a rank has in its memory as it would; what its note would say.

    Args:
        page: of the rank.
        step: whose state is meant.
        folder: of the dump.
        place: of the file in it.
        advance: called with counts of bytes that are done.

    Raises:
        OSError: it is not there any more, or the file cannot be written, and is removed.
    """
    with _opened(page) as memory:
        states = [] if memory is None else memory.states()
        state = next((state for state in states if state.step == step), None)
        if memory is None or state is None:
            raise OSError(0, f"the memory of rank {page.rank} does not hold step {step} any more")
        page.complete(step)  # its record was written first, and may not count yet
        return _written(memory, state, page.rank, folder, place, advance)


def _written(
    memory: LeftMemory,
    state: StateMap,
    rank: int,
    folder: Path,
    place: str,
    advance: Callable[[int], None],
) -> PeerNote:
    digest = list[str]()
    path = folder / place
    path.parent.mkdir(FOLDER_MODE, exist_ok=True)
    done = safetensors_file.write(path, state.head, memory.summed(state, digest), advance)
    shard = Shard(place, rank, REPLICATED, done.nbytes, done.sha256)
    note = PeerNote(0, state.step, is_settled=True, is_whole=True, folder=str(folder))
    return note._replace(digest=digest[0], written=shard._asdict())
