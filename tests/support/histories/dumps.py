"""Histories of failures whose state is saved: freeze, choose, write, compare, commit; and of crash loops.

Rows as in `plain.py`: a step is an event, the state after it, the actions in short and words that
every reason given in that step must contain.
"""

from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

from agent.controller import events as ev
from support.histories.plain import (
    STARTED_2,
    STARTED_3,
    ask,
    gone,
    late,
    launch,
    rules,
    tell,
    up,
)
from worker_hooks.contract import protocol

TWO, THREE = rules(), rules(ranks=(0, 1, 2))
FOUR, FIVE, SIX = (rules(ranks=tuple(range(count))) for count in (4, 5, 6))
ONE_PLACE = rules(ranks=(0, 1, 2), places=1)
SPLIT = rules(ranks=(0, 1, 2, 3), split=True)
TWICE = rules(ranks=(0, 1, 2), max_restarts=2)
PROGRESS = "deadline dumping 20"
STOP_02 = "TERM 0,2; deadline stopping 30"


def reg(rank, step=0, attempt=0):
    return protocol.Registered(rank, attempt, step)


def threw(rank, error="ValueError: bad", attempt=0):
    return protocol.Raised(rank, attempt, error)


def cut(rank, attempt=0):
    return ev.RankUnreachable(rank, attempt)


def froze(rank, step=5, why=None, dump=1, nbytes=0, limit=0):
    about = protocol.Frozen(rank, 0, dump, step, is_whole=why is None, why=why or "", limit=limit)
    return about._replace(nbytes=nbytes)


def wrote(rank, digest="a", number=0, dump=1):
    return protocol.Written(rank, 0, dump, "", 0, "", digest, number)


def holds(rank, digest="a", dump=1, number=0):
    return protocol.Digested(rank, 0, dump, digest, number)


def unable(rank, why="out of memory", number=0, place=False):
    return protocol.SaveFailed(rank, 0, 1, why, place, number)


def full(rank, number=0):
    return unable(rank, "no space left", number, place=True)


def moved(rank, dump=1):
    return protocol.Progress(rank, 0, dump, 1)


def done(path="/d", dump=1):
    return ev.DumpCommitted(dump, path)


def undone(why="no space left", place=True):
    return ev.CommitFailed(1, why, place)


def running(count, step=0):
    """`count` ranks train."""
    ups = [(up(rank), "starting") for rank in range(count - 1)]
    regs = [(reg(rank, step), "running") for rank in range(count)]
    return [
        (launch(), "starting", "start 0; deadline starting 600", "begins"),
        *ups,
        (up(count - 1), "running"),
        *regs,
    ]


def dumping(count, first="0", others=None):
    """Rank 1 of `count` died, the others are whole at step 5; rank 0 answered first."""
    left = [rank for rank in range(count) if rank != 1]
    others = ",".join(map(str, left[1:])) if others is None else others
    order = f"save 5 by {first}" + (f" digest {others}" if others else "")
    return [
        *running(count),
        (
            gone(1, -9),
            "freezing",
            f"freeze 1: {','.join(map(str, left))}; deadline freezing 15",
            "rank 1 was killed by SIGKILL",
        ),
        *((froze(rank), "freezing") for rank in left[:-1]),
        (froze(left[-1]), "dumping", f"{order}; {PROGRESS}", "step 5 is the newest"),
    ]


