"""Histories of replacements: only what is lost is started again; and everything that can cross that.

Rows as in `plain.py`, but the words must be in one of the reasons given in that step.
"""

from signal import SIGTERM, SIGUSR1

from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from support.histories.dumps import cut, done, froze, holds, reg, running, threw, wrote
from support.histories.plain import ask, gone, late, no_start, rules, tell, up
from support.histories.short import shorts
from worker_hooks.contract import protocol

MEMORY = "/proc/1/fd/5"


def asked(count=3, **changes):
    return rules(**{"ranks": tuple(range(count)), "max_restarts": 1, "is_on": True, **changes})


TWO, THREE, FOUR = asked(2), asked(), asked(4)


def rejoins(rank, attempt=1):
    return protocol.Rejoining(rank, attempt)


def hangs(rank, attempt=0, why="made no progress for 2.1 s (stopped)"):
    return ev.RankHung(rank, attempt, why)


def undone(why="no descriptors", place=False, dump=1):
    return ev.CommitFailed(dump, why, place)


def fixed(rank, why, attempt=0, step=0):
    return protocol.Registered(rank, attempt, step, why)


def starts(attempt, old, new, step=5):
    """What begins a round."""
    reminders = "; ".join(["remind 3600"] * len(new.split(",")))
    told = f"replace {attempt}: {new} beside {old} from {MEMORY} at {step}; {reminders}"
    return f"{told}; deadline replacing {30 if old else 600}"


JOIN = "deadline replacing 600"
KILL_S = "deadline replacing 10"
PROGRESS = "deadline dumping 20"
TO_DISK = "commit 5 by 0 from memory; deadline committing 20"
STOP = "deadline stopping 30"

DIED = [
    *running(3),
    (
        gone(1, -9),
        "freezing",
        "freeze 1: 0,2; deadline freezing 15",
        "rank 1 was killed by SIGKILL",
    ),
]
ORDERED = [
    *DIED,
    (froze(0), "freezing"),
    (
        froze(2),
        "dumping",
        f"save 5 by 0 digest 2 memory; {PROGRESS}; prepare 1: 1",
        "step 5 is the newest",
    ),
]
COMMITTING = [
    *ORDERED,
    (wrote(0), "dumping", PROGRESS),
    (holds(2), "committing", "commit 5 by 0 memory; deadline committing 20", "written by rank 0"),
]
REPLACING = [
    *COMMITTING,
    (
        done(MEMORY),
        "replacing",
        starts(1, "0,2", "1"),
        "rank 1 was killed by SIGKILL in step 6; replacing it, ranks 0,2 keep running",
    ),
]
JOINING = [
    *REPLACING,
    (up(1, 1), "replacing"),
    (rejoins(2), "replacing"),
    (rejoins(0), "replacing", JOIN),
]
ALMOST = [*JOINING, (reg(1, 5, 1), "replacing"), (reg(0, 5, 1), "replacing")]
AGAIN = (
    reg(2, 5, 1),
    "running",
    "forget; deadline running -; go on 1: 0,1,2",
    "rank 1 replaced, every rank has joined",
)
REPLACED = [*ALMOST, AGAIN]


ONE_LEFT = [  # of two
    *running(2),
    (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "rank 1 was killed by SIGKILL"),
    (froze(0), "dumping", f"save 5 by 0 memory; {PROGRESS}; prepare 1: 1", "step 5 is the newest"),
    (wrote(0), "committing", "commit 5 by 0 memory; deadline committing 20", "rank 0"),
    (
        done(MEMORY),
        "replacing",
        starts(1, "0", "1"),
        "in step 6; replacing it, rank 0 keeps running",
    ),
]


def on_disk(steps):
    """The same, of a job that went on from step 5."""
    found = (ev.CheckpointFound(0, "/old", 5), "starting")
    return [steps[0], found, *steps[1:]]


