"""Histories of copies in memory: the newest goes to disk where no rank can save a newer step.

Rows as in `replacements.py`.
"""

from signal import SIGINT, SIGTERM, SIGUSR1

from agent.controller import events as ev
from agent.spec.job_spec import CopyMode
from support.histories import groups, same
from support.histories.dumps import cut, froze, full, holds, reg, running, threw, unable, wrote
from support.histories.exits import stands
from support.histories.plain import ask, gone, late, rules, tell, up
from support.histories.replacements import PROGRESS, STOP, hangs

COMMITS = "deadline committing 20"
FREEZE_S = "deadline freezing 15"
AGAIN = "sweep; start 1; deadline starting 600"
AGAIN_FROM = "sweep; start 1 from /d; deadline starting 600"
TORN = "the update did not end"


def asked(count, **changes):
    """Rules of a job that is copied, and restarted once."""
    return rules(
        **{"ranks": tuple(range(count)), "max_restarts": 1, "copies": CopyMode.COPY, **changes}
    )


ONE, TWO, THREE, SIX = asked(1), asked(2), asked(3), asked(6)
SPENT = asked(2, max_restarts=0)
UNSAVED = asked(1, after_failure=False)


def copied(step=5, *variants, attempt=0, why_not=""):
    """A copy is complete; unless that is said, rank 0 wrote all of it."""
    return ev.StateCopied(attempt, step, 1, variants or ((0,),), why_not=why_not)


def saved(dump=2, path="/d"):
    return ev.DumpCommitted(dump, path)


def unsaved(dump=2, why="no space left", place=True):
    return ev.CommitFailed(dump, why, place)


def unknown(dump, why):
    return ev.CommitFailed(dump, why, is_place=False, is_state=True)


def at(rank, step, attempt=0):
    """A rank is killed whose newest commit its status page shows."""
    return ev.WorkerExited(rank, attempt, -9, step)


def lost(rank, step=None, attempt=0):
    """The node of a rank is gone, and with it what was copied there."""
    why = "node 1 (b) is gone: its msrun closed the line"
    return ev.WorkerExited(rank, attempt, -9, step, lost=why)


def written(step=5, by="0", place=""):
    return f"commit {step} by {by}{place} from a copy; {COMMITS}"


def instead(step=5, by="0"):
    return f"abandon; {written(step, by)}"


def after(count):
    """`count` ranks train, and a copy is complete."""
    return [*running(count), (copied(), "running")]


def died(count, dump=1):
    """The last of so many is killed."""
    left = ",".join(map(str, range(count - 1)))
    return gone(count - 1, -9), "freezing", f"freeze {dump}: {left}; {FREEZE_S}", "SIGKILL"


