"""Histories of ranks whose memory outlives them: it is read once none lives that could save as new a step.

Rows as in `replacements.py`.
"""

from signal import SIGINT, SIGTERM

from agent.controller import events as ev
from agent.spec.job_spec import CopyMode
from support.histories import copies, groups, same
from support.histories.copies import AGAIN, AGAIN_FROM, COMMITS, FREEZE_S, asked, copied, saved
from support.histories.dumps import froze, running, unable
from support.histories.plain import ask, gone, late, up
from support.histories.replacements import PROGRESS, STOP, hangs
from worker_hooks.contract import protocol


def live(count, **changes):
    """Rules of a job whose ranks' memory is kept, and that is restarted once."""
    return asked(count, **{"copies": CopyMode.LIVE, **changes})


ONE, TWO, THREE = live(1), live(2), live(3)
AUTO = live(2, copies=CopyMode.AUTO)
UNSAVED = live(2, after_failure=False)


def keeps(rank, step=0, attempt=0):
    """A rank registers, and has a keeper."""
    return protocol.Registered(rank, attempt, step, keeper=100 + rank, board=1)


def notes(rank, cost_s=0.0003, why_not="", attempt=0):
    """A rank says what notes cost it, in steps of 0.1 s."""
    return protocol.NotesMeasured(rank, attempt, cost_s, 0.1, why_not)


def training(count, has=range(9)):
    """So many ranks train, and those in `has` have keepers."""
    begun = running(count)[: count + 1]
    said = (
        keeps(rank) if rank in has else protocol.Registered(rank, 0, 0) for rank in range(count)
    )
    return [*begun, *((each, "running") for each in said)]


def killed(rank, *steps, at=None, attempt=0):
    """A rank is killed whose memory holds these steps; its page may show a newer commit."""
    step = at if at is not None else (steps or (None,))[0]
    return ev.WorkerExited(rank, attempt, -9, step, kept=steps)


def read(step=7, by="0"):
    return f"commit {step} by {by} kept; {COMMITS}"


def instead(step=7, by="0"):
    return f"abandon; {read(step, by)}"


def unread(dump=2, why="that of rank 0 is gone"):
    return ev.CommitFailed(dump, why, is_place=False, is_state=True)


