"""Histories of replacements that come to nothing: the memory goes to disk, or there was none.

Rows as in `replacements.py`.
"""

from signal import SIGINT, SIGTERM

from agent.controller import events as ev
from support.histories.dumps import (
    cut,
    done,
    froze,
    full,
    holds,
    moved,
    reg,
    running,
    threw,
    unable,
    wrote,
)
from support.histories.exits import now
from support.histories.plain import ask, gone, late, no_start, up, wish
from support.histories.replacements import (
    ALMOST,
    COMMITTING,
    JOINING,
    KILL_S,
    MEMORY,
    ONE_LEFT,
    ORDERED,
    PROGRESS,
    RAISED,
    REPLACING,
    STOP,
    THREE,
    TO_DISK,
    TWO,
    asked,
    on_disk,
    raised,
    rejoins,
    starts,
    undone,
)


def fell(event, why, alive="0,2", newcomer=True):
    """Nobody is replaced after all: to disk, then all are stopped, then they start again."""
    others = f"TERM {alive}"
    return [
        (event, "committing", TO_DISK, why),
        (
            done("/d"),
            "stopping",
            f"forget; {others}; {'' if newcomer else 'cancel; '}{STOP}",
            f"rank 1 was killed by SIGKILL; step 5 is saved in /d; not replaced: {why}",
        ),
    ]