LOST = "step 7 is not saved: no rank can be asked: rank 0 ended; step 5 is the newest copy"
KILLED = [*after(1), (at(0, 7), "committing", written(), LOST)]
BOTH = [*after(2), died(2), (at(0, 7), "committing", instead(), "ranks 0, 1 ended; step 5 is")]
FULL = [*BOTH, (unsaved(), "committing", written(place=" place 1"), "no space left")]
NOR = "step 7 is not saved: nor is the copy of step 5 (no space left; read-only)"
HELD = (ask(SIGTERM), "holding", "hold 1: 0; deadline holding 20", "graceful exit")
HUNG = (hangs(0), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 0 made no progress")
WRITING = [*after(2), died(2), (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7")]
UNKNOWN = [
    *WRITING,
    (wrote(0, "b"), "committing", f"commit 7 by 0; {COMMITS}", "step 7 is written"),
    (unknown(1, "rank 1 has drawn"), "committing", instead(), "step 7 is not saved: rank 1 has"),
]
WRITING_3 = [
    *after(3),
    died(3),
    (froze(0, 7), "freezing"),
    (froze(1, 7), "dumping", f"save 7 by 0 digest 1; {PROGRESS}", "step 7"),
]
WRITING_6 = [
    *after(6),
    died(6),
    *((froze(rank, 7), "freezing") for rank in range(4)),
    (froze(4, 7), "dumping", f"save 7 by 0 digest 1,2,3,4; {PROGRESS}", "step 7"),
    (wrote(0, "b"), "dumping", PROGRESS),
    *((holds(rank), "dumping", PROGRESS) for rank in (1, 2, 3)),
    *((gone(rank, -9), "dumping", PROGRESS) for rank in (1, 2, 3)),
]
RESTARTED = [
    *FULL,
    (unsaved(why="read-only"), "starting", f"forget; abandon; {AGAIN}", NOR),
    (up(0, 1), "starting"),
    (up(1, 1), "running"),
    (reg(0, 0, 1), "running"),
]

AT_ONCE = asked(1, max_restarts=2, restarts_from_memory=True)
EARLY = ev.DumpCommitted(1, "/d", is_early=True)
FROM_MEMORY = [
    *after(1), (at(0, 7), "committing", f"commit 5 by 0 from a copy early; {COMMITS}", LOST),
    (EARLY, "starting", f"forget; {AGAIN_FROM}", "step 5 is in memory, and is being saved in /d, from a copy in memory"), (up(0, 1), "running"),
]  # fmt: skip
AGAIN_2 = "sweep; start 2{}; deadline starting 600"
NODES = asked(2, node_wait_s=600.0, has_nodes=True)
NO_COPY = "; the copy of step 5 in memory is lost with the node"
NODE_LOST = [
    *after(2),
    (lost(1, 7), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 1 is lost: node 1 (b)"),
]
OWN = [*same.OWN, (copied(5, (0,), (1,), (2,)), "running")]
PARTS = [*groups.TRAINING, (copied(5, (0,), (3,)), "running")]
GROWS = (same.says(0, 4, {"optimizer.m": "1"}, late=True), "running")
ROUND = [*same.EQUAL, (copied(4), "running"), *same.KEPT[len(same.EQUAL) :]]
CONFIRMED = [
    *ROUND,
    *((says, "running") for says in (same.says(rank, 7, None, 1) for rank in range(2))),
    (same.says(2, 7, None, 1), "running", "forget", "no rank resumes from memory"),
]
GONE = [
    (at(0, 8, 1), "freezing", f"freeze 2: 1,2; {FREEZE_S}", "rank 0 was killed"),
    (gone(1, -9, 1), "freezing"),
]

HISTORIES = [
    # --- the only rank of a job
    ("the only rank is killed: the newest copy is saved, and a restart from it", ONE, [
        *KILLED, (ev.DumpProgressed(1), "committing", COMMITS), (tell(SIGUSR1), "committing"), (copied(9), "committing"),
        (saved(1), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d, from a copy in memory (step 7 is not saved: no rank can be asked: rank 0 ended)"),
        (up(0, 1), "running"), (reg(0, 5, 1), "running"), (copied(9), "running"), (copied(6, attempt=1), "running"), (at(0, 8, 1), "committing", written(6), "step 6 is the newest copy"),
        (saved(2, "/e"), "failed", "forget; sweep; finish failed 1", "(all 1 restarts are spent); step 6 is saved in /e, from a copy")]),
    ("how far it was is known from the copy alone", ONE, [*after(1), (gone(0, -9), "committing", written(), "step 5 is not saved: no rank can be asked")]),
    ("it hangs, and does not answer", ONE, [
        *after(1), HUNG, (late("freezing"), "committing", instead(), "did not answer within 15 s"), (saved(), "stopping", f"forget; TERM 0; {STOP}", "step 5 is saved in /d, from a copy")]),
    ("it raises amid an update", ONE, [
        *after(1), (threw(0), "freezing", f"freeze 1: 0; {FREEZE_S}", "ValueError"), (froze(0, 7, TORN), "committing", instead(), "rank 0 cannot save it (the update did not end)"),
        (saved(), "stopping", f"forget; release 0; {STOP}", "step 5 is saved in /d, from a copy"), (gone(0, 1), "starting", AGAIN_FROM, "rank 0 raised ValueError: bad; step 5 is saved")]),
    ("it lets go of its state, and is killed", ONE, [*after(1), (cut(0), "running"), (at(0, 7), "committing", written(), LOST)]),
    ("it lets go of its state, and raises", ONE, [
        *after(1), (cut(0), "running"), (threw(0), "committing", written(), "rank 0 let go of its state"), (saved(1), "stopping", f"forget; release 0; {STOP}", "step 5 is saved in /d")]),
    ("it lets go of its state, and hangs", ONE, [
        *after(1), (cut(0), "running"), (hangs(0), "committing", f"KILL 0; {written()}", "rank 0 let go of its state"), (gone(0, -9), "committing"), (saved(1), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d")]),
    ("it lets go of its state when it is asked for it", ONE, [*after(1), HUNG, (cut(0), "committing", instead(), "rank 0 let go of its state")]),
    # --- all restart from memory at once
    ("it is written meanwhile", AT_ONCE, [
        *FROM_MEMORY, (ev.CheckpointWritten(1, 5, "/d"), "running"), (gone(0, -9, 1), "starting", AGAIN_2.format(" from /d"), "step 5 is saved in /d")]),
    ("it is written while a rank is stopped", AT_ONCE, [
        *after(1), HUNG, (late("freezing"), "committing", "abandon; commit 5 by 0 from a copy early; deadline committing 20", "did not answer"),
        (ev.DumpCommitted(2, "/d", is_early=True), "stopping", f"forget; TERM 0; {STOP}", "is being saved in /d"), (ev.CheckpointWritten(2, 5, "/e"), "stopping"),
        (gone(0, -9), "starting", AGAIN_FROM.replace("/d", "/e"), "step 5 is saved in /e, from a copy in memory")]),
    ("it is written to another folder", AT_ONCE, [
        *FROM_MEMORY, (ev.CheckpointWritten(1, 5, "/e"), "running"), (gone(0, -9, 1), "starting", AGAIN_2.format(" from /e"), "step 5 is saved in /e")]),
    ("they fail again before it is written: it is in memory as before", AT_ONCE, [
        *FROM_MEMORY, (gone(0, -9, 1), "starting", AGAIN_2.format(" from /d"), "step 5 is in memory, and is being saved in /d")]),
    ("no folder can take it: it stays in memory", AT_ONCE, [
        *FROM_MEMORY, (ev.CheckpointWritten(1, 5, "/d", "no space left"), "running"), (gone(0, -9, 1), "starting", AGAIN_2.format(" from /d"), "step 5 is in memory only (no space left)")]),
    ("a newer copy is on its way, too: the older one counts if that is lost", AT_ONCE, [
        *FROM_MEMORY, (reg(0, 5, 1), "running"), (copied(8, attempt=1), "running"),
        (at(0, 9, 1), "committing", f"commit 8 by 0 from a copy early; {COMMITS}", "step 8 is the newest copy"),
        (ev.DumpCommitted(2, "/e", is_early=True), "starting", f"forget; {AGAIN_2.format(' from /e')}", "step 8 is in memory"),
        (ev.CheckpointWritten(1, 5, "/d"), "starting"), (ev.CheckpointWritten(2, 8, "/e", "read-only"), "starting"), (up(0, 2), "running"),
        (gone(0, -9, 2), "failed", "sweep; finish failed 1", "step 8 is in memory only (read-only)")]),
    ("what was lost counts for nothing once there is a newer one", AT_ONCE, [
        *FROM_MEMORY, (ev.CheckpointFound(1, "/new", 6), "running"), (ev.CheckpointWritten(1, 5, "/d", "no space left"), "running"),
        (gone(0, -9, 1), "starting", AGAIN_2.format(" from /new"), "step 6 is saved in /new")]),
    ("a stop is asked for meanwhile: nothing follows", AT_ONCE, [*FROM_MEMORY[:-1], (ask(SIGTERM), "stopping", f"cancel; {STOP}")]),
    ("the state cannot be held in memory", AT_ONCE, [
        *FROM_MEMORY[:-2], (unsaved(1, place=False), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5 (no space left)")]),
    ("no restart follows: it is written first", asked(1, max_restarts=0, restarts_from_memory=True), [
        *after(1), (at(0, 7), "committing", written(), LOST), (saved(1), "failed", "forget; sweep; finish failed 1", "step 5 is saved in /d")]),
    ("a stop was asked for before: it is written first", AT_ONCE, [*after(1), HELD, (at(0, 7), "committing", written(), "step 7 is not saved")]),
    # --- a node is lost, and what its ranks had copied
    ("what is left of it is no copy: a restart from the beginning", NODES, [
        *NODE_LOST, (at(0, 7), "starting", f"abandon; {AGAIN}", f"step 7 is not saved: no rank holds it whole: ranks 0, 1 ended{NO_COPY}")]),
    ("a rank of another node saves the step as ever", NODES, [*NODE_LOST, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7")]),
    ("no rank can be asked when it is lost", NODES, [
        *after(2), (cut(0), "running"), (lost(1, 7), "stopping", f"TERM 0; {STOP}", "rank 1 is lost"), (gone(0, -15), "starting", AGAIN, f"rank 0 let go of its state; rank 1 ended{NO_COPY}")]),
    ("the next copy counts", NODES, [
        *NODE_LOST, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7"), (copied(7), "dumping"), (at(0, 7), "committing", instead(7), "step 7 is the newest copy")]),
    ("it is lost while the copy is written: what was under way fails, and that is the end of it", NODES, [
        *BOTH, (lost(1), "committing"), (unsaved(place=False), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5 (")]),
    # --- all are lost at once
    ("all are killed: the newest copy is saved, and a restart from it", TWO, [*BOTH, (saved(), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d, from a copy in memory (step 7 is not saved")]),
    ("the last one hangs", THREE, [*after(3), died(3), (froze(0, 7, TORN), "freezing"), (hangs(1), "committing", f"KILL 1; {instead()}", "no rank holds it whole")]),
    ("the last one dies while it writes", TWO, [*WRITING, (gone(0, -9), "committing", instead(), "step 7 is not saved: rank 0 was killed by SIGKILL; step 5 is the newest")]),
    ("the last one lets go while it writes", TWO, [*WRITING, (cut(0), "committing", instead(), "step 7 is not saved: rank 0 let go of its state")]),
    ("the last one cannot write", TWO, [*WRITING, (unable(0), "committing", instead(), "step 7 is not saved: rank 0 failed (out of memory)"), (saved(), "stopping", f"forget; TERM 0; {STOP}", "from a copy")]),
    ("the last one is stuck", TWO, [*WRITING, (late("dumping"), "committing", instead(), "rank 0 made no progress in 20 s")]),
    ("the last one says two things", THREE, [
        *WRITING_3, (holds(1), "dumping", PROGRESS), (unable(0), "dumping", f"save 7 by 1; {PROGRESS}", "rank 1"), (wrote(1, "b", 1), "committing", instead(), "rank 1 said two different things")]),
    ("those that were right are dead", SIX, [*WRITING_6, (holds(4, "c"), "committing", instead(), "those that held the majority's state are gone")]),
    ("no folder takes what the ranks hold, and perhaps one takes the copy", TWO, [
        *WRITING, (full(0), "dumping", f"save 7 by 0 place 1; {PROGRESS}", "no space"), (full(0, 1), "committing", instead(), "step 7 is not saved: no space left; no space left")]),
    ("what a dead rank has drawn is not known", TWO, UNKNOWN),
    ("and the copy does not help either", TWO, [*UNKNOWN, (unknown(2, "bad"), "stopping", f"forget; abandon; TERM 0; {STOP}", "nor is the copy of step 5 (bad)")]),
    # --- parts
    ("a rank that no other one can replace takes its part with it", THREE, [
        *OWN, (at(1, 7), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"), (froze(0, 7), "freezing"), (froze(2, 7), "committing", instead(5, "0/1/2"), "no other rank holds what rank 2 has"),
        (saved(), "stopping", f"forget; TERM 0,2; {STOP}", "step 5 is saved in /d, from a copy")]),
    ("so does the last of a replica group", groups.MEMORY_TOO._replace(dump=ONE.dump), [
        *PARTS, groups.DIED, (gone(3, -9), "freezing"), (froze(0, 7), "freezing"), (froze(2, 7), "committing", instead(5, "0/3"), groups.ALL_OF_THE_OTHERS)]),
    ("a copy without all parts is none", THREE, [
        *same.EQUAL, (copied(1), "running"), *((same.says(rank, 2, {"model.w": f"{rank}"}), "running") for rank in range(3)),
        (at(1, 7), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"), (froze(0, 7), "freezing"), (froze(2, 7), "stopping", f"abandon; TERM 0,2; {STOP}", "no other rank holds")]),
    ("a copy of before the state grew, as long as nobody knows what that has in common", THREE, [
        *same.EQUAL, (copied(3), "running"), GROWS, (at(1, 7), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"), (froze(0, 7), "freezing"), (froze(2, 7), "committing", instead(3), "what was added to the state by step 4")]),
    ("none of later", THREE, [
        *same.EQUAL, (copied(4), "running"), GROWS, (at(1, 7), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"), (froze(0, 7), "freezing"), (froze(2, 7), "stopping", f"abandon; TERM 0,2; {STOP}", "what was added to the state by step 4")]),
    # --- which copy
    ("the newest copy that was heard of, in whatever order", TWO, [*after(2), (copied(3), "running"), died(2), (copied(6), "freezing"), (copied(4), "freezing"), (gone(0, -9), "committing", instead(6), "step 6 is the newest copy")]),
    ("the newest copy although there will be no other one", ONE, [*after(1), (copied(-1, why_not="no memory is left"), "running"), (at(0, 7), "committing", written(), LOST)]),
    ("no copy that is older than the checkpoint", ONE, [
        running(1)[0], (ev.CheckpointFound(0, "/old", 7), "starting"), *running(1, 7)[1:], (copied(7), "running"), (at(0, 9), "starting", "sweep; start 1 from /old; deadline starting 600", "step 9 is not saved")]),
    ("no copy where saving after a failure is off", UNSAVED, [*after(1), (at(0, 7), "starting", AGAIN, "step 7 is not saved")]),
    ("but one where a stop was asked for", UNSAVED, [*after(1), HELD, (at(0, 7), "committing", written(), LOST), (saved(), "stopped", "forget; sweep; finish stopped 143", "step 5 is saved in /d, from a copy")]),
    ("no copy of an earlier attempt", TWO, [*RESTARTED, (reg(1, 0, 1), "running"), (gone(0, -9, 1), "freezing", f"freeze 3: 1; {FREEZE_S}", "SIGKILL"), (gone(1, -9, 1), "failed", "abandon; sweep; finish failed 1", "no rank holds it whole")]),
    ("a copy that was taken before a replacement, after it", same.THREE, [*CONFIRMED, *GONE, (gone(2, -9, 1), "committing", instead(4), "step 4 is the newest copy")]),
    ("and while the replacement is on trial", same.THREE, [*ROUND, *GONE, (gone(2, -9, 1), "committing", instead(4), "step 4 is the newest copy")]),
    # --- a graceful exit
    ("a graceful exit, and the only rank dies", ONE, [*after(1), HELD, (at(0, 7), "committing", written(), LOST), (saved(), "stopped", "forget; sweep; finish stopped 143", "not gracefully: rank 0 was killed by SIGKILL; step 5 is saved in /d")]),
    ("a graceful exit, and it lets go", ONE, [*after(1), HELD, (cut(0), "committing", written(), "rank 0 let go of its state"), (saved(), "stopping", f"forget; TERM 0; {STOP}", "step 5 is saved")]),
    ("a graceful exit, and the part of a rank that is done is missing", THREE, [
        *OWN, (ask(SIGTERM), "holding", "hold 1: 0,1,2; deadline holding 20", "graceful exit"), (stands(0, 8), "holding"), (stands(1, 8), "holding"), (gone(2, 0), "holding", "proceed to 8: 0,1", "step 8"), (froze(0, 8), "holding"),
        (froze(1, 8), "committing", written(5, "0/1/2"), "no other rank holds what rank 2 has"), (saved(), "stopping", f"forget; TERM 0,1; {STOP}", "step 5 is saved")]),
    ("a graceful exit at a step that nobody can write", ONE, [
        *after(1), HELD, (stands(0, 7), "holding", "proceed to 7: 0", "step 7"), (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7"), (unable(0), "committing", instead(), "step 7 is not saved: rank 0 failed"),
        (saved(), "stopping", f"forget; leave at 7: 0; {STOP}", "step 5 is saved in /d"), (gone(0, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 5 is saved in /d, from a copy")]),
    # --- its commit
    ("a full folder: the copy goes to the other one", TWO, [*FULL, (saved(), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d, from a copy")]),
    ("two full folders: the job goes on without it, as if there were no copies", TWO, RESTARTED),
    ("two full folders, and no restart is left", SPENT, [*FULL, (unsaved(why="read-only"), "failed", "forget; abandon; sweep; finish failed 1", NOR)]),
    ("one folder", asked(2, places=1), [*BOTH, (unsaved(), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5 (no space left)")]),
    ("a bug", TWO, [*BOTH, (unsaved(why="bad", place=False), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5 (bad)")]),
    ("it is stuck: that is the end of it", TWO, [*BOTH, (late("committing"), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5 (its commit made no progress in 20 s)")]),
    ("what completes late counts nevertheless", TWO, [
        *WRITING, (unable(0), "committing", instead(), "rank 0"), (late("committing"), "stopping", f"forget; abandon; TERM 0; {STOP}", "its commit made no progress"), (saved(), "stopping"), (gone(0, -15), "starting", AGAIN_FROM, "step 5 is saved in /d")]),
    ("but not as the copy what was given up before", TWO, [*BOTH, (saved(1, "/c"), "committing"), (unsaved(1), "committing"), (wrote(0), "committing"), (saved(), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d")]),
    ("one stop while it is written: no restart follows", TWO, [*BOTH, (ask(SIGTERM), "committing"), (saved(), "stopped", "forget; sweep; finish stopped 143", "step 5 is saved in /d, from a copy")]),
    ("the second one means now", TWO, [*BOTH, (ask(SIGINT), "committing"), (ask(SIGINT), "stopped", "forget; abandon; sweep; finish stopped 130", "nor is the copy of step 5 (msrun received SIGINT again)")]),
    ("the second one means now, also to a rank that hangs", ONE, [
        *after(1), HUNG, (late("freezing"), "committing", instead(), "did not answer"), (ask(SIGINT), "committing"), (ask(SIGINT), "killing", "forget; abandon; KILL 0; deadline killing 10", "again")]),
]  # fmt: skip
