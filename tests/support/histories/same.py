"""Histories of what ranks hold the same: who can save for another one, and replacements that are undone.

Rows as in `replacements.py`.
"""

from signal import SIGTERM

from agent.controller import events as ev
from support.histories.dumps import done, froze, holds, reg, running, threw, unable, wrote
from support.histories.plain import ask, gone
from support.histories.replacements import PROGRESS, REPLACED, STOP, THREE, TO_DISK
from worker_hooks.contract import protocol

FEW = len(running(3))
LIFE = {"model.w": "0a", "optimizer.lr": "=0.1"}
OTHER = {"model.w": "0a", "optimizer.lr": "=0.2"}


def says(rank, step, texts=None, attempt=0, late=False, problem=""):
    """A rank reports what it holds."""
    return protocol.Fingerprinted(rank, attempt, step, texts or LIFE, late, problem)


def compares(rank, attempt=0, step=0):
    return protocol.Registered(rank, attempt, step, "", True)


def compared(*, attempt=0, steps=(1,), first=0):
    """All three ranks hold the same."""
    announced = [(compares(rank), "running") for rank in range(first, 3)]
    return announced + [
        (says(rank, step, None, attempt), "running") for step in steps for rank in range(3)
    ]


EQUAL = [*running(3), *compared()]
KEPT = [
    *EQUAL,
    *REPLACED[FEW:-1],
    (
        reg(2, 5, 1),
        "running",
        "deadline running -; go on 1: 0,1,2",
        "rank 1 replaced, every rank has joined",
    ),
]
AFTER = [(says(rank, 6, None, 1), "running") for rank in range(3)]
DIFFERS = "after the replacement of rank 1 optimizer.lr differs: 0.2 on rank 1, 0.1 on rank 0"
SAVED = [EQUAL[0], (ev.CheckpointFound(0, "/old", 5), "starting"), *EQUAL[1:], *KEPT[len(EQUAL) :]]


DIED_AGAIN = (
    gone(2, -9, 1),
    "freezing",
    "freeze 2: 0,1; deadline freezing 15",
    "rank 2 was killed",
)
BEFORE = {
    "running": (),
    "holding": ((ask(SIGTERM), "holding", "hold 2: 0,1,2; deadline holding 20", "SIGTERM"),),
    "leaving": (
        (ask(SIGTERM), "holding", "hold 2: 0,1,2; deadline holding 20", "SIGTERM"),
        *((protocol.Standing(rank, 1, 2, 6), "holding") for rank in range(2)),
        (protocol.Standing(2, 1, 2, 6), "holding", "proceed to 6: 0,1,2", "step 6 is the last"),
        *((froze(rank, 6, dump=2), "holding") for rank in range(2)),
        (froze(2, 6, dump=2), "dumping", f"save 6 by 0 digest 1,2; {PROGRESS}", "end of step 6"),
    ),
    "freezing": (DIED_AGAIN,),
    "dumping": (
        DIED_AGAIN,
        (froze(0, 6, dump=2), "freezing"),
        (
            froze(1, 6, dump=2),
            "dumping",
            f"save 6 by 0 digest 1 memory; {PROGRESS}; prepare 2: 2",
            "step 6",
        ),
    ),
}


def undone(state):
    """Two ranks differ in this state: from memory to disk, or not if it is there."""
    before = [(says(0, 6, None, 1), "running"), *BEFORE[state]]
    odd = says(1, 6, OTHER, 1)
    alive = "0,1,2" if state in {"running", "holding", "leaving"} else "0,1"
    given_up = "abandon; " if state in {"leaving", "freezing", "dumping"} else ""
    return [
        (
            f"ranks that differ after a replacement return to its checkpoint, while {state}",
            THREE,
            [*KEPT, *before, (odd, "committing", TO_DISK, DIFFERS)],
        ),
        (
            f"and to the one on disk, if it is there already, while {state}",
            THREE,
            [
                *SAVED,
                *before,
                (odd, "stopping", f"forget; {given_up}TERM {alive}; {STOP}", DIFFERS),
            ],
        ),
    ]


OWN = [
    *running(3),
    *((compares(rank), "running") for rank in range(3)),
    *((says(rank, 1, {"model.w": f"{rank}"}), "running") for rank in range(3)),
]
LOST = (
    gone(1, -9),
    "freezing",
    "freeze 1: 0,2; deadline freezing 15",
    "rank 1 was killed by SIGKILL",
)


