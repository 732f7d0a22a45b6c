"""Histories of a state that is cut into parts, each held by a replica group: ranks 0 and 2, ranks 1 and 3.

Rows as in `replacements.py`.
"""

from signal import SIGTERM

from support.histories.dumps import (
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
from support.histories.plain import ask, gone, late, no_start, rules, up
from support.histories.replacements import JOIN, KILL_S, MEMORY, PROGRESS, STOP, rejoins, starts
from support.histories.same import compares, says
from worker_hooks.contract import protocol
from worker_hooks.distributed.process_group import CUT_INSIDE

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
STAYING = [  # a graceful exit, before the last rank has said what it holds
    *running(4),
    *cut()[:-1],
    (ask(SIGTERM), "holding", "hold 1: 0,1,2,3; deadline holding 20", "SIGTERM"),
    *((protocol.Standing(rank, 0, 1, 6), "holding") for rank in range(3)),
    (protocol.Standing(3, 0, 1, 6), "holding", "proceed to 6: 0,1,2,3", "step 6 is the last"),
    *((froze(rank, 6), "holding") for rank in range(3)),
    (froze(3, 6), "dumping", f"save 6 by 0 digest 1,2,3; {PROGRESS}", "every rank stays"),
]
LAST_REPORT = [(event, "dumping") for event, _ in cut()[-1:]]
COMMIT_6 = "commit 6 by {}; deadline committing 20"
COMMIT = "commit 5 by 0/3; deadline committing 20"
COMMIT_TO_MEMORY = "commit 5 by 0/3 memory; deadline committing 20"
REPLACING = [
    *FROZEN,
    (
        froze(3),
        "dumping",
        f"save 5 by 0/3 digest 2 memory; {PROGRESS}; prepare 1: 1",
        "step 5 is the newest",
    ),
    (wrote(0, "a"), "dumping", PROGRESS),
    (holds(2, "a"), "dumping", PROGRESS),
    (wrote(3, "b"), "committing", COMMIT_TO_MEMORY, "rank 0 and rank 3"),
    (
        done(MEMORY),
        "replacing",
        starts(1, "0,2,3", "1"),
        "rank 1 was killed by SIGKILL in step 6; replacing it, ranks 0,2-3 keep running",
    ),
]
REPLACED = [
    *REPLACING,
    (up(1, 1), "replacing"),
    (rejoins(2), "replacing"),
    (rejoins(3), "replacing"),
    (rejoins(0), "replacing", JOIN),
    *((reg(rank, 5, 1), "replacing") for rank in (1, 0, 3)),
    (reg(2, 5, 1), "running", "deadline running -; go on 1: 0,1,2,3", "every rank has joined"),
]
SPLIT_ORDER = f"save 5 by 0,2/3 memory; {PROGRESS}; prepare 1: 1"
PARTS_REPLACED = [  # the same, and all of a group write
    *FROZEN,
    (froze(3), "dumping", SPLIT_ORDER, "step 5 is the newest"),
    (wrote(0, "a"), "dumping", PROGRESS),
    (wrote(2, "a"), "dumping", PROGRESS),
    (wrote(3, "b"), "committing", COMMIT_TO_MEMORY.replace("0/3", "0,2/3"), "ranks 0, 2 and rank"),
    *REPLACED[len(REPLACING) - 1 :],
]
ALL_OF_THE_OTHERS = (
    "no rank is left that can save the part of ranks 1, 3 (ranks 1, 3 ended); the state is cut"
)


def reports(step):
    """After the replacement each group holds its own part."""
    return [(says(rank, step, {"model.w": f"{rank % 2}"}, 1), "running") for rank in range(4)]


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
        "groups with one digest hold different objects, which it leaves out: both states are kept",
        FOUR,
        [
            *DUMPING,
            (wrote(0, "a"), "dumping", PROGRESS),
            (holds(2, "a"), "dumping", PROGRESS),
            (wrote(3, "a"), "committing", COMMIT, "rank 0 and rank 3"),
        ],
    ),
    (
        "who holds the same is known only when one has written: its group has one state",
        FOUR,
        [
            *STAYING,
            (wrote(0, "a"), "dumping", PROGRESS),
            *LAST_REPORT,
            *((holds(rank, digest), "dumping", PROGRESS) for rank, digest in ((1, "b"), (2, "a"))),
            (holds(3, "b"), "dumping", f"save 6 by 1; {PROGRESS}", "what ranks 1, 3 said to hold"),
            (wrote(1, "b", 1), "committing", COMMIT_6.format("0/1"), "rank 0 and rank 1"),
        ],
    ),
    (
        "the same where both groups have one digest",
        FOUR,
        [
            *STAYING,
            (wrote(0, "a"), "dumping", PROGRESS),
            *LAST_REPORT,
            *((holds(rank, "a"), "dumping", PROGRESS) for rank in (1, 2)),
            (holds(3, "a"), "dumping", f"save 6 by 1; {PROGRESS}", "what ranks 1, 3 said to hold"),
            (wrote(1, "a", 1), "committing", COMMIT_6.format("0/1"), "rank 0 and rank 1"),
        ],
    ),
    (
        "what was shared out among ranks of two groups is neither's state, and is written again",
        FOUR._replace(dump=FOUR.dump._replace(split=True)),
        [
            *STAYING[:-1],
            (froze(3, 6), "dumping", f"save 6 by 0,1,2,3; {PROGRESS}", "every rank stays"),
            *((wrote(rank, "a"), "dumping", PROGRESS) for rank in range(3)),
            *LAST_REPORT,
            (wrote(3, "a"), "dumping", f"save 6 by 0,2/1,3; {PROGRESS}", "is not written yet"),
            *((wrote(rank, "a", 1), "dumping", PROGRESS) for rank in (0, 2, 1)),
            (wrote(3, "a", 1), "committing", COMMIT_6.format("0,2/1,3"), "ranks 0, 2 and ranks"),
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
    (
        "one whose last rank is stuck ends it at once, though the other group has more to write",
        FOUR,
        [
            *DUMPING,
            (wrote(0, "a"), "dumping", PROGRESS),
            (
                late("dumping"),
                "stopping",
                f"abandon; TERM 0,2,3; {STOP}",
                "rank 3 made no progress in 20 s; the state is cut into 2 parts",
            ),
        ],
    ),
    (
        "a rank that dies is replaced, and the memory is kept until each group is alike",
        MEMORY_TOO,
        [
            *REPLACED,
            *(one for step in (6, 7) for one in reports(step)[:-1]),
            (says(3, 6, {"model.w": "1"}, 1), "running"),
            (says(3, 7, {"model.w": "1"}, 1), "running", "forget", "no rank resumes from memory"),
        ],
    ),
    (
        "a newcomer that differs inside of its group is undone, before the others report",
        MEMORY_TOO,
        [
            *REPLACED,
            (says(3, 6, {"model.w": "1"}, 1), "running"),
            (
                says(1, 6, {"model.w": "0"}, 1),
                "committing",
                "commit 5 by 0/3 from memory; deadline committing 20",
                "after the replacement of rank 1 model.w differs",
            ),
            (done("/d"), "stopping", f"forget; TERM 0,1,2,3; {STOP}", "not replaced: it was tried"),
        ],
    ),
    (
        "what is in memory goes to disk if the newcomer does not join, each group's part",
        MEMORY_TOO,
        [
            *REPLACING,
            (
                no_start(1, 1),
                "committing",
                "commit 5 by 0/3 from memory; deadline committing 20",
                "rank 1 could not be started",
            ),
        ],
    ),
    (
        "once all is in memory, a group may lose its last rank and be replaced as a whole",
        MEMORY_TOO,
        [
            *REPLACING,
            (up(1, 1), "replacing"),
            (gone(3, -9, 1), "replacing", f"KILL 1; {KILL_S}", "rank 1 cannot join then"),
            (gone(1, -9, 1), "replacing", starts(2, "0,2", "1,3"), "replacing ranks 1,3"),
        ],
    ),
    (
        "the last two of a group die: nobody is replaced, and nothing saved",
        MEMORY_TOO,
        [
            *TRAINING,
            DIED,
            (gone(3, -9), "freezing"),
            (froze(0), "freezing"),
            (froze(2), "stopping", f"abandon; TERM 0,2; {STOP}", ALL_OF_THE_OTHERS),
        ],
    ),
    (
        "so it is if the second one dies while it writes to memory",
        MEMORY_TOO,
        [
            *REPLACING[:-4],
            (holds(2, "a"), "dumping", PROGRESS),
            (
                gone(3, -9),
                "stopping",
                f"abandon; TERM 0,2; {STOP}",
                "no checkpoint in memory (rank 3 was killed by SIGKILL); no rank is left",
            ),
        ],
    ),
    (
        "a model that was cut inside of training is saved to disk, and no rank is replaced",
        MEMORY_TOO,
        [
            *TRAINING[:-1],
            (protocol.VoteOpened(3, 0, 1, "", CUT_INSIDE), "running"),
            *DUMPING[len(TRAINING) :],
            (wrote(0, "a"), "dumping", PROGRESS),
            (holds(2, "a"), "dumping", PROGRESS),
            (wrote(3, "b"), "committing", COMMIT, "rank 0 and rank 3"),
            (
                done(),
                "stopping",
                f"TERM 0,2,3; {STOP}",
                f"step 5 is saved in /d; not replaced: rank 3: {CUT_INSIDE}",
            ),
        ],
    ),
    (
        "who raised is not replaced before what came later is compared, also of groups",
        MEMORY_TOO,
        [
            *TRAINING,
            (says(0, 4, {"optimizer.m": "1"}, late=True), "running"),
            (threw(1), "freezing", "freeze 1: 0,1,2,3; deadline freezing 15", "ValueError"),
            *((froze(rank), "freezing") for rank in range(3)),
            (froze(3), "dumping", f"save 5 by 0/1 digest 2,3; {PROGRESS}", "step 5"),
        ],
    ),
    (
        "to have waited for why a group differs is no stuck writer: the place is not left for one",
        rules(ranks=(0, 1, 2, 3), is_on=True, split=True),
        [
            *PARTS_REPLACED,
            (gone(3, -9, 1), "freezing", "freeze 2: 0,1,2; deadline freezing 15", "rank 3"),
            (froze(0, 6, dump=2), "freezing"),
            (froze(1, 6, dump=2), "freezing"),
            (
                froze(2, 6, dump=2),
                "dumping",
                f"save 6 by 0,2/1 memory; {PROGRESS}; prepare 2: 3",
                "step 6",
            ),
            (wrote(0, "a", dump=2), "dumping", PROGRESS),
            (wrote(1, "b", dump=2), "dumping", PROGRESS),
            (wrote(2, "odd", dump=2), "dumping", PROGRESS),
            (late("dumping", 1), "dumping", f"save 6 by 0 memory; {PROGRESS}", "what rank 0 said"),
            (late("dumping", 1), "dumping", f"save 6 by 2 memory; {PROGRESS}", "rank 0 made no"),
        ],
    ),
]