def raised(count=3, culprit=1):
    """Rank `culprit` raised, and nobody died; the checkpoint in memory is being completed."""
    others = [rank for rank in range(count) if rank != culprit]
    ranks = ",".join(map(str, range(count)))
    digesters = ",".join(str(rank) for rank in range(1, count))
    return [
        *running(count),
        (threw(culprit), "freezing", f"freeze 1: {ranks}; deadline freezing 15", "ValueError: bad"),
        *((froze(rank), "freezing") for rank in range(count - 1)),
        (
            froze(count - 1),
            "dumping",
            f"save 5 by 0 digest {digesters} memory; {PROGRESS}",
            "step 5 is the newest",
        ),
        (wrote(0), "dumping", PROGRESS),
        *((holds(rank), "dumping", PROGRESS) for rank in range(1, count - 1)),
        (
            holds(count - 1),
            "committing",
            "commit 5 by 0 memory; deadline committing 20",
            f"written by rank {others[0]}",
        ),
    ]


RAISED = [
    *raised(),
    (done(MEMORY), "replacing", f"release 1; {KILL_S}", "rank 1 raised ValueError: bad"),
]
SECOND = starts(2, "0", "1,2")

HISTORIES = [
    # --- the plain way
    ("a rank dies and is replaced; the next death is another one", THREE, [
        *REPLACED, (gone(0, -9, 1), "freezing", "freeze 2: 1,2; deadline freezing 15", "rank 0 was killed by SIGKILL"),
        (froze(1, 7, dump=2), "freezing"), (froze(2, 7, dump=2), "dumping", f"save 7 by 1 digest 2 memory; {PROGRESS}; prepare 2: 0", "step 7"),
        (wrote(1, dump=2), "dumping", PROGRESS), (holds(2, dump=2), "committing", "commit 7 by 1 memory; deadline committing 20", "written"),
        (done(MEMORY, 2), "replacing", starts(2, "1,2", "0", 7), "in step 8; replacing it, ranks 1-2 keep running")]),
    ("a job that was replaced can succeed", THREE, [
        *REPLACED, (gone(0, 0, 1), "running"), (gone(1, 0, 1), "running"), (gone(2, 0, 1), "succeeded", "sweep; finish succeeded 0", "exited with 0")]),
    ("a survivor may join before it was heard to leave", TWO, [
        *ONE_LEFT, (reg(1, 5, 1), "replacing"), (rejoins(1), "replacing"), (reg(0, 5, 1), "running", "forget; deadline running -; go on 1: 0,1", "rank 1 replaced")]),
    ("what is on disk already is put into memory nevertheless", THREE, on_disk(REPLACED)),
    ("signals for the workers are passed on", THREE, [*JOINING, (tell(SIGUSR1), "replacing", "USR1 0,1,2", "for the workers")]),
    # --- several are lost
    ("deaths until the memory is complete are of one replacement", FOUR, [
        *running(4), (gone(1, -9), "freezing", "freeze 1: 0,2,3; deadline freezing 15", "SIGKILL"), (gone(2, -9), "freezing"), (froze(0), "freezing"),
        (froze(3), "dumping", f"save 5 by 0 digest 3 memory; {PROGRESS}; prepare 1: 1,2", "step 5"), (wrote(0), "dumping", PROGRESS), (holds(3), "committing", "commit 5 by 0 memory; deadline committing 20", "written"),
        (gone(0, -11), "committing"), (done(MEMORY), "replacing", starts(1, "3", "0,1,2"), "rank 1 was killed by SIGKILL in step 6; replacing ranks 0-2, rank 3 keeps running")]),
    ("the writer dies in the middle: another one writes", THREE, [
        *ORDERED, (gone(0, -9), "dumping", f"save 5 by 2 memory; {PROGRESS}", "rank 0 was killed by SIGKILL"), (holds(2), "dumping", PROGRESS),
        (wrote(2, number=1), "committing", "commit 5 by 2 memory; deadline committing 20", "rank 2"), (done(MEMORY), "replacing", starts(1, "2", "0,1"), "replacing ranks 0-1, rank 2 keeps running")]),
    ("who did not even answer is killed and replaced", THREE, [
        *DIED, (froze(0), "freezing"), (late("freezing"), "dumping", f"save 5 by 0 memory; {PROGRESS}; prepare 1: 1", "step 5"), (wrote(0), "committing", "commit 5 by 0 memory; deadline committing 20", "rank 0"),
        (done(MEMORY), "replacing", f"KILL 2; {KILL_S}", "rank 2 did not even answer"), (gone(2, -9), "replacing", starts(1, "0", "1,2"), "replacing ranks 1-2, rank 0 keeps running")]),
    # --- exceptions
    ("who raised after a death is its victim and lives on", THREE, [
        *ORDERED, (threw(2), "dumping"), *COMMITTING[len(ORDERED):], (done(MEMORY), "replacing", starts(1, "0,2", "1"), "rank 1 was killed")]),
    ("an exception before the death is heard of is a consequence, too", THREE, [
        *running(3), (threw(2), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "ValueError"), (gone(1, -9), "freezing"), *REPLACING[len(DIED):-1],
        (done(MEMORY), "replacing", starts(1, "0,2", "1"), "rank 1 was killed by SIGKILL (rank 2 raised ValueError: bad) in step 6; replacing it, ranks 0,2 keep running")]),
    ("the first that raised is released and replaced, the others live on", THREE, [
        *raised()[:-1], (threw(2), "dumping"), *raised()[-1:], (done(MEMORY), "replacing", f"release 1; {KILL_S}", "rank 1 raised"),
        (threw(0), "replacing"), (gone(1, 1), "replacing", starts(1, "0,2", "1"), "rank 1 raised ValueError: bad in step 6; replacing it, ranks 0,2 keep running")]),
    ("it may leave with any code", THREE, [*RAISED, (gone(1, 0), "replacing", starts(1, "0,2", "1"), "replacing it")]),
    ("if it does not leave it is killed", THREE, [
        *RAISED, (late("replacing"), "replacing", f"KILL 1; {KILL_S}", "rank 1 still alive 10 s after the order to exit"), (gone(1, -9), "replacing", starts(1, "0,2", "1"), "rank 1 raised")]),
    ("another one dies meanwhile: both are replaced, and the death is to blame", THREE, [
        *RAISED, (gone(2, -9), "replacing"), (gone(1, 1), "replacing", starts(1, "0", "1,2"), "rank 2 was killed by SIGKILL (rank 1 raised ValueError: bad) in step 6; replacing ranks 1-2")]),
    ("unless a death explains it", THREE, [
        *JOINING, (threw(2, attempt=1), "replacing", "deadline replacing 0.5"), (gone(1, -9, 1), "replacing", starts(2, "0,2", "1"), "rank 1 was killed by SIGKILL in step 6; replacing it, ranks 0,2 keep running")]),
    # --- hangs
    ("a rank that hangs is killed while the others stand still already", THREE, [
        *running(3), (hangs(1), "freezing", "KILL 1; freeze 1: 0,2; deadline freezing 15", "rank 1 made no progress for 2.1 s (stopped)"), (hangs(1), "freezing"), (gone(1, -9), "freezing"),
        *REPLACING[len(DIED):-1], (done(MEMORY), "replacing", starts(1, "0,2", "1"), "rank 1 made no progress for 2.1 s (stopped) in step 6; replacing it, ranks 0,2 keep running")]),
    ("two that hang", FOUR, [
        *running(4), (hangs(1), "freezing", "KILL 1; freeze 1: 0,2,3; deadline freezing 15", "rank 1 made"), (hangs(2), "freezing", "KILL 2", "rank 2 made"), (froze(0), "freezing"),
        (froze(3), "dumping", f"save 5 by 0 digest 3 memory; {PROGRESS}", "step 5"), (wrote(0), "dumping", PROGRESS), (holds(3), "committing", "commit 5 by 0 memory; deadline committing 20", "written"),
        (gone(1, -9), "committing"), (done(MEMORY), "replacing", KILL_S), (gone(2, -9), "replacing", starts(1, "0,3", "1,2"), "replacing ranks 1-2")]),
    ("one that is killed for it and does not die", TWO, [
        *running(2), (hangs(1), "freezing", "KILL 1; freeze 1: 0; deadline freezing 15", "rank 1 made"), (froze(0), "dumping", f"save 5 by 0 memory; {PROGRESS}", "step 5"),
        (wrote(0), "committing", "commit 5 by 0 memory; deadline committing 20", "rank 0"), (done(MEMORY), "replacing", KILL_S), (late("replacing"), "committing", TO_DISK, "rank 1 cannot be killed")]),
    ("several write to memory, and one of them dies", asked(4, memory_writers=2), [
        *running(4), (gone(1, -9), "freezing", "freeze 1: 0,2,3; deadline freezing 15", "SIGKILL"), (froze(0), "freezing"), (froze(2, nbytes=1 << 27), "freezing"),
        (froze(3), "dumping", f"save 5 by 0,2 digest 3 memory; {PROGRESS}; prepare 1: 1", "step 5"), (wrote(2), "dumping", PROGRESS), (gone(0, -9), "dumping", f"save 5 by 2 memory; {PROGRESS}", "rank 0 was killed"),
        (holds(3), "dumping", PROGRESS), (wrote(2, number=1), "committing", "commit 5 by 2 memory; deadline committing 20", "written by rank 2")]),
    ("who answers is not in the way", THREE, [*DIED, (froze(0), "freezing"), (hangs(0), "freezing"), (hangs(2), "dumping", f"KILL 2; save 5 by 0 memory; {PROGRESS}; prepare 1: 1", "rank 2 made")]),
    ("and nobody else is whole", THREE, [
        *DIED, (froze(0, why="the update did not end"), "freezing"), (hangs(2), "stopping", f"KILL 2; abandon; TERM 0,2; {STOP}", "no rank holds it whole")]),
    ("the last that holds the state is asked for it", TWO, [
        *running(2), (gone(0, -9), "freezing", "freeze 1: 1; deadline freezing 15", "SIGKILL"), (hangs(1), "freezing"), (froze(1), "dumping", f"save 5 by 1 memory; {PROGRESS}; prepare 1: 0", "step 5")]),
    ("alone it is asked, too, and saved on disk", asked(1), [
        *running(1), (hangs(0), "freezing", "freeze 1: 0; deadline freezing 15", "rank 0 made no progress"), (froze(0), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"),
        (wrote(0), "committing", "commit 5 by 0; deadline committing 20", "rank 0"), (done("/d"), "stopping", f"TERM 0; {STOP}", "rank 0 made no progress for 2.1 s (stopped); step 5 is saved in /d; not replaced: no other rank holds the state")]),
    ("an exception is the consequence of a hang", THREE, [
        *running(3), (threw(0), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "ValueError"), (hangs(1), "freezing", "KILL 1", "rank 1 made"), (gone(1, -9), "freezing"), *REPLACING[len(DIED):-1],
        (done(MEMORY), "replacing", starts(1, "0,2", "1"), "rank 1 made no progress for 2.1 s (stopped) (rank 0 raised ValueError: bad) in step 6")]),
    ("without replacing it is killed, saved and restarted", asked(is_on=False), [
        *running(3), (hangs(1), "freezing", "KILL 1; freeze 1: 0,2; deadline freezing 15", "rank 1 made no progress"), (froze(0), "freezing"), (froze(2), "dumping", f"save 5 by 0 digest 2; {PROGRESS}", "step 5"),
        (gone(1, -9), "dumping", PROGRESS), (wrote(0), "dumping", PROGRESS), (holds(2), "committing", "commit 5 by 0; deadline committing 20", "written"),
        (done("/d"), "stopping", f"TERM 0,2; {STOP}", "rank 1 made no progress for 2.1 s (stopped); step 5 is saved in /d; not replaced: replacing is off")]),
    ("without a state it is killed like the others", THREE, [
        *running(3)[:4], (hangs(1), "stopping", f"KILL 1; TERM 0,1,2; {STOP}", "rank 1 made")]),
    ("before all have started", THREE, [*running(3)[:2], (hangs(1), "stopping", f"KILL 1; TERM 0,1; cancel; {STOP}", "rank 1 made")]),
    ("while all come to one step", THREE, [
        *running(3), (ask(SIGTERM), "holding", "hold 1: 0,1,2; deadline holding 20", "graceful"), (hangs(1), "freezing", "KILL 1; freeze 2: 0,2; deadline freezing 5", "rank 1 made")]),
    ("while it saves", THREE, [*ORDERED, (hangs(0), "dumping")]),
    # --- more are lost in a round
    ("the newcomer dies: another one", THREE, [
        *JOINING, (gone(1, 1, 1), "replacing", starts(2, "0,2", "1"), "rank 1 exited with code 1 in step 6; replacing it, ranks 0,2 keep running"),
        (gone(2, -9, 1), "replacing"), (rejoins(0, 2), "replacing"), (rejoins(0, 1), "replacing"), (rejoins(2, 2), "replacing", JOIN)]),
    ("a survivor dies: the newcomer that has not joined begins anew", THREE, [
        *JOINING, (gone(0, -9, 1), "replacing", f"KILL 1; {KILL_S}", "rank 0 was killed by SIGKILL; rank 1 cannot join then"), (reg(1, 5, 1), "replacing"), (rejoins(1), "replacing"),
        (threw(2, attempt=1), "replacing"), (gone(1, -9, 1), "replacing", starts(2, "2", "0,1"), "rank 0 was killed by SIGKILL in step 6; replacing ranks 0-1, rank 2 keeps running"),
        (up(0, 2), "replacing"), (up(1, 2), "replacing"), (rejoins(2, 2), "replacing", JOIN), (reg(2, 5, 2), "replacing"), (reg(0, 5, 2), "replacing"),
        (reg(1, 5, 2), "running", "forget; deadline running -; go on 2: 0,1,2", "ranks 0-1 replaced")]),
    ("and the one whose start is not known yet is called off", THREE, [
        *REPLACING, (gone(0, -9, 1), "replacing", f"cancel; {KILL_S}", "rank 0 was killed"), (no_start(1, 1), "replacing", starts(2, "2", "0,1"), "replacing ranks 0-1")]),
    ("or killed when it comes to life", THREE, [
        *REPLACING, (gone(0, -9, 1), "replacing", f"cancel; {KILL_S}", "rank 0 was killed"), (up(1, 1), "replacing", "KILL 1", "rank 1 came to life while it was called off"),
        (gone(1, -9, 1), "replacing", starts(2, "2", "0,1"), "replacing ranks 0-1")]),
    ("whatever it says first", THREE, [
        *REPLACING, (gone(0, -9, 1), "replacing", f"cancel; {KILL_S}", "rank 0 was killed"), (reg(1, 5, 1), "replacing", "KILL 1", "rank 1 came to life while it was called off"),
        (up(1, 1), "replacing"), (gone(1, -9, 1), "replacing", starts(2, "2", "0,1"), "replacing ranks 0-1")]),
    ("a newcomer that has joined lives on", THREE, [
        *JOINING, (reg(1, 5, 1), "replacing"), (gone(0, -9, 1), "replacing", starts(2, "1,2", "0"), "rank 0 was killed by SIGKILL in step 6; replacing it, ranks 1-2 keep running")]),
    ("the sender dies in mid-transfer", THREE, [*ALMOST, (gone(0, -9, 1), "replacing", starts(2, "1,2", "0"), "replacing it, ranks 1-2 keep running")]),
    ("one that cannot be unblocked is killed and replaced", THREE, [
        *REPLACING, (up(1, 1), "replacing"), (rejoins(0), "replacing"), (late("replacing", 1), "replacing", f"KILL 1,2; {KILL_S}", "rank 2 did not leave the training function within 30 s"),
        (gone(2, -9, 1), "replacing"), (gone(1, -9, 1), "replacing", SECOND, "rank 2 did not leave the training function within 30 s in step 6; replacing ranks 1-2, rank 0 keeps running")]),
    ("one that lets go of its state, too", THREE, [
        *JOINING, (reg(1, 5, 1), "replacing"), (cut(2, 1), "replacing", f"KILL 2; {KILL_S}", "rank 2 let go of its state"), (cut(2, 1), "replacing"), (gone(2, -9, 1), "replacing", starts(2, "0,1", "2"), "ranks 0-1 keep running")]),
    ("a line may break before the start is announced", THREE, [
        *REPLACING, (cut(1, 1), "replacing", f"KILL 1; {KILL_S}", "rank 1 let go"), (gone(1, -9, 1), "replacing", starts(2, "0,2", "1"), "replacing it")]),
]  # fmt: skip


def play(rules_, steps):
    """Every step of a history, as its row says; the job at its end."""
    job = Job(rules_)
    for event, state, *told in steps:
        actions, words = (*told, "")[:2] if told else ("", "")
        decision = decide(job, event)
        reasons = [getattr(each, "reason", "") for each in decision.actions]
        assert decision.job.state.value == state, event
        assert shorts(decision.actions) == actions, event
        assert not words or any(words in each for each in reasons), (event, reasons)
        job = decision.job
    return job