def refused(words):
    """Nobody can save what the dead rank held."""
    return [
        LOST,
        (froze(0), "freezing"),
        (froze(2), "stopping", f"abandon; TERM 0,2; {STOP}", words),
    ]


HISTORIES = [
    (
        "equal ranks replace each other, and the checkpoint is kept until all have shown that they are",
        THREE,
        [
            *KEPT,
            *AFTER,
            *((says(rank, 7, None, 1), "running") for rank in (2, 0)),
            (says(1, 7, None, 1), "running", "forget"),
        ],
    ),
    *(row for state in BEFORE for row in undone(state)),
    (
        "the script is not replaced in again",
        THREE,
        [
            *KEPT,
            (says(0, 6, None, 1), "running"),
            (says(1, 6, OTHER, 1), "committing", TO_DISK, DIFFERS),
            (done("/d"), "stopping", f"forget; TERM 0,1,2; {STOP}", "not replaced: it was tried"),
        ],
    ),
    (
        "digests that differ soon after a replacement wait for what the ranks report",
        THREE,
        [
            *KEPT,
            *BEFORE["dumping"],
            (wrote(0, "a", dump=2), "dumping", PROGRESS),
            (holds(1, "b", dump=2), "dumping", PROGRESS),
        ],
    ),
    (
        "three ranks that are not compared yet write their states one after the other",
        THREE,
        [
            *running(3),
            *((compares(rank), "running") for rank in range(3)),
            (threw(1), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "rank 1 raised"),
            (froze(0), "freezing"),
            (froze(1), "freezing"),
            (froze(2), "dumping", f"save 5 by 0 digest 1,2; {PROGRESS}", "step 5"),
            (holds(1, "b"), "dumping", PROGRESS),
            (holds(2, "c"), "dumping", PROGRESS),
            (wrote(0, "a"), "dumping", f"save 5 by 1; {PROGRESS}", "what rank 1 said to hold"),
            (wrote(1, "b", 1), "dumping", f"save 5 by 2; {PROGRESS}", "what rank 2 said to hold"),
            (wrote(2, "c", 2), "committing", "commit 5 by 0/1/2; deadline committing 20", "step 5"),
        ],
    ),
    (
        "what differs from the beginning is each rank's own, and dies with it",
        THREE,
        [*OWN, *refused("no other rank holds what rank 2 has")],
    ),
    (
        "nothing is known before all have reported",
        THREE,
        [*OWN[:-1], *refused("not all ranks had committed their first step")],
    ),
    (
        "what cannot be read has no holder",
        THREE,
        [
            *EQUAL,
            (says(2, 2, {}, problem="model.w is a DTensor"), "running"),
            *refused("model.w is a DTensor"),
        ],
    ),
    (
        "what came later is not known to be equal before all have reported it",
        THREE,
        [
            *EQUAL,
            (says(0, 4, {"optimizer.m": "1"}, late=True), "running"),
            *refused("what was added to the state by step 4"),
        ],
    ),
    (
        "and is then",
        THREE,
        [
            *EQUAL,
            *((says(rank, 4, {"optimizer.m": "1"}, late=True), "running") for rank in range(3)),
            *REPLACED[FEW : FEW + 3],
        ],
    ),
    (
        "all parts are saved while all ranks live",
        THREE,
        [
            *OWN,
            (threw(1), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "ValueError"),
            (froze(0), "freezing"),
            (froze(1), "freezing"),
            (froze(2), "dumping", f"save 5 by 0/1/2; {PROGRESS}", "step 5"),
            (wrote(0, "a"), "dumping", PROGRESS),
            (wrote(1, "b"), "dumping", PROGRESS),
            (
                wrote(2, "c"),
                "committing",
                "commit 5 by 0/1/2; deadline committing 20",
                "rank 0 and rank 1 and rank 2",
            ),
        ],
    ),
    (
        "but not if one cannot save its own",
        THREE,
        [
            *OWN,
            (threw(1), "freezing", "freeze 1: 0,1,2; deadline freezing 15", "ValueError"),
            (froze(0), "freezing"),
            (froze(1), "freezing"),
            (froze(2), "dumping", f"save 5 by 0/1/2; {PROGRESS}", "step 5"),
            (wrote(0, "a"), "dumping", PROGRESS),
            (wrote(1, "b"), "dumping", PROGRESS),
            (
                unable(2),
                "stopping",
                f"abandon; TERM 0,2; release 1; {STOP}",
                "rank 2 failed (out of memory)",
            ),
        ],
    ),
]