SILENT = late("freezing"), "stopping", f"abandon; KILL 0; {STOP}", "did not answer"
HANGS = hangs(0), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 0 made no progress"
FIRST = killed(1, 7, 6), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 1 was killed"
BOTH = [*training(2), FIRST, (killed(0, 7, 6), "committing", instead(), "step 7 is the newest in")]
BEFORE = unread(), "committing", f"abandon; {read(6)}", "step 6 is the newest in the memory of"
KILLS = "KILL {}; " + STOP
KEEPERS = [(keeps(rank), "running") for rank in range(4)]
OWN = [
    *same.OWN,
    *KEEPERS[:3],
    (killed(1, 7, 6), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"),
    (froze(0, 7), "freezing"),
]
NOW_ALL = [
    *OWN,
    (froze(2, 7), "stopping", f"abandon; {KILLS.format('0,2')}", "no other rank holds"),
    (killed(0, 7, 6), "stopping"),
]

HISTORIES = [
    ("all are killed at once: what one has left is saved, and a restart from it", TWO, [
        *BOTH, (ev.DumpProgressed(2), "committing", COMMITS), (saved(), "starting", f"forget; {AGAIN_FROM}", "step 7 is saved in /d, from the memory of killed ranks"),
        (up(0, 1), "starting"), (up(1, 1), "running")]),
    ("the only rank", ONE, [*training(1), (killed(0, 7, 6), "committing", read(), "no rank can be asked"), (saved(1), "starting", f"forget; {AGAIN_FROM}", "step 7 is saved")]),
    ("the newest of what they have left, by whoever has it", TWO, [*training(2), FIRST, (killed(0, 6, 5), "committing", instead(7, "1"), "step 7 is the newest in")]),
    ("one that was killed amid a commit has the one before", ONE, [
        *training(1), (killed(0, 6, at=7), "committing", read(6), "step 6 is the newest in"), (saved(1), "starting", f"forget; {AGAIN_FROM}", "from the memory of killed ranks (step 7 is not saved")]),
    ("a rank that lives saves the step as ever", TWO, [*training(2), FIRST, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7")]),
    ("it dies while it writes", TWO, [*training(2), FIRST, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7"), (killed(0, 7), "committing", instead(), "step 7 is not saved: rank 0 was killed")]),
    ("it cannot write: it is killed, and what it leaves is read", TWO, [
        *training(2), FIRST, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7"), (unable(0), "stopping", f"abandon; {KILLS.format('0')}", "out of memory"), (killed(0, 7), "committing", read(), "step 7 is the newest in")]),
    ("a copy that is as new was compared already", TWO, [*training(2), (copied(7), "running"), FIRST, (killed(0, 7, 6), "committing", copies.instead(7), "step 7 is the newest copy")]),
    ("an older copy is none", TWO, [*training(2), (copied(5), "running"), FIRST, (killed(0, 7, 6), "committing", instead(), "step 7 is the newest in")]),
    ("it cannot be read: the older copy is saved", TWO, [
        *training(2), (copied(5), "running"), (killed(1, 7), *FIRST[1:]), (killed(0, 7), "committing", instead(), "step 7 is the newest in"),
        (unread(), "committing", copies.instead(5), "that of rank 0 is gone"), (saved(3), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d, from a copy")]),
    ("it cannot be read, and there is no copy", TWO, [*BOTH, BEFORE, (unread(3), "starting", f"forget; abandon; {AGAIN}", "step 7 is not saved")]),
    ("it cannot be read: the step before", TWO, [*BOTH, BEFORE, (saved(3), "starting", f"forget; {AGAIN_FROM}", "step 6 is saved in /d, from the memory of killed ranks (step 7 is not saved")]),
    ("neither can be read: the copy", TWO, [
        *training(2), (copied(5), "running"), FIRST, BOTH[-1], BEFORE, (unread(3), "committing", copies.instead(5), "step 5 is the newest copy"), (saved(4), "starting", f"forget; {AGAIN_FROM}", "step 5 is saved in /d, from a copy")]),
    ("the step before is that of the copy", TWO, [*training(2), (copied(6), "running"), FIRST, BOTH[-1], (unread(), "committing", copies.instead(6), "step 6 is the newest copy")]),
    ("the step before is not that of all parts", THREE, [*NOW_ALL, (killed(2, 7, 5), "committing", read(7, "0/1/2"), "step 7"), (unread(), "starting", f"forget; abandon; {AGAIN}", "step 7 is not saved")]),
    ("to write it fails for what it is: it was read, and is not read again", TWO, [*BOTH, (ev.CommitFailed(2, "no manifest", is_place=False), "starting", f"forget; abandon; {AGAIN}", "no manifest")]),
    ("it cannot be read, and the copy cannot be written", TWO, [
        *training(2), (copied(5), "running"), (killed(1, 7), *FIRST[1:]), (killed(0, 7), "committing", instead(), ""), (unread(), "committing", copies.instead(5), ""), (unread(3), "starting", f"forget; abandon; {AGAIN}", "nor is the copy of step 5")]),
    ("a full folder: it goes to the other one", TWO, [*BOTH, (copies.unsaved(), "committing", f"commit 7 by 0 place 1 kept; {COMMITS}", "no space left"), (saved(), "starting", f"forget; {AGAIN_FROM}", "step 7 is saved")]),
    ("reading is stuck: that is the end of it", TWO, [*BOTH, (late("committing"), "starting", f"forget; abandon; {AGAIN}", "made no progress in 20 s")]),
    ("no rank has left a whole step", TWO, [*training(2), (killed(1, at=7), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 1"), (killed(0, at=7), "starting", f"abandon; {AGAIN}", "step 7 is not saved")]),
    ("the step is saved already", ONE, [running(1)[0], (ev.CheckpointFound(0, "/old", 7), "starting"), (up(0), "running"), (keeps(0, 7), "running"),
        (killed(0, 7), "starting", "sweep; start 1 from /old; deadline starting 600", "killed")]),
    ("saving after a failure is off", UNSAVED, [*training(2), (killed(1, 7), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 1"), (killed(0, 7), "starting", f"abandon; {AGAIN}", "step 7 is not saved")]),
    # --- parts that no other rank holds
    ("the others hold parts that nobody can complete: they are killed, and all is read", THREE, [
        *NOW_ALL, (killed(2, 7, 6), "committing", read(7, "0/1/2"), "step 7 is the newest in"), (saved(), "starting", f"forget; {AGAIN_FROM}", "step 7 is saved in /d, from the memory of killed ranks")]),
    ("one does not die at once", THREE, [*NOW_ALL, (late("stopping"), "killing", "KILL 2; deadline killing 10", "still alive"), (killed(2, 7), "committing", read(7, "0/1/2"), "step 7 is the newest in")]),
    ("the older copy is saved then, if there is no such step", THREE, [
        *OWN[:-2], (copied(3, (0,), (1,), (2,)), "running"), *OWN[-2:], (froze(2, 7), "stopping", f"abandon; {KILLS.format('0,2')}", "no other rank holds"), (killed(0, 7), "stopping"),
        (killed(2), "committing", copies.written(3, "0/1/2"), "step 3 is the newest copy")]),
    ("they have a step in common", THREE, [*NOW_ALL, (killed(2, 6), "committing", read(6, "0/1/2"), "step 6 is the newest in")]),
    ("they have none: the copy", THREE, [*NOW_ALL, (killed(2, 5), "starting", AGAIN, "step 7 is not saved")]),
    ("one of them was killed before, for another reason", THREE, [*OWN, (killed(2, 7, 6), "stopping", f"abandon; {KILLS.format('0')}", "no other rank holds"), (killed(0, 7), "committing", read(7, "0/1/2"), "step 7 is the newest in")]),
    ("one of them has no keeper: all are asked to exit", THREE, [
        *same.OWN, *KEEPERS[:2], OWN[-2], OWN[-1], (froze(2, 7), "stopping", f"abandon; TERM 0,2; {STOP}", "no other rank holds"), (killed(0, 7), "stopping"), (gone(2, -15), "starting", AGAIN, "step 7 is not saved")]),
    ("a replica group whose last rank dies", groups.MEMORY_TOO._replace(dump=ONE.dump), [
        *groups.TRAINING, *KEEPERS, (killed(1, 5), "freezing", "freeze 1: 0,2,3; deadline freezing 15", "rank 1"), (killed(3, 5), "freezing"), (froze(0), "freezing"),
        (froze(2), "stopping", f"abandon; {KILLS.format('0,2')}", groups.ALL_OF_THE_OTHERS), (killed(0, 5), "stopping"), (killed(2, 5), "committing", read(5, "0/1"), "step 5 is the newest in")]),
    # --- ranks that do not answer
    ("the only rank hangs: it is killed, and what it leaves is read", ONE, [
        *training(1), HANGS, SILENT, (killed(0, 7, 6), "committing", read(), "step 7 is the newest in"), (saved(), "starting", f"forget; {AGAIN_FROM}", "step 7 is saved in /d, from the memory of killed ranks")]),
    ("it has left nothing whole", ONE, [*training(1), HANGS, SILENT, (killed(0, at=7), "starting", AGAIN, "no step is saved")]),
    ("it was resumed, and nobody knows how far it came since", ONE, [running(1)[0], (ev.CheckpointFound(0, "/old", 7), "starting"), (up(0), "running"), (keeps(0, 7), "running"), HANGS, SILENT, (killed(0, 9, 8), "committing", read(9), "step 9 is the newest in")]),
    ("it came no further", ONE, [running(1)[0], (ev.CheckpointFound(0, "/old", 7), "starting"), (up(0), "running"), (keeps(0, 7), "running"), HANGS, SILENT, (killed(0, 7, 6), "starting", "sweep; start 1 from /old; deadline starting 600", "made no progress")]),
    ("it answers: it saves its step itself", ONE, [*training(1), HANGS, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7")]),
    ("it cannot save it, and says so: it is asked to exit", ONE, [*training(1), HANGS, (froze(0, 7, "torn"), "stopping", f"abandon; TERM 0; {STOP}", "torn")]),
    ("it is stuck while it writes", ONE, [
        *training(1), HANGS, (froze(0, 7), "dumping", f"save 7 by 0; {PROGRESS}", "step 7"), (late("dumping"), "stopping", f"abandon; KILL 0; {STOP}", "made no progress"), (killed(0, 7, 6), "committing", read(), "step 7 is the newest in")]),
    ("it has no keeper: it is asked to exit", ONE, [*training(1, ()), HANGS, (late("freezing"), "stopping", f"abandon; TERM 0; {STOP}", "did not answer")]),
    ("all stand still: one is killed for it, the other as it does not answer", TWO, [
        *training(2), (hangs(1), "freezing", f"KILL 1; freeze 1: 0; {FREEZE_S}", "rank 1 made no progress"), (killed(1, 7, 6), "freezing"), SILENT, (killed(0, 7, 6), "committing", read(), "step 7 is the newest in")]),
    ("the others answer before one that hangs is gone", THREE, [
        *same.OWN, *KEEPERS[:3], (hangs(1), "freezing", f"KILL 1; freeze 1: 0,2; {FREEZE_S}", "rank 1 made no progress"), (froze(0, 7), "freezing"),
        (froze(2, 7), "stopping", f"abandon; {KILLS.format('0,1,2')}", "no other rank holds"), (killed(1, 7, 6), "stopping"), (killed(2, 7), "stopping"), (killed(0, 7), "committing", read(7, "0/1/2"), "step 7 is the newest in")]),
    ("a part is gone: to read the others would help nobody", THREE, [
        *same.OWN, *KEEPERS[:3], (killed(1, at=7), "freezing", f"freeze 1: 0,2; {FREEZE_S}", "rank 1"), (late("freezing"), "stopping", f"abandon; TERM 0,2; {STOP}", "did not answer")]),
    # --- who asks the job to stop
    ("one stop while it is read: no restart follows", TWO, [*BOTH, (ask(SIGTERM), "committing"), (saved(), "stopped", "forget; sweep; finish stopped 143", "step 7 is saved in /d")]),
    ("the second one means now", TWO, [*BOTH, (ask(SIGINT), "committing"), (ask(SIGINT), "stopped", "forget; abandon; sweep; finish stopped 130", "again")]),
    ("nor is anything read after two", THREE, [*NOW_ALL, (ask(SIGINT), "stopping"), (ask(SIGINT), "killing", "KILL 2; deadline killing 10", "again"), (killed(2, 7), "stopped", "sweep; finish stopped 130", "step 7 is not saved")]),
    # --- nobody has asked for it: as long as it is cheap, for all ranks
    ("cheap notes go on, and are read", AUTO, [*training(2), (notes(0), "running"), (notes(1), "running"), FIRST, (killed(0, 7, 6), "committing", instead(), "step 7 is the newest in")]),
    ("what they cost is not known yet, and they are read", AUTO, [*training(2), (notes(0, 0.01), "running"), FIRST, (killed(0, 7, 6), "committing", instead(), "step 7 is the newest in")]),
    ("they are too dear for one of them: both note no more", AUTO, [
        *training(2), (notes(0), "running"), (notes(1, 0.002), "running", "end notes 0,1", "takes 2.00% of a step"), (notes(0), "running", "end notes 0", ""), (gone(1, -9), "freezing", f"freeze 1: 0; {FREEZE_S}", "rank 1")]),
    ("they become so", AUTO, [*training(2), (notes(0), "running"), (notes(1), "running"), (notes(0, 0.0008), "running", "end notes 0,1", "0.80%")]),
    ("one of them cannot note: neither is to", AUTO, [*training(2), (notes(1, why_not="in another order"), "running", "end notes 0,1", "in another order")]),
    ("one of them has no keeper: nor need the other one", AUTO, [
        *training(2, ()), (keeps(0), "running"), (protocol.Registered(1, 0, 0, not_kept_why="it may use an accelerator"), "running"), (notes(0), "running", "end notes 0,1", "may use an accelerator")]),
    ("while a death is under way they go on, whatever they cost", AUTO, [
        *training(2), (notes(0), "running"), FIRST, (notes(0, 0.01), "freezing"), (killed(0, 7, 6), "committing", instead(), "step 7 is the newest in")]),
    ("who asks for it has them, whatever they cost", TWO, [*training(2), (notes(0, 0.01), "running"), (notes(1, 0.01), "running")]),
    # --- what counts for nothing
    ("what an earlier attempt has left", TWO, [*BOTH, (saved(), "starting", f"forget; {AGAIN_FROM}", "step 7"), (up(0, 1), "starting"), (up(1, 1), "running"), (keeps(0, 7, 1), "running"), (keeps(1, 7, 1), "running"),
        (gone(0, -9, 1), "freezing", f"freeze 3: 1; {FREEZE_S}", ""), (killed(1, 7, attempt=1, at=9), "failed", "abandon; sweep; finish failed 1", "no rank holds it whole")]),
]  # fmt: skip