FREEZING = dumping(3)[:-2]
DUMPING = dumping(3)
WRITTEN = [*DUMPING, (wrote(0), "dumping", PROGRESS)]
COMMITTING = [
    *WRITTEN,
    (
        holds(2),
        "committing",
        "commit 5 by 0; deadline committing 20",
        "step 5 is written by rank 0",
    ),
]
SAVED = [
    *COMMITTING,
    (done(), "stopping", STOP_02, "rank 1 was killed by SIGKILL; step 5 is saved in /d"),
]
ONLY_COMMITTING = [*COMMITTING, (gone(0, -9), "committing"), (gone(2, -9), "committing")]
ONE_LEFT = [*running(2), (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "SIGKILL")]
ONE_DUMPING = [*ONE_LEFT, (froze(0), "dumping", f"save 5 by 0; {PROGRESS}", "step 5")]
FROZEN_2 = [
    *running(4),
    (gone(1, -9), "freezing", "freeze 1: 0,2,3; deadline freezing 15", "SIGKILL"),
    (froze(0, 4), "freezing"),
    (froze(3, 5), "freezing"),
]
LET_ON = "freeze 1: 0 to 5; deadline freezing 15"
BEHIND = [*FROZEN_2, (froze(2, 5), "freezing", LET_ON, "other ranks hold step 5, so rank 0 may")]
AGAIN = "sweep; start 1; deadline starting 600"
AGAIN_FROM = "sweep; start 1 from /d; deadline starting 600"

# what follows when nobody is alive: rules, a request before, the state, the actions
FATES = [
    ("there is budget", {"max_restarts": 1}, [], "starting", AGAIN),
    ("there is none", {}, [], "failed", "sweep; finish failed 1"),
    ("no attempt helps", {"max_restarts": 1, "stalls": 0}, [], "failed", "sweep; finish failed 1"),
    ("a stop was asked for", {"max_restarts": 1}, [SIGTERM], "stopped", "sweep; finish stopped 143"),
]  # fmt: skip


def asked_for(signals, state):
    return [(ask(signum), state) for signum in signals]