HISTORIES = [
    # --- too much at once
    ("nobody is left when the memory is complete: all are replaced from it", THREE, [
        *COMMITTING, (gone(0, -9), "committing"), (gone(2, -9), "committing"),
        (done(MEMORY), "replacing", starts(1, "", "0,1,2"), "rank 1 was killed by SIGKILL in step 6; replacing all ranks, from memory"),
        *((up(rank, 1), "replacing") for rank in range(3)), (reg(0, 5, 1), "replacing"), (reg(1, 5, 1), "replacing"),
        (reg(2, 5, 1), "running", "forget; deadline running -; go on 1: 0,1,2", "ranks 0-2 replaced, every rank has joined")]),
    ("nobody is left, and the budget is spent: to disk", asked(max_replacements=2), [
        *COMMITTING, (gone(0, -9), "committing"), (gone(2, -9), "committing"), (done(MEMORY), "committing", TO_DISK, "all 2 replacements within 3600 s are spent"),
        (done("/d"), "starting", "forget; sweep; start 1 from /d; deadline starting 600", "step 5 is saved in /d; not replaced: all 2 replacements")]),
    ("and what is on disk already is not written again", asked(max_replacements=2), [
        *on_disk(COMMITTING), (gone(0, -9), "committing"), (gone(2, -9), "committing"),
        (done(MEMORY), "starting", "forget; sweep; start 1 from /old; deadline starting 600", "step 5 is saved in /old; not replaced: all 2 replacements")]),
    ("if it cannot be killed the memory goes to disk", THREE, [
        *RAISED, (late("replacing"), "replacing", f"KILL 1; {KILL_S}", "still alive"), (late("replacing"), "committing", TO_DISK, "rank 1 cannot be killed"),
        (done("/d"), "stopping", f"forget; TERM 0,2; release 1; {STOP}", "rank 1 raised ValueError: bad; step 5 is saved in /d; not replaced: rank 1 cannot be killed")]),
    ("all others die meanwhile: all are replaced", TWO, [
        *raised(2), (done(MEMORY), "replacing", f"release 1; {KILL_S}", "raised"), (gone(0, -9), "replacing"),
        (gone(1, 1), "replacing", starts(1, "", "0,1"), "replacing all ranks")]),
    ("a script that raises when it is entered again: to disk", THREE, [
        *JOINING, (threw(2, attempt=1), "replacing", "deadline replacing 0.5"), (rejoins(0), "replacing"), (threw(0, attempt=1), "replacing"),
        *fell(late("replacing", 1), "the script cannot be entered again: rank 2 raised ValueError: bad", alive="1")[:1],
        (done("/d"), "stopping", f"forget; TERM 1; release 0,2; {STOP}", "not replaced: the script cannot be entered again: rank 2 raised ValueError: bad")]),
    ("one that has joined may raise before the last one joins", THREE, [
        *ALMOST, (threw(0, attempt=1), "replacing", "deadline replacing 0.5"), (reg(2, 5, 1), "replacing"), (late("replacing", 1), "committing", TO_DISK, "rank 0 raised ValueError: bad")]),
    ("before all have left, too", THREE, [
        *REPLACING, (threw(0, attempt=1), "replacing", "deadline replacing 0.5"), (rejoins(0), "replacing"), (rejoins(2), "replacing"),
        (late("replacing", 1), "committing", TO_DISK, "rank 0 raised")]),
    ("nobody comes out: all are killed and replaced", THREE, [
        *REPLACING, (up(1, 1), "replacing"), (late("replacing", 1), "replacing", f"KILL 0,1,2; {KILL_S}", "ranks 0, 2 did not leave the training function"),
        (gone(0, -9, 1), "replacing"), (gone(2, -9, 1), "replacing"), (gone(1, -9, 1), "replacing", starts(2, "", "0,1,2"), "did not leave")]),
    ("nobody comes out, and the budget is spent: to disk", asked(max_replacements=2), [
        *REPLACING, (up(1, 1), "replacing"), *fell(late("replacing", 1), "all 2 replacements within 3600 s are spent", alive="0,1,2")]),
    ("all die: all are replaced", THREE, [
        *REPLACING, (up(1, 1), "replacing"), (gone(0, -9, 1), "replacing", f"KILL 1; {KILL_S}", "rank 0"), (gone(2, -9, 1), "replacing"),
        (gone(1, -9, 1), "replacing", starts(2, "", "0,1,2"), "rank 0 was killed by SIGKILL in step 6; replacing all ranks")]),
    # --- what ends it
    ("a start that fails", THREE, [
        *REPLACING, (no_start(1, 1), "committing", TO_DISK, "rank 1 could not be started: no memory"), (done("/d"), "stopping", f"forget; TERM 0,2; {STOP}", "not replaced: rank 1 could not be started: no memory")]),
    ("a start that is answered only then", THREE, [
        *REPLACING, (reg(0, 4, 1), "committing", TO_DISK, "rank 0 came back at step 4"), (up(1, 1), "committing"), (done("/d"), "stopping", f"forget; TERM 0,1,2; {STOP}", "step 5 is saved")]),
    ("or fails then", THREE, [
        *REPLACING, (reg(0, 4, 1), "committing", TO_DISK, "rank 0 came back at step 4"), (no_start(1, 1), "committing"), (done("/d"), "stopping", f"forget; TERM 0,2; {STOP}", "step 5 is saved")]),
    ("who is a step ahead is as wrong as who is behind", THREE, [*REPLACING, *fell(reg(0, 6, 1), "rank 0 came back at step 6 instead of 5", newcomer=False)]),
    ("or is called off", THREE, [*REPLACING, *fell(reg(0, 4, 1), "rank 0 came back at step 4 instead of 5", newcomer=False)]),
    ("too much time to join", THREE, [*ALMOST, *fell(late("replacing", 1), "rank 2 did not join within 600 s", alive="0,1,2")]),
    ("a rank that comes back elsewhere", THREE, [*JOINING, *fell(reg(1, 0, 1), "rank 1 came back at step 0 instead of 5", alive="0,1,2")]),
    ("a rank that leaves with 0", THREE, [
        *JOINING, *fell(gone(2, 0, 1), "rank 2 exited already", alive="0,1")]),
    ("three deaths at one step", THREE, [
        *JOINING, (gone(1, -9, 1), "replacing", starts(2, "0,2", "1"), "SIGKILL"), *fell(gone(1, -11, 2), "rank 1 died three times at step 5")]),
    ("a budget that is spent in a round", asked(max_replacements=1), [*JOINING, *fell(gone(1, -9, 1), "all 1 replacements within 3600 s are spent")]),
    ("a stop: to disk, then no restart", THREE, [
        *JOINING, (ask(SIGINT), "committing", TO_DISK, "a stop was asked for"), (done("/d"), "stopping", f"forget; TERM 0,1,2; {STOP}", "rank 1 was killed by SIGKILL; step 5 is saved in /d"),
        (gone(0, -15, 1), "stopping"), (gone(1, -15, 1), "stopping"), (gone(2, -15, 1), "stopped", "sweep; finish stopped 130", "stopped by SIGINT; step 5 is saved in /d")]),
    ("two stops: now", THREE, [
        *JOINING, (ask(SIGINT), "committing", TO_DISK, "a stop"), (ask(SIGINT), "killing", "forget; abandon; KILL 0,1,2; deadline killing 10", "step 5 is not saved: msrun received SIGINT again")]),
    ("a stop without grace", THREE, [
        *JOINING, (now(), "killing", "forget; KILL 0,1,2; deadline killing 10", "msrun stop --now"), (gone(0, -9, 1), "killing"), (gone(1, -9, 1), "killing"),
        (gone(2, -9, 1), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 5 is not saved: msrun stop --now")]),
    ("a file asks for a graceful exit", THREE, [*JOINING, (wish(attempt=1), "committing", TO_DISK, "a stop was asked for")]),
    ("a stop before the memory is complete", THREE, [
        *ORDERED, (ask(SIGTERM), "dumping"), *COMMITTING[len(ORDERED):], (done(MEMORY), "committing", TO_DISK, "a stop was asked for"), (done(MEMORY), "committing"),
        (moved(-1), "committing", "deadline committing 20"), (done("/d"), "stopping", f"forget; TERM 0,2; {STOP}", "step 5 is saved in /d")]),
    # --- to disk
    ("the first folder cannot be written", THREE, [
        *JOINING, (reg(1, 4, 1), "committing", TO_DISK, "came back"), (undone("no space left", place=True), "committing", "commit 5 by 0 place 1 from memory; deadline committing 20", "no space left"),
        (done("/e"), "stopping", f"forget; TERM 0,1,2; {STOP}", "step 5 is saved in /e; not replaced: rank 1 came back")]),
    ("neither folder can", THREE, [
        *JOINING, (reg(1, 4, 1), "committing", TO_DISK, "came back"), (undone("no space left", place=True), "committing", "commit 5 by 0 place 1 from memory; deadline committing 20", "no space left"),
        (undone("read-only", place=True), "stopping", f"forget; abandon; TERM 0,1,2; {STOP}", "step 5 is not saved: no space left; read-only; not replaced: rank 1 came back")]),
    ("it is stuck", THREE, [
        *JOINING, (reg(1, 4, 1), "committing", TO_DISK, "came back"), (late("committing", 1), "stopping", f"forget; abandon; TERM 0,1,2; {STOP}", "step 5 is not saved: its commit made no progress in 20 s")]),
    ("it is on disk already", THREE, [
        *on_disk(JOINING),
        (reg(1, 4, 1), "stopping", f"forget; TERM 0,1,2; {STOP}", "rank 1 was killed by SIGKILL; step 5 is saved in /old; not replaced: rank 1 came back")]),
    *((f"it is on disk already: {name}", THREE, [
        *on_disk(REPLACING), (event, "stopping", f"forget; {actions}; {STOP}", "step 5 is saved in /old")])
      for name, event, actions in [
          ("a start fails", no_start(1, 1), "TERM 0,2"), ("a stop", ask(SIGTERM), "TERM 0,2; cancel"), ("a file", wish(attempt=1), "TERM 0,2; cancel"),
          ("a rank leaves", gone(0, 0, 1), "TERM 2; cancel"), ("a rank is elsewhere", reg(0, 4, 1), "TERM 0,2; cancel")]),
    ("it is on disk already: too late", asked(max_replacements=2), [
        *on_disk(REPLACING), (late("replacing", 1), "stopping", f"forget; TERM 0,2; cancel; {STOP}", "step 5 is saved in /old")]),
    ("a script ends meanwhile, and the budget is spent: to disk", asked(max_replacements=1), [
        *REPLACING, (ev.RankExiting(2, 1), "committing", TO_DISK, "all 1 replacements within 3600 s are spent")]),
    ("it is on disk already: a script ends", asked(max_replacements=1), [
        *on_disk(REPLACING), (ev.RankExiting(2, 1), "stopping", f"forget; TERM 0,2; cancel; {STOP}", "step 5 is saved in /old")]),
    ("a script ends meanwhile: another round", THREE, [
        *REPLACING, (ev.RankExiting(2, 1), "replacing", f"KILL 2; cancel; {KILL_S}", "the script of rank 2 has ended")]),
    ("lines break, and all are replaced", TWO, [
        *ONE_LEFT, (up(1, 1), "replacing"), (cut(0, 1), "replacing", f"KILL 0,1; {KILL_S}", "rank 0 let go of its state"),
        (gone(0, -9, 1), "replacing"), (gone(1, -9, 1), "replacing", starts(2, "", "0,1"), "replacing all ranks")]),
    ("it is on disk already: lines break", TWO._replace(replace=TWO.replace._replace(max_replacements=1)), [
        *on_disk(ONE_LEFT),
        (cut(0, 1), "stopping", f"forget; TERM 0; cancel; {STOP}", "all 1 replacements")]),
    ("lines break, and it is only in memory", TWO._replace(replace=TWO.replace._replace(max_replacements=1)), [
        *ONE_LEFT, (cut(0, 1), "committing", TO_DISK, "all 1 replacements")]),
    ("it is on disk already, with others alive", THREE, [
        *on_disk(COMMITTING), (ask(SIGTERM), "committing"),
        (done(MEMORY), "stopping", f"forget; TERM 0,2; {STOP}", "step 5 is saved in /old")]),
    # --- without a dump as the next rung
    *((f"nothing goes to disk: {name}", asked(after_failure=False), steps) for name, steps in [
        ("a rank comes back elsewhere", [
            *JOINING, (reg(1, 4, 1), "stopping", f"forget; abandon; TERM 0,1,2; {STOP}", "rank 1 was killed by SIGKILL; step 5 is not saved: saving after a failure is off; not replaced: rank 1 came back")]),
        ("no memory", [*ORDERED, (full(0), "stopping", f"abandon; TERM 0,2; {STOP}", "saving after a failure is off; not replaced: no checkpoint in memory (no space left)")]),
        ("a rank left before", [*running(3), (gone(0, 0), "running"), (gone(1, -9), "freezing", "freeze 1: 2; deadline freezing 15", "SIGKILL"), (froze(2), "stopping", f"abandon; TERM 2; {STOP}", "step 5 is not saved: saving after a failure is off; not replaced: rank 0 exited already")]),
        ("but what a stop is asked for", [*JOINING, (ask(SIGTERM), "committing", TO_DISK, "a stop was asked for")])]),
    # --- no checkpoint in memory
    ("it cannot be written: the disk", THREE, [
        *ORDERED, (full(0), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "no checkpoint in memory (no space left)"), (holds(2, "quick", number=1), "dumping", PROGRESS), (wrote(0), "dumping"),
        (wrote(0, "quick", number=1), "committing", "commit 5 by 0; deadline committing 20", "written"), (done("/d"), "stopping", f"TERM 0,2; {STOP}", "step 5 is saved in /d; not replaced: no checkpoint in memory (no space left)"),
        (gone(0, -15), "stopping"), (gone(2, -15), "starting", "forget; sweep; start 1 from /d; deadline starting 600", "restart 1 of 1")]),
    ("nobody can write it: all are asked again for the disk", THREE, [
        *ORDERED, (unable(0), "dumping", f"save 5 by 2 memory; {PROGRESS}", "rank 0 failed"), (unable(2, number=1), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "no checkpoint in memory (ranks 0, 2 failed (out of memory))")]),
    ("digests of the memory are not those of the disk", THREE, [
        *ORDERED, (full(0), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "no checkpoint"), (holds(2, "quick"), "dumping"), (holds(2, "slow", number=1), "dumping", PROGRESS)]),
    ("a writer is stuck, then another one", THREE, [
        *ORDERED, (holds(2), "dumping", PROGRESS), (late("dumping"), "dumping", f"save 5 by 2 memory; {PROGRESS}", "what rank 2 said"), (late("dumping"), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "nothing moves there")]),
    ("the replicas differ without a majority: each state is kept on disk", THREE, [
        *ORDERED, (wrote(0), "dumping", PROGRESS), (holds(2, "b"), "dumping", f"save 5 by 2 memory; {PROGRESS}", "rank 2 said"), (wrote(2, "b", 1), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "the replicas differ without a majority")]),
    ("its commit fails: the disk", THREE, [
        *COMMITTING, (undone(), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "no checkpoint in memory (no descriptors)")]),
    ("the state itself is not known: no other place is tried", THREE, [
        *COMMITTING, (ev.CommitFailed(1, "rank 1 has drawn", is_place=False, is_state=True), "stopping", f"abandon; TERM 0,2; {STOP}", "step 5 is not saved: rank 1 has drawn; not replaced: step 5 cannot be saved")]),
    ("its commit fails, and nobody is left", THREE, [
        *COMMITTING, (gone(0, -9), "committing"), (gone(2, -9), "committing"),
        (undone(), "starting", "forget; abandon; sweep; start 1; deadline starting 600", "step 5 is not saved: no checkpoint in memory (no descriptors); no rank is left to write")]),
    ("its commit fails, and it is on disk already", THREE, [
        *on_disk(COMMITTING),
        (undone(), "stopping", f"abandon; TERM 0,2; {STOP}", "step 5 is saved in /old; not replaced: no checkpoint in memory (no descriptors)")]),
    ("its commit is stuck, and is heard of later", THREE, [
        *COMMITTING, (late("committing"), "stopping", f"abandon; TERM 0,2; {STOP}", "step 5 is not saved: its commit made no progress in 20 s"), (done(MEMORY), "stopping")]),
]  # fmt: skip
