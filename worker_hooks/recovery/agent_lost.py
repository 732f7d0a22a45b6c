"""What ranks do when msrun itself was killed: hold, save by themselves, and exit.

All ranks find their connection closed at about the same time, and hold at their next commit. Then
all are whole at the same step, because no rank can finish the next collective alone; a rank that is
already inside that collective stays there, and is whole. They agree through notes in a folder next
to the checkpoints: the lowest whole rank leads and writes the replicated state, every rank writes
its own private state, and the leader completes the dump when everything is written. Where ranks
hold different parts of the state, one rank of each replica group writes. The private
state of a rank that is dead or does not answer is on its page, which its peers have open; the
leader writes it. So it does with the part of a dead rank that nobody else holds, if that is left in
its memory: if only as of the step before, the leader writes all of that, which the others have in
their memory, too. If the leader dies, stops or hangs, the next one takes over in its own folder.

On several nodes the same happens when the controller's node is gone, or its msrun: its own ranks
find their connection closed, those of other nodes are told by their msrun. The folder next to the
checkpoints is the same for all. Of ranks on other nodes only their notes are known; those of a node
that is gone write none. Of the controller's node the msrun of the next one keeps copies of the
pages, which its ranks have open; other private states are lost with their node. A leader reads the
pages of its own node; those of another one its ranks leave among the notes, if their rank cannot
write its private state, and the msrun of that node those of the ranks that are dead.

While a rank is being replaced, the dump in memory is the state that all resume from. Each rank that
was sent there has open what its node has of it, and they write it to the disk between them. A rank
that was not sent there yet, or goes on from there already, is told where that is as its msrun tells
it to save: it writes what those lack.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Mapping

from worker_hooks.contract import protocol
from worker_hooks.contract.left_pages import notes_folder
from worker_hooks.guard.guard import Guard
from worker_hooks.recovery.attempt_claim import is_left
from worker_hooks.recovery.joint_dump import HeldParts
from worker_hooks.recovery.peer_notes import PeerNote, PeerNotes
from worker_hooks.recovery.unaided_dump import LOOK_S, UnaidedDump, elsewhere, listed

log = logging.getLogger("msrun")

LATE_S = 5.0  # without a note: no thread of that rank runs, its page has what it did last
LATE_COPIED_S = 1.0  # the same of a rank on another node, if one that told has a copy of its page
LATE_UNHEARD_S = 0.2  # the same if node 0 was silent for all of the limit: no more comes from there
LATE_SILENT_S = (
    15.0  # the same if node 0 is silent, which other nodes may notice some seconds later
)
LAST_LOOK_S = 1.0  # at a main thread that may be blocked after a complete update
EXIT = 1

OTHER_NODES = "msrun is gone on this node, and the job goes on elsewhere: nothing is saved here"


def save_without_agent(guard: Guard) -> None:
    """Save the state of this rank and its peers, and end the process. Runs in the listener."""
    try:
        if guard.env.is_controlled and not guard.is_forsaken:
            log.error(OTHER_NODES)
        else:
            _save(guard)
    except OSError as error:
        log.error("%s, and nothing could be saved: %s", _gone(guard), error)  # noqa: TRY400
    except Exception:
        log.exception("%s, and saving failed", _gone(guard))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT)


def _gone(guard: Guard) -> str:
    """Who does not decide any more, as a clause."""
    return "node 0 is gone" if guard.env.is_controlled else "msrun is gone"


def _late_s(
    guard: Guard, missing: set[int], told: Mapping[int, PeerNote], left: Collection[int] = ()
) -> float:
    """How long the notes of these ranks are awaited.

    If a rank lives whose page is copied, and its note comes too late, nothing is lost by that.

    Args:
        guard: of this rank.
        missing: those ranks.
        told: the notes that are there.
        left: ranks of which an msrun has left a copy, as no rank of its node is there.
    """
    copied = guard.peers.copied.union(left, *(note.copied for note in told.values()))
    is_silence = guard.is_forsaken and not guard.is_loss_proven
    if elsewhere(guard) and missing <= copied:
        return LATE_UNHEARD_S if is_silence else LATE_COPIED_S
    return LATE_SILENT_S if is_silence else LATE_S


def _fallbacks(guard: Guard) -> list[str]:
    """Where to save instead; ranks on other nodes would not find it."""
    assert guard.welcome is not None
    return [guard.welcome.fallback] if guard.welcome.fallback and not elsewhere(guard) else []


def _save(guard: Guard) -> None:
    welcome = guard.welcome
    assert welcome is not None
    guard.gate.hold()
    if elsewhere(guard) and not is_left(guard):
        log.error(OTHER_NODES)
        return
    notes, place = _open_notes(guard)
    if elsewhere(guard):
        notes.forget_earlier()
    began_s = time.monotonic()
    _settle(guard, notes, welcome.update_grace_s)
    silent = _await_all(guard, notes, began_s, welcome.update_grace_s)
    dump = UnaidedDump(guard, notes, welcome.stall_s)
    saved = None
    try:
        saved = dump.save([*dict.fromkeys((place, *_fallbacks(guard)))])
    finally:
        # nobody else would: the forkserver gives each rank half an hour to save
        silent = (silent - notes.read().keys()) | dump.stuck if saved else set()
        silent |= guard.peers.stopped()
        _end(guard, silent)
    if saved is None:
        log.error("%s; %s", _gone(guard), dump.why_nothing(guard.resumed_step))
    else:
        log.error("%s; saved: %s; resume with: msrun --resume", _gone(guard), saved)
    if dump.leads and saved is not None:
        dump.await_others()
        _end(guard, notes.read().keys())  # one that stopped answering after its note
        dump.clean_up()
    else:
        notes.withdraw()
        if saved is None:
            notes.remove_if_last()


def _end(guard: Guard, silent: Collection[int]) -> None:
    """Kill those of these ranks that are still there: nobody else would."""
    if ended := guard.peers.end(silent):
        log.error("%s; killed, as it did not answer: rank %s", _gone(guard), listed(ended))


def _open_notes(guard: Guard) -> tuple[PeerNotes, str]:
    job = guard.env.record_id
    assert guard.welcome is not None
    try:
        notes, place = (
            PeerNotes(notes_folder(guard.options.ckpt_save_path, job), guard.env.rank),
            guard.options.ckpt_save_path,
        )
        notes.tell(step=guard.source.step, copied=sorted(guard.peers.copied))
    except OSError:
        if not _fallbacks(guard):
            raise
        place = guard.welcome.fallback
        notes = PeerNotes(notes_folder(place, job), guard.env.rank)
        notes.tell(step=guard.source.step)
    return notes, place


def _is_in_vain(
    step: int, notes: PeerNotes, told: Mapping[int, PeerNote], everyone: set[int]
) -> bool:
    """Whether this rank, which waits for msrun in front of an update, will not make it.

    Once all wait there or are settled, none will be the first to make it: who waits has said so
    while it was held, and follows only a peer that has made the update.
    """
    others = [note for rank, note in told.items() if rank in everyone]
    stay = all(note.is_settled or note.is_waiting for note in others)
    return stay and everyone <= told.keys() | notes.left() and all(n.step <= step for n in others)


def _settle(guard: Guard, notes: PeerNotes, grace_s: float) -> None:
    """Wait until this rank's state will not change any more, then describe it in its note."""
    if guard.memory is not None:
        held = HeldParts.of(guard.memory.manifest)
        is_whole = len(held.states) == held.total
        why = "" if is_whole else "the state that it was to resume from had not come to its node"
        about = {"step": guard.memory.manifest.step, "is_whole": is_whole, "why": why}
        notes.tell(is_settled=True, is_memory=True, **about, **held._asdict())
        return
    gate, source = guard.gate, guard.source
    began_s, everyone = time.monotonic(), {*guard.peers, *elsewhere(guard)}
    deadline, heard, heard_s = began_s + grace_s, frozenset[int](), began_s
    while time.monotonic() < deadline and not gate.is_held:
        step = source.step
        told = notes.read()
        if told.keys() != heard:
            heard, heard_s = frozenset(told), time.monotonic()
        others = [note for note in told.values() if note.is_settled]
        if not gate.is_torn and any(note.step <= step for note in others):
            break  # that peer holds: no collective after this commit can be finished
        if not gate.is_torn and not guard.peers.are_all_awake:
            break  # a peer is dead or stopped: the same
        newest = max((note.step for note in told.values()), default=0)
        gate.follow(newest)
        missing = everyone - told.keys() - notes.left()
        late_s = _late_s(guard, missing, told, notes.copied())
        if step < newest:  # it takes a moment to follow
            late_s = max(late_s, LATE_COPIED_S)
        is_late = time.monotonic() > heard_s + late_s
        if not gate.is_torn and is_late and missing:
            break  # a peer does not run, or is on a node that is gone: the same
        is_waiting = gate.vote is not None and gate.vote.waits_for_msrun
        if is_waiting and _is_in_vain(step, notes, told, everyone):
            break
        if (step, is_waiting) != (notes.mine.step, notes.mine.is_waiting):
            notes.tell(step=step, is_waiting=is_waiting)
        time.sleep(LOOK_S)
    step, is_whole, why = guard.freeze(max(LAST_LOOK_S, deadline - time.monotonic()))
    known = guard.replicated if not guard.replicated.why_not else protocol.Replicated("")
    about = {} if guard.offered is None else HeldParts.of(guard.offered.manifest)._asdict()
    notes.tell(
        is_settled=True,
        **about
        | {
            "step": step,
            "is_whole": is_whole,
            "why": why,
            "alike": known.alike,
            "parts": tuple(map(tuple, known.parts)),
            "total": known.total,
        },
    )


def _await_all(guard: Guard, notes: PeerNotes, began_s: float, grace_s: float) -> set[int]:
    """Wait for the notes of all ranks that can write one; the ranks that did not.

    A rank that is stopped cannot. One whose listener does not run (its main thread is in a call
    that keeps the interpreter, or in the kernel) writes none within LATE_S, nor does one of a node
    that is gone.
    """
    everywhere = elsewhere(guard)
    until_s = began_s + LATE_SILENT_S + grace_s + LAST_LOOK_S
    while True:
        notes.touch()
        told = notes.read()
        others = everywhere - notes.left()
        now_s = time.monotonic()
        late_s = began_s + _late_s(guard, others - told.keys(), told, notes.copied())
        awaited = guard.peers.awake() | (others & told.keys() if now_s > late_s else others)
        unsettled = awaited - {rank for rank, note in told.items() if note.is_settled}
        if not unsettled or now_s > until_s or (now_s > late_s and not unsettled & told.keys()):
            return set(guard.peers) - told.keys()
        time.sleep(LOOK_S)