HISTORIES = [
    # --- the plain way
    ("a rank dies, the others save, the job fails with the path", THREE, [
        *SAVED, (gone(0, -15), "stopping"), (gone(2, -15), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGKILL; step 5 is saved in /d")]),
    ("a rank dies, the others save, the job goes on from there", rules(ranks=(0, 1, 2), max_restarts=1), [
        *SAVED, (gone(0, -15), "stopping"), (gone(2, -15), "starting", AGAIN_FROM, "restart 1 of 1: rank 1 was killed by SIGKILL; step 5 is saved in /d")]),
    ("without hooks nothing is frozen", THREE, [*STARTED_3, (gone(1, -9), "stopping", STOP_02, "rank 1 was killed by SIGKILL")]),
    ("ranks without hooks are not asked, but stopped", THREE, [
        *STARTED_3, (reg(2), "running"), (gone(1, -9), "freezing", "freeze 1: 2; deadline freezing 15", "SIGKILL"),
        (froze(2), "dumping", f"save 5 by 2; {PROGRESS}", "step 5"), (wrote(2), "committing", "commit 5 by 2; deadline committing 20", "by rank 2"),
        (done(), "stopping", STOP_02, "step 5 is saved in /d")]),
    ("the quickest writes, the newest step wins", FOUR, [
        *running(4), (gone(1, -9), "freezing", "freeze 1: 0,2,3; deadline freezing 15", "SIGKILL"), (froze(0, 4, limit=5), "freezing"), (froze(3, 5), "freezing"),
        (froze(2, 5), "dumping", f"save 5 by 3 digest 2; {PROGRESS}", "step 5 is the newest")]),
    # --- those that froze before they could know of the newest step
    ("who was held too early may reach the step of the others", FOUR, [
        *BEHIND, (froze(0, 4), "freezing"), (froze(0, 5, limit=5), "dumping", f"save 5 by 0 digest 3,2; {PROGRESS}", "step 5 is the newest")]),
    ("nobody is let go on twice", FOUR, [
        *BEHIND, (froze(0, 4, limit=6), "dumping", f"save 5 by 3 digest 2; {PROGRESS}", "step 5"), (froze(0, 5, limit=6), "dumping")]),
    ("who came further than it had to is behind nobody", FOUR, [
        *BEHIND, (froze(0, 6, limit=6), "dumping", f"save 6 by 0; {PROGRESS}", "step 6 is the newest")]),
    ("on its way it is torn: its first answer does not count", FOUR, [
        *BEHIND, (froze(0, 5, "torn", limit=5), "dumping", f"save 5 by 3 digest 2; {PROGRESS}", "step 5"), (unable(3), "dumping", f"save 5 by 2; {PROGRESS}", "rank 3 failed"),
        (unable(2, number=1), "stopping", "abandon; TERM 0,2,3; deadline stopping 30", "ranks 3, 2 failed")]),
    *((f"who {what} on its way is not awaited", FOUR, [
        *BEHIND, (event, "dumping", f"save 5 by 3 digest 2; {PROGRESS}", "step 5")])
      for what, event in (("dies", gone(0, -9)), ("lets go", cut(0)), ("is silent", late("freezing")))),
    ("the only one at that step dies: the others are frozen as they were", THREE, [
        *FREEZING, (froze(0, 4), "freezing"), (froze(2, 5), "freezing", "freeze 1: 0 to 5; deadline freezing 15", "rank 0 may reach it"),
        (gone(2, -9), "freezing"), (late("freezing"), "dumping", f"save 4 by 0; {PROGRESS}", "step 4")]),
    ("who has raised cannot go on", FOUR, [
        *FROZEN_2, (threw(0), "freezing"), (froze(2, 5), "dumping", f"save 5 by 3 digest 2; {PROGRESS}", "step 5")]),
    ("one that does not answer leaves no time for that", FOUR, [
        *FROZEN_2, (late("freezing"), "dumping", f"save 5 by 3; {PROGRESS}", "step 5")]),
    ("nobody is left to be asked", THREE, [
        *STARTED_3, (reg(0, 3), "running"), (cut(0), "running"), (gone(1, -9), "stopping", STOP_02, "rank 1 was killed by SIGKILL"),
        (gone(0, -15), "stopping"), (gone(2, -15), "failed", "sweep; finish failed 1", "step 3 is not saved: no rank can be asked: rank 0 let go of its state; rank 1 ended; rank 2 registered no state")]),
    ("a rank lets go and registers once more", TWO, [*running(2), (cut(0), "running"), (reg(0, 3), "running"), (gone(1, 1), "freezing", "freeze 1: 0; deadline freezing 15", "code 1")]),
    # --- exceptions
    ("a rank that raised saves, too, and leaves by itself", TWO, [
        *running(2), (threw(0), "freezing", "freeze 1: 0,1; deadline freezing 15", "rank 0 raised ValueError: bad"), (threw(1, "RuntimeError: gone"), "freezing"),
        (froze(0), "freezing"), (froze(1), "dumping", f"save 5 by 0 digest 1; {PROGRESS}", "step 5"), (threw(0), "dumping"), (wrote(0), "dumping", PROGRESS),
        (holds(1), "committing", "commit 5 by 0; deadline committing 20", "rank 0"),
        (done(), "stopping", "release 0,1; deadline stopping 30", "rank 0 raised ValueError: bad; step 5 is saved in /d"),
        (gone(1, 1), "stopping"), (gone(0, 1), "failed", "sweep; finish failed 1", "rank 0 raised ValueError: bad; step 5")]),
    ("an exception yields to the death that it follows from", THREE, [
        *running(3), (threw(0, "RuntimeError: closed"), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "rank 0 raised"), (froze(0), "freezing"),
        (gone(1, -11), "freezing"), (gone(2, -9), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"),
        (wrote(0), "committing", "commit 5 by 0; deadline committing 20", "rank 0"),
        (done(), "stopping", "release 0; deadline stopping 30", "rank 1 was killed by SIGSEGV (rank 0 raised RuntimeError: closed); step 5 is saved")]),
    ("a rank raises while the state is written and committed", THREE, [*DUMPING, (threw(2), "dumping"), *COMMITTING[len(DUMPING):], (threw(0), "committing"),
        (done(), "stopping", "release 0,2; deadline stopping 30", "rank 1 was killed by SIGKILL; step 5")]),
    ("a rank raises while others start", TWO, [
        (launch(), "starting", "start 0; deadline starting 600", "begins"), (up(0), "starting"), (reg(0), "starting"),
        (threw(0), "stopping", "release 0; cancel; deadline stopping 30", "rank 0 raised ValueError: bad")]),
    ("a rank raises that cannot be asked, nor can others", TWO, [
        *STARTED_2, (reg(0), "running"), (cut(0), "running"), (threw(0), "stopping", "TERM 1; release 0; deadline stopping 30", "rank 0 raised ValueError: bad")]),
    ("a rank raises when told to stop", TWO, [
        *STARTED_2, (ask(SIGINT), "stopping", "INT 0,1; deadline stopping 30", "SIGINT"), (threw(0, "KeyboardInterrupt"), "stopping", "release 0", "rank 0 raised KeyboardInterrupt"),
        (ask(SIGINT), "killing", "KILL 0,1; deadline killing 10", "again"), (threw(1), "killing", "release 1", "rank 1 raised")]),
    ("a rank raises before its start was announced", TWO, [
        (launch(), "starting", "start 0; deadline starting 600", "begins"), (up(0), "starting"), (reg(1), "starting"), (threw(1), "freezing", "freeze 1: 1; deadline freezing 15", "rank 1 raised")]),
    # --- freezing
    ("who does not answer is not waited for beyond the deadline", FOUR, [
        *dumping(4)[:-2], (late("freezing"), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"), (froze(2), "dumping"), (froze(3, 5), "dumping"),
        (gone(0, -9), "dumping", f"save 5 by 2; {PROGRESS}", "rank 0 was killed by SIGKILL")]),
    ("all torn: why, each", THREE, [
        *FREEZING, (froze(0, 4, "the update did not end"), "freezing"),
        (late("freezing"), "stopping", "abandon; TERM 0,2; deadline stopping 30",
         "step 4 is not saved: no rank holds it whole: rank 0 cannot save it (the update did not end); rank 1 ended; rank 2 did not answer within 15 s")]),
    ("the last answer is torn", TWO, [*ONE_LEFT, (froze(0, 4, "torn"), "stopping", "abandon; TERM 0; deadline stopping 30", "step 4 is not saved")]),
    ("the last one to answer lets go", THREE, [
        *FREEZING, (froze(0), "freezing"), (cut(2), "dumping", f"save 5 by 0; {PROGRESS}", "step 5")]),
    ("one lets go, another is awaited", THREE, [*FREEZING, (cut(0), "freezing"), (cut(2), "stopping", "abandon; TERM 0,2; deadline stopping 30", "ranks 0, 2 let go of its state; rank 1 ended")]),
    ("the last one to answer leaves", THREE, [*FREEZING, (froze(0, 4, "torn"), "freezing"), (gone(2, 0), "stopping", "abandon; TERM 0; deadline stopping 30", "rank 0 cannot save it (torn); ranks 1, 2 ended")]),
    ("nothing was committed yet", TWO, [*ONE_LEFT, (froze(0, 0), "stopping", "abandon; TERM 0; deadline stopping 30", "no step was committed yet, there is nothing to save")]),
    *((f"the last one dies while freezing; {words}", rules(**change), [*ONE_LEFT, *asked_for(signals, "freezing"), (gone(0, -9), state, f"abandon; {actions}", "")])
      for words, change, signals, state, actions in FATES),
    # --- writing
    *((f"the last one dies while writing; {words}", rules(**change), [*ONE_DUMPING, *asked_for(signals, "dumping"), (gone(0, -9), state, f"abandon; {actions}", "")])
      for words, change, signals, state, actions in FATES),
    ("a slow writer is not stuck", THREE, [*DUMPING, (moved(0), "dumping", PROGRESS), (moved(2), "dumping", PROGRESS), (moved(1), "dumping")]),
    ("a stuck writer is replaced and never asked again", THREE, [
        *DUMPING, (holds(2), "dumping", PROGRESS), (late("dumping"), "dumping", f"save 5 by 2; {PROGRESS}", "what rank 2 said to hold"),
        (wrote(0), "dumping"), (late("dumping"), "stopping", "abandon; TERM 0,2; deadline stopping 30", "ranks 0, 2 made no progress in 20 s")]),
    ("a stuck digester is dropped", THREE, [*WRITTEN, (late("dumping"), "committing", "commit 5 by 0; deadline committing 20", "rank 0")]),
    ("a digester that fails, dies or lets go is dropped", FIVE, [
        *dumping(5), (wrote(0), "dumping", PROGRESS), (unable(2), "dumping", PROGRESS), (gone(3, -9), "dumping", PROGRESS), (cut(4), "committing", "commit 5 by 0; deadline committing 20", "rank 0")]),
    ("the last digester fails", THREE, [*WRITTEN, (unable(2), "committing", "commit 5 by 0; deadline committing 20", "rank 0")]),
    ("the last digester dies", THREE, [*WRITTEN, (gone(2, -9), "committing", "commit 5 by 0; deadline committing 20", "rank 0")]),
    ("the writer is the last to answer", THREE, [*DUMPING, (holds(2), "dumping", PROGRESS), (wrote(0), "committing", "commit 5 by 0; deadline committing 20", "rank 0")]),
    ("each writer fails in its own way, another takes over", FIVE, [
        *dumping(5), (unable(0), "dumping", f"save 5 by 2; {PROGRESS}", "rank 0 failed (out of memory)"), (cut(2), "dumping", f"save 5 by 3; {PROGRESS}", "rank 2 let go"),
        (gone(3, -9), "dumping", f"save 5 by 4; {PROGRESS}", "rank 3 was killed by SIGKILL"), (wrote(4, number=3), "committing", "commit 5 by 4; deadline committing 20", "rank 4")]),
    ("no rank is left to write", TWO, [*ONE_DUMPING, (unable(0), "stopping", "abandon; TERM 0; deadline stopping 30", "step 5 is not saved: rank 0 failed (out of memory)")]),
    ("the last writer lets go", TWO, [*ONE_DUMPING, (cut(0), "stopping", "abandon; TERM 0; deadline stopping 30", "step 5 is not saved: rank 0 let go of its state")]),
    ("the last writer dies, a torn rank is alive", THREE, [
        *FREEZING, (froze(0), "freezing"), (froze(2, 5, "torn"), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"),
        (gone(0, -9), "stopping", "abandon; TERM 2; deadline stopping 30", "step 5 is not saved: rank 0 was killed by SIGKILL")]),
    ("one that answered late is the last resort", THREE, [
        *FREEZING, (froze(0), "freezing"), (late("freezing"), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"), (froze(2), "dumping"),
        (unable(0), "dumping", f"save 5 by 2; {PROGRESS}", "rank 0 failed")]),
    ("unless it is at a later step", THREE, [
        *FREEZING, (froze(0), "freezing"), (late("freezing"), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"), (froze(2, 6), "dumping"),
        (unable(0), "stopping", "abandon; TERM 0,2; deadline stopping 30", "is not saved")]),
    # --- places
    ("a full folder: the same rank writes to the fallback", THREE, [
        *DUMPING, (full(0), "dumping", f"save 5 by 0 place 1; {PROGRESS}", "no space left"), (wrote(0, number=0), "dumping"), (wrote(0, number=1), "dumping", PROGRESS),
        (holds(2), "committing", "commit 5 by 0 place 1; deadline committing 20", "rank 0")]),
    ("both folders fail", TWO, [
        *ONE_DUMPING, (full(0), "dumping", f"save 5 by 0 place 1; {PROGRESS}", "no space left"),
        (unable(0, "read-only", 1, place=True), "stopping", "abandon; TERM 0; deadline stopping 30", "step 5 is not saved: no space left; read-only")]),
    ("a folder where nothing moves: the second writer that is stuck is the last one there", FOUR, [
        *dumping(4), (late("dumping"), "dumping", f"save 5 by 2; {PROGRESS}", "rank 0 made no progress"), (late("dumping"), "dumping", f"save 5 by 3 place 1; {PROGRESS}", "nothing moves there; ranks 0, 2 made no progress in 20 s")]),
    ("there is no fallback", ONE_PLACE, [*DUMPING, (full(0), "stopping", "abandon; TERM 0,2; deadline stopping 30", "step 5 is not saved: no space left")]),
    # --- split
    ("all write a part", SPLIT, [
        *dumping(4, "0,2,3", ""), (wrote(2), "dumping", PROGRESS), (wrote(0), "dumping", PROGRESS), (wrote(3), "committing", "commit 5 by 0,2,3; deadline committing 20", "ranks 0, 2, 3")]),
    ("one fails: the others write all parts again", SPLIT, [
        *dumping(4, "0,2,3", ""), (wrote(2), "dumping", PROGRESS), (gone(3, -9), "dumping", f"save 5 by 0,2; {PROGRESS}", "rank 3 was killed"),
        (wrote(0), "dumping"), (wrote(0, number=1), "dumping", PROGRESS), (wrote(2, number=1), "committing", "commit 5 by 0,2; deadline committing 20", "ranks 0, 2")]),
    ("no room for one: all write elsewhere", SPLIT, [
        *dumping(4, "0,2,3", ""), (wrote(2), "dumping", PROGRESS), (full(3), "dumping", f"save 5 by 0,2,3 place 1; {PROGRESS}", "no space left"), (full(0), "dumping")]),
    ("one holds another state: the majority writes again", SPLIT, [
        *dumping(4, "0,2,3", ""), (wrote(0, "b"), "dumping", PROGRESS), (wrote(2), "dumping", PROGRESS), (wrote(3), "dumping", f"save 5 by 2,3; {PROGRESS}", "ranks 2, 3"),
        (wrote(2, number=1), "dumping", PROGRESS), (wrote(3, number=1), "committing", "commit 5 by 2,3 odd 0; deadline committing 20", "rank 0 held another state")]),
    # --- replicas that differ
    ("an odd digester is named", FOUR, [
        *dumping(4), (wrote(0), "dumping", PROGRESS), (holds(2, "b"), "dumping", PROGRESS), (holds(3), "committing", "commit 5 by 0 odd 2; deadline committing 20", "rank 2 held another state than the majority"),
        (done(), "stopping", "TERM 0,2,3; deadline stopping 30", "step 5 is saved in /d; rank 2 held another state than the majority")]),
    ("an odd writer is replaced", FOUR, [
        *dumping(4), (wrote(0, "b"), "dumping", PROGRESS), (holds(2), "dumping", PROGRESS), (holds(3), "dumping", f"save 5 by 2; {PROGRESS}", "what ranks 2, 3 said to hold"),
        (wrote(2, number=1), "committing", "commit 5 by 2 odd 0; deadline committing 20", "rank 0 held another state")]),
    ("no majority: each state is kept", THREE, [
        *WRITTEN, (holds(2, "b"), "dumping", f"save 5 by 2; {PROGRESS}", "what rank 2 said to hold"),
        (wrote(2, "b", 1), "committing", "commit 5 by 0/2; deadline committing 20", "the replicas differ without a majority (rank 0 against rank 2): each state is kept")]),
    ("no majority, the larger side is gone on from", FIVE, [
        *dumping(5), (wrote(0, "b"), "dumping", PROGRESS), (holds(2), "dumping", PROGRESS), (holds(3), "dumping", PROGRESS), (holds(4, "c"), "dumping", f"save 5 by 2; {PROGRESS}", "ranks 2, 3"),
        (wrote(2, number=1), "dumping", f"save 5 by 4; {PROGRESS}", "rank 4"), (unable(4, number=2), "committing", "commit 5 by 2/0; deadline committing 20", "ranks 2, 3 against rank 0 against rank 4): only what rank 2 and rank 0 wrote is kept")]),
    ("no majority, and one side died", THREE, [
        *DUMPING, (holds(2, "b"), "dumping", PROGRESS), (gone(2, -9), "dumping", PROGRESS), (wrote(0), "committing", "commit 5 by 0 odd 2; deadline committing 20", "only what rank 0 wrote is kept")]),
    ("no majority, no room for the second state: the first is not put at risk", THREE, [
        *WRITTEN, (holds(2, "b"), "dumping", f"save 5 by 2; {PROGRESS}", "rank 2"), (full(2, 1), "committing", "commit 5 by 0 odd 2; deadline committing 20", "only what rank 0 wrote")]),
    ("no majority, no commit: each state in the other folder", THREE, [
        *WRITTEN, (holds(2, "b"), "dumping", f"save 5 by 2; {PROGRESS}", "rank 2"), (wrote(2, "b", 1), "committing", "commit 5 by 0/2; deadline committing 20", "each state is kept"),
        (undone(), "dumping", f"save 5 by 2 place 1; {PROGRESS}", "no space"), (wrote(2, "b", 2), "dumping", f"save 5 by 0 place 1; {PROGRESS}", "rank 0"),
        (wrote(0, "a", 3), "committing", "commit 5 by 0/2 place 1; deadline committing 20", "each state is kept")]),
    ("no majority, complete after a restart: none follows before a newer step is saved", TWICE, [
        *WRITTEN, (holds(2, "b"), "dumping", f"save 5 by 2; {PROGRESS}", "rank 2"), (wrote(2, "b", 1), "committing", "commit 5 by 0/2; deadline committing 20", "each state is kept"),
        (late("committing"), "stopping", "abandon; TERM 0,2; deadline stopping 30", "no progress"), (gone(0, -15), "stopping"), (gone(2, -15), "starting", "sweep; start 1; deadline starting 600", "rank 1 was killed"),
        (up(0, 1), "starting"), (up(1, 1), "starting"), (up(2, 1), "running"), (done(), "running"), *((reg(rank, 0, 1), "running") for rank in range(3)),
        (gone(0, -9, 1), "freezing", "freeze 2: 1,2; deadline freezing 15", "rank 0"), (gone(1, -9, 1), "freezing"),
        (gone(2, -9, 1), "failed", "abandon; sweep; finish failed 1", "step 5 is saved in /d")]),
    ("the majority died before it wrote", SIX, [
        *dumping(6), (wrote(0, "b"), "dumping", PROGRESS), *((holds(rank), "dumping", PROGRESS) for rank in (2, 3, 4)), *((gone(rank, -9), "dumping", PROGRESS) for rank in (2, 3, 4)),
        (holds(5, "c"), "stopping", "abandon; TERM 0,5; deadline stopping 30", "step 5 is not saved: those that held the majority's state are gone")]),
    ("a rank that contradicts itself is not believed", THREE, [
        *DUMPING, (holds(2), "dumping", PROGRESS), (unable(0), "dumping", f"save 5 by 2; {PROGRESS}", "rank 2"),
        (wrote(2, "b", 1), "stopping", "abandon; TERM 0,2; deadline stopping 30", "rank 2 said two different things about one step")]),
    # --- committing
    ("the last writers may die: the files are there", THREE, [
        *ONLY_COMMITTING, (done(), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGKILL; step 5 is saved in /d")]),
    ("a slow commit is not stuck", THREE, [*COMMITTING, (moved(-1), "committing", "deadline committing 20"), (done(dump=2), "committing"), *SAVED[-1:], (done(), "stopping"), (moved(0), "stopping")]),
    ("a folder vanishes before the commit: again in the other one", THREE, [
        *COMMITTING, (undone(), "dumping", f"save 5 by 0 place 1; {PROGRESS}", "no space left"), (wrote(0, number=0), "dumping"),
        (wrote(0, number=1), "committing", "commit 5 by 0 place 1; deadline committing 20", "rank 0"), (undone("read-only"), "stopping", f"abandon; {STOP_02}", "step 5 is not saved: no space left; read-only")]),
    ("the writer died before its folder vanished: another one", THREE, [
        *COMMITTING, (gone(0, -9), "committing"), (undone(), "dumping", f"save 5 by 2 place 1; {PROGRESS}", "what ranks 0, 2 said to hold")]),
    ("a commit fails for another reason", THREE, [*COMMITTING, (undone("a bug", place=False), "stopping", f"abandon; {STOP_02}", "step 5 is not saved: its manifest failed (a bug)"), (undone(), "stopping")]),
    ("a stuck commit is given up; heard of later, it counts nevertheless", rules(ranks=(0, 1, 2), max_restarts=1), [
        *COMMITTING, (late("committing"), "stopping", f"abandon; {STOP_02}", "step 5 is not saved: its commit made no progress in 20 s"), (done(), "stopping"), (done(), "stopping"),
        (gone(0, -15), "stopping"), (gone(2, -15), "starting", AGAIN_FROM, "step 5 is saved in /d")]),
    *((f"{name} when all are dead; {words}", rules(ranks=(0, 1, 2), places=1, **change), [*ONLY_COMMITTING, *asked_for(signals, "committing"), (event, state, before + actions, said)])
      for words, change, signals, state, actions in FATES
      for name, event, before, said in (("commit fails", undone(), "abandon; ", "step 5 is not saved: no space left"), ("commit is stuck", late("committing"), "abandon; ", "step 5 is not saved: its commit made no progress"))),
    *((f"commit is heard when all are dead; {words}", rules(ranks=(0, 1, 2), **change), [*ONLY_COMMITTING, *asked_for(signals, "committing"), (done(), state, actions.replace("start 1", "start 1 from /d"), "step 5 is saved in /d")])
      for words, change, signals, state, actions in FATES),
    # --- requests to stop in the middle
    *((f"a stop while {steps[-1][1]}: the dump goes on, a second one means now", THREE, [
        *steps, (tell(SIGUSR1), steps[-1][1], "USR1 0,2", "for the workers"), (ask(SIGHUP), steps[-1][1]), (threw(2), steps[-1][1]),
        (ask(SIGTERM), "killing", "abandon; KILL 0,2; deadline killing 10", "msrun received SIGTERM again"),
        (gone(2, -9), "killing"), (gone(0, -9), "stopped", "sweep; finish stopped 129", "stopped by SIGHUP; step 5 is not saved: msrun received SIGTERM again")])
      for steps in ([*FREEZING, (froze(0), "freezing")], DUMPING, COMMITTING)),
    ("one stop while the state is saved: no restart, and the path is told", rules(ranks=(0, 1, 2), max_restarts=1), [
        *DUMPING, (ask(SIGINT), "dumping"), *SAVED[len(DUMPING):], (gone(0, -15), "stopping"), (gone(2, -15), "stopped", "sweep; finish stopped 130", "stopped by SIGINT; step 5 is saved in /d")]),
    ("two stops while only the commit is awaited", THREE, [
        *ONLY_COMMITTING, (ask(SIGINT), "committing"), (ask(SIGINT), "stopped", "abandon; sweep; finish stopped 130", "step 5 is not saved: msrun received SIGINT again")]),
    ("a plain stop says what is not saved", TWO, [
        *STARTED_2, (ask(SIGTERM), "stopping", "TERM 0,1; deadline stopping 30", "SIGTERM"), (ev.WorkerExited(0, 0, -15, 7), "stopping"),
        (gone(1, -15), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 7 is not saved")]),
    ("a rank that cannot be killed: the report says what is saved", THREE, [
        *SAVED, (late("stopping"), "killing", "KILL 0,2; deadline killing 10", "alive"), (late("killing"), "failed", "sweep; finish failed 1", "cannot be killed (waited 10 s); step 5 is saved in /d")]),
]  # fmt: skip


def events_of(steps):
    return [event for event, *_ in steps]
