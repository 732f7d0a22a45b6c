"""Histories of a state that is cut into parts, each held by a replica group: ranks 0 and 2, ranks 1 and 3.

Rows as in `replacements.py`.
"""

from support.histories.dumps import done, froze, full, holds, moved, running, unable, wrote
from support.histories.plain import gone, rules
from support.histories.replacements import PROGRESS, STOP
from support.histories.same import compares, says
from worker_hooks.contract import protocol

FOUR = rules(ranks=(0, 1, 2, 3))
MEMORY_TOO = rules(ranks=(0, 1, 2, 3), is_on=True)


def cut(step=1):
    return [
        *((compares(rank), "running") for rank in range(4)),
        *((says(rank, step, {"model.w": f"{rank % 2}"}), "running") for rank in range(4)),
    ]


TRAINING = [
    *running(4),
    *cut(),
    *((protocol.VoteOpened(rank, 0, 1), "running") for rank in range(4)),
]
DIED = (
    gone(1, -9),
    "freezing",
    "freeze 1: 0,2,3; deadline freezing 15",
    "rank 1 was killed by SIGKILL",
)
FROZEN = [*TRAINING, DIED, (froze(0), "freezing"), (froze(2), "freezing")]
DUMPING = [
    *FROZEN,
    (froze(3), "dumping", f"save 5 by 0/3 digest 2; {PROGRESS}", "step 5 is the newest"),
]
COMMIT = "commit 5 by 0/3; deadline committing 20"
ALL_OF_THE_OTHERS = "no rank is left that can save the part of ranks 1, 3; the state is cut"

HISTORIES = [
    (
        "each group writes its part, and no rank is replaced alone",
        FOUR,
        [
            *DUMPING,
            (wrote(0, "a"), "dumping", PROGRESS),
            (holds(2, "a"), "dumping", PROGRESS),
            (wrote(3, "b"), "committing", COMMIT, "rank 0 and rank 3"),
            (done(), "stopping", f"TERM 0,2,3; {STOP}", "step 5 is saved in /d"),
        ],
    ),
    (
        "an odd replica is outvoted in its group",
        rules(ranks=(0, 1, 2, 3, 4, 5)),
        [
            *running(6),
            *((compares(rank), "running") for rank in range(6)),
            *((says(rank, 1, {"w": f"{rank % 2}"}), "running") for rank in range(6)),
            (gone(1, -9), "freezing", "freeze 1: 0,2,3,4,5; deadline freezing 15", "rank 1"),
            *((froze(rank), "freezing") for rank in (0, 2, 3, 4)),
            (froze(5), "dumping", f"save 5 by 0/3 digest 2,4,5; {PROGRESS}", "step 5"),
            (wrote(0, "odd"), "dumping", PROGRESS),
            *((holds(rank, "a"), "dumping", PROGRESS) for rank in (2, 4)),
            (holds(5, "b"), "dumping", PROGRESS),
            (wrote(3, "b"), "dumping", f"save 5 by 2; {PROGRESS}", "what ranks 2, 4 said to hold"),
            (
                wrote(2, "a", 1),
                "committing",
                "commit 5 by 2/3 odd 0; deadline committing 20",
                "rank 0 held another state than the majority",
            ),
        ],
    ),
    (
        "a group of which nobody is left takes the step with it",
        FOUR,
        [
            *TRAINING,
            DIED,
            (gone(3, -9), "freezing"),
            (froze(0), "freezing"),
            (froze(2), "stopping", f"abandon; TERM 0,2; {STOP}", ALL_OF_THE_OTHERS),
        ],
    ),
    (
        "so does one whose last rank dies while it writes; the other group has written",
        FOUR,
        [
            *DUMPING,
            (wrote(0, "a"), "dumping", PROGRESS),
            (holds(2, "a"), "dumping", PROGRESS),
            (
                gone(3, -9),
                "stopping",
                f"abandon; TERM 0,2; {STOP}",
                "rank 3 was killed by SIGKILL; the state is cut into 2 parts",
            ),
        ],
    ),
    (
        "the survivors of a group that is a step ahead are no use without the other group",
        FOUR,
        [
            *TRAINING,
            DIED,
            (froze(0, 6), "freezing"),
            (froze(2, 6), "freezing"),
            (froze(3, 5), "freezing", "freeze 1: 3 to 6; deadline freezing 15", "may reach it"),
            (
                froze(3, 5, limit=6),
                "stopping",
                f"abandon; TERM 0,2,3; {STOP}",
                "ranks 0, 2 held step 6; rank 3 held step 5, and no step is held by every",
            ),
        ],
    ),
    (
        "unless that one reaches the step, too",
        FOUR,
        [
            *TRAINING,
            DIED,
            (froze(0, 6), "freezing"),
            (froze(2, 6), "freezing"),
            (froze(3, 5), "freezing", "freeze 1: 3 to 6; deadline freezing 15", "may reach it"),
            (froze(3, 6, limit=6), "dumping", f"save 6 by 0/3 digest 2; {PROGRESS}", "step 6"),
        ],
    ),
    (
        "the newest step that both groups hold is saved, though one rank is further",
        FOUR,
        [
            *TRAINING,
            DIED,
            (froze(0, 6), "freezing"),
            (froze(2, 5), "freezing"),
            (froze(3, 5), "dumping", f"save 5 by 2/3; {PROGRESS}", "step 5 is the newest"),
        ],
    ),
    (
        "a writer that fails is replaced by one of its group, and the others go on",
        FOUR,
        [
            *DUMPING,
            (moved(3), "dumping", PROGRESS),
            (unable(0), "dumping", f"save 5 by 2/3; {PROGRESS}", "rank 0 failed"),
            (wrote(3, "b"), "dumping"),
            (wrote(3, "b", 1), "dumping", PROGRESS),
            (
                wrote(2, "a", 1),
                "committing",
                "commit 5 by 2/3; deadline committing 20",
                "rank 2 and rank 3",
            ),
        ],
    ),
    (
        "what one group has written in a full folder is written again in the next one",
        FOUR,
        [
            *DUMPING,
            (wrote(0, "a"), "dumping", PROGRESS),
            (full(3), "dumping", f"save 5 by 0/3 place 1; {PROGRESS}", "no space left"),
        ],
    ),
]
