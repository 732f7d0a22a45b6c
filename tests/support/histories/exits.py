"""Histories of graceful exits: stay, agree on one step, stay there, save, leave; and what disturbs them.

Rows as in `plain.py`: a step is an event, the state after it, the actions in short and words that
every reason given in that step must contain.
"""

from signal import SIGINT, SIGTERM, SIGUSR1

from agent.controller import events as ev
from support.histories.dumps import (
    PROGRESS,
    cut,
    done,
    froze,
    holds,
    moved,
    reg,
    running,
    threw,
    unable,
    undone,
    wrote,
)
from support.histories.plain import (
    BEGIN,
    STARTED_2,
    ask,
    gone,
    late,
    no_start,
    rules,
    tell,
    up,
    wish,
)
from worker_hooks.contract import protocol

ONE, TWO, THREE = rules(ranks=(0,)), rules(max_restarts=3), rules(ranks=(0, 1, 2), max_restarts=3)
FREEZE_2 = "freeze 2: 0,1; deadline freezing 5"


def stands(rank, step, dump=1):
    return protocol.Standing(rank, 0, dump, step)


def at(node, signum=SIGTERM):
    """The msrun of this node received a signal."""
    return ev.StopRequested(signum, node=node)


def now(signum=SIGTERM):
    return ev.StopRequested(signum, "msrun stop --now", is_now=True)


HELD = (
    ask(SIGTERM),
    "holding",
    "hold 1: 0,1; deadline holding 20",
    "graceful exit: msrun received SIGTERM",
)
HOLDING = [*running(2, 4), HELD]
AGREED = [
    *HOLDING,
    (stands(0, 5), "holding"),
    (stands(1, 6), "holding", "proceed to 6: 0,1", "step 6 is the last that a rank has begun"),
]
DUMPING = [
    *AGREED,
    (froze(1, 6), "holding"),
    (
        froze(0, 6),
        "dumping",
        f"save 6 by 1 digest 0; {PROGRESS}",
        "every rank stays at the end of step 6",
    ),
]
COMMITTING = [
    *DUMPING,
    (wrote(1), "dumping", PROGRESS),
    (
        holds(0),
        "committing",
        "commit 6 by 1; deadline committing 20",
        "step 6 is written by rank 1",
    ),
]
LEAVING = [
    *COMMITTING,
    (
        done(),
        "stopping",
        "leave at 6: 0,1; deadline stopping 30",
        "graceful exit: msrun received SIGTERM; step 6 is saved in /d",
    ),
]
FOUND = [
    *HOLDING,
    (ev.CheckpointFound(0, "/old", 7), "holding"),
    (stands(0, 7), "holding"),
    (stands(1, 7), "holding", "proceed to 7: 0,1", "step 7 is the last"),
]
STOP_2 = "TERM 0,1; deadline stopping 30"

HISTORIES = [
    ("a signal that each node receives is one request, and a node's second one is the second", TWO, [
        *running(2, 4), (at(1), "holding", "hold 1: 0,1; deadline holding 20", "graceful exit: msrun received SIGTERM"), (at(0), "holding"), (at(2), "holding"),
        (at(2), "freezing", FREEZE_2, "msrun received SIGTERM again"), (at(0), "freezing"), (at(1), "freezing"), (at(1), "killing", "abandon; KILL 0,1; deadline killing 10", "msrun received SIGTERM again")]),
    ("ranks without hooks are killed at the second signal of one node", TWO, [
        *STARTED_2, (at(1), "stopping", "TERM 0,1; deadline stopping 30", "msrun received SIGTERM"), (at(0), "stopping"), (at(1), "killing", "KILL 0,1; deadline killing 10", "again"), (at(0), "killing")]),
    ("all come to one step, save it and leave", TWO, [
        *LEAVING, (gone(0, 0), "stopping"),
        (gone(1, 0), "stopped", "sweep; finish stopped 0", "graceful exit: msrun received SIGTERM, every rank exited with 0; step 6 is saved in /d")]),
    ("an interrupt ends the shell's loops, too", ONE, [
        *running(1, 4), (ask(SIGINT), "holding", "hold 1: 0; deadline holding 20", "SIGINT"), (stands(0, 5), "holding", "proceed to 5: 0", "step 5"),
        (froze(0, 5), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"), (wrote(0), "committing", "commit 5 by 0; deadline committing 20", "step 5"),
        (done(), "stopping", "leave at 5: 0; deadline stopping 30", "step 5"), (gone(0, 0), "stopped", "sweep; finish stopped 130", "graceful exit")]),
    ("a file asks, and waits longer", TWO, [
        *running(2, 4), (wish(), "holding", "hold 1: 0,1; deadline holding 585", "e.json asks for it"), (wish(0), "holding"), (wish(1), "holding"), *AGREED[len(HOLDING):], *DUMPING[len(AGREED):], *COMMITTING[len(DUMPING):],
        (wish(), "committing"), (done(), "stopping", "leave at 6: 0,1; deadline stopping 600", "e.json asks for it; step 6"), (wish(0), "stopping"), (gone(0, 0), "stopping"),
        (gone(1, 0), "stopped", "sweep; finish stopped 0", "graceful exit: e.json asks for it, every rank exited with 0")]),
    ("what is saved already is not saved again", rules(), [
        *FOUND, (froze(0, 7), "holding"),
        (froze(1, 7), "stopping", "leave at 7: 0,1; deadline stopping 30", "step 7 is saved in /old"), (gone(0, 0), "stopping"), (gone(1, 0), "stopped", "sweep; finish stopped 0", "step 7 is saved in /old")]),
    ("what nobody can write is not saved, but all leave", ONE, [
        *running(1, 4), (ask(SIGTERM), "holding", "hold 1: 0; deadline holding 20", "SIGTERM"), (stands(0, 5), "holding", "proceed to 5: 0", "step 5"), (froze(0, 5), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"),
        (unable(0), "stopping", "abandon; leave at 5: 0; deadline stopping 30", "step 5 is not saved: rank 0 failed (out of memory)"), (gone(0, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 5 is not saved")]),
    # --- training ends meanwhile
    ("training is over before all have answered", TWO, [*HOLDING, (gone(0, 0), "holding"), (gone(1, 0), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0")]),
    ("who is done is not waited for", TWO, [
        *HOLDING, (stands(1, 6), "holding"), (gone(0, 0), "holding", "proceed to 6: 1", "step 6"), (froze(1, 6), "dumping", f"save 6 by 1; {PROGRESS}", "step 6")]),
    ("who is done after all agreed is not waited for", TWO, [*AGREED, (froze(1, 6), "holding"), (gone(0, 0), "dumping", f"save 6 by 1; {PROGRESS}", "step 6")]),
    ("who is done leaves nothing to save", TWO, [*FOUND, (froze(1, 7), "holding"), (gone(0, 0), "stopping", "leave at 7: 1; deadline stopping 30", "step 7")]),
    # --- what disturbs it
    ("a rank dies", TWO, [
        *HOLDING, (stands(0, 5), "holding"), (gone(1, -9), "freezing", "freeze 2: 0; deadline freezing 5", "graceful exit: msrun received SIGTERM, but rank 1 was killed by SIGKILL"),
        (froze(0, 4, dump=2), "dumping", f"save 4 by 0; {PROGRESS}", "step 4"), (wrote(0, dump=2), "committing", "commit 4 by 0; deadline committing 20", "step 4"),
        (done(dump=2), "stopping", "TERM 0; deadline stopping 30", "rank 1 was killed by SIGKILL; step 4 is saved"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM, not gracefully: rank 1 was killed by SIGKILL; step 4 is saved in /d")]),
    ("the only rank dies", ONE, [*running(1, 4), (wish(), "holding", "hold 1: 0; deadline holding 585", "e.json"), (gone(0, -9), "stopped", "sweep; finish stopped 143", "e.json asks for it, not gracefully: rank 0 was killed by SIGKILL; step 4 is not saved: no rank can be asked")]),
    ("a rank raises", TWO, [*HOLDING, (threw(1), "freezing", FREEZE_2, "rank 1 raised ValueError: bad"), (froze(0, 4, dump=2), "freezing"), (late("freezing"), "dumping", f"save 4 by 0; {PROGRESS}", "step 4")]),
    ("a rank lets go", TWO, [*HOLDING, (cut(1), "freezing", "freeze 2: 0; deadline freezing 5", "rank 1 let go of its state")]),
    ("the only rank lets go", ONE, [
        *running(1, 4), (ask(SIGTERM), "holding", "hold 1: 0; deadline holding 20", "SIGTERM"), (cut(0), "stopping", "TERM 0; deadline stopping 30", "msrun received SIGTERM; step 4 is not saved: no rank can be asked: rank 0 let go"),
        (gone(0, -15), "stopped", "sweep; finish stopped 143", "not gracefully: rank 0 let go of its state; step 4 is not saved")]),
    ("the only rank lets go of what is saved", ONE, [*running(1, 0), (ask(SIGTERM), "holding", "hold 1: 0; deadline holding 20", "SIGTERM"), (cut(0), "stopping", "TERM 0; deadline stopping 30", "no step was committed")]),
    ("a rank does not say where it stays", TWO, [*HOLDING, (stands(0, 5), "holding"), (late("holding"), "freezing", FREEZE_2, "but rank 1 did not say within 20 s where to stay")]),
    ("a rank does not come there", TWO, [*AGREED, (froze(1, 6), "holding"), (late("holding"), "freezing", FREEZE_2, "but rank 0 did not come to the end of step 6 within 20 s")]),
    ("a rank stays elsewhere", TWO, [*AGREED, (froze(1, 7), "freezing", FREEZE_2, "rank 1 stays at step 7")]),
    ("a rank is torn", TWO, [*AGREED, (froze(1, 6, "torn"), "freezing", FREEZE_2, "rank 1 cannot save step 6 (torn)")]),
    ("the second request does not wait for the step, the third means now", TWO, [
        *HOLDING, (ask(SIGTERM), "freezing", FREEZE_2, "msrun received SIGTERM again"), (wish(0), "freezing"), (ask(SIGTERM), "killing", "abandon; KILL 0,1; deadline killing 10", "msrun received SIGTERM again"),
        (wish(0), "killing", "dismiss 0", "rank 0 caught the signal"), (gone(0, -9), "killing"), (gone(1, -9), "stopped", "sweep; finish stopped 143", "not gracefully: msrun received SIGTERM again")]),
    ("a signal after a file's request waits less, the second one not at all", TWO, [*running(2, 4), (wish(), "holding", "hold 1: 0,1; deadline holding 585", "e.json"), (ask(SIGINT), "holding", "deadline holding 20"), (ask(SIGINT), "freezing", FREEZE_2, "msrun received SIGINT again"),
        (froze(0, 4, dump=2), "freezing"), (froze(1, 4, "torn", 2), "dumping", f"save 4 by 0; {PROGRESS}", "step 4")]),
    ("a death while the step is saved: the others leave", TWO, [
        *DUMPING, (gone(1, -9), "dumping", f"save 6 by 0; {PROGRESS}", "killed"), (wrote(0, number=1), "committing", "commit 6 by 0; deadline committing 20", "step 6"), (done(), "stopping", "leave at 6: 0; deadline stopping 30", "step 6 is saved"),
        (gone(0, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM, not gracefully: rank 1 was killed by SIGKILL; step 6 is saved in /d")]),
    ("an exception while the step is saved", TWO, [*COMMITTING, (threw(0), "committing"), (done(), "stopping", "leave at 6: 1; release 0; deadline stopping 30", "step 6"), (gone(1, 0), "stopping"), (gone(0, 1), "stopped", "sweep; finish stopped 143", "not gracefully: rank 0 raised ValueError")]),
    ("who let go while the step was saved is signalled", TWO, [*COMMITTING, (cut(0), "committing"), (done(), "stopping", "leave at 6: 1; TERM 0; deadline stopping 30", "step 6"), (wish(0), "stopping", "dismiss 0", "caught")]),
    ("one more request while the step is saved changes nothing, the third means now", TWO, [
        *COMMITTING, (ask(SIGTERM), "committing"), (moved(0), "committing", "deadline committing 20"), (ask(SIGTERM), "killing", "abandon; KILL 0,1; deadline killing 10", "again")]),
    ("one more request while the ranks leave changes nothing, the third means now", TWO, [*LEAVING, (ask(SIGTERM), "stopping"), (ask(SIGTERM), "killing", "KILL 0,1; deadline killing 10", "again"), (gone(0, -9), "killing"), (gone(1, 0), "stopped", "sweep; finish stopped 143", "not gracefully: msrun received SIGTERM again; step 6 is saved")]),
    ("who does not leave is killed", TWO, [*LEAVING, (gone(0, 0), "stopping"), (late("stopping"), "killing", "KILL 1; deadline killing 10", "rank 1 still alive 30 s after the order to exit"), (gone(1, -9), "stopped", "sweep; finish stopped 143", "not gracefully: rank 1 still alive")]),
    ("who fails when it is to leave is to blame", TWO, [*LEAVING, (gone(0, 3), "stopping"), (gone(1, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM, not gracefully: rank 0 exited with code 3 when it was ordered to exit; step 6 is saved in /d")]),
    ("its commit fails", ONE, [*running(1, 4), (ask(SIGTERM), "holding", "hold 1: 0; deadline holding 20", "SIGTERM"), (stands(0, 5), "holding", "proceed to 5: 0", "step 5"), (froze(0, 5), "dumping", f"save 5 by 0; {PROGRESS}", "step 5"), (wrote(0), "committing", "commit 5 by 0; deadline committing 20", "step 5"),
        (undone("bad", place=False), "stopping", "abandon; leave at 5: 0; deadline stopping 30", "step 5 is not saved: its manifest failed (bad)"), (gone(0, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 5 is not saved")]),
    # --- old news
    ("what was said of another hold does not count", TWO, [*HOLDING, (stands(0, 9, 7), "holding"), (stands(0, 5), "holding"), (stands(0, 9), "holding"), (stands(1, 5), "holding", "proceed to 5: 0,1", "step 5"), (froze(0, 5, dump=3), "holding"), (late("running"), "holding")]),
    ("signals for the workers still reach them", TWO, [*HOLDING, (tell(SIGUSR1), "holding", "USR1 0,1", "SIGUSR1")]),
    # --- where no common step can be waited for
    ("only some hold what is not saved: they save it", TWO, [*STARTED_2, (reg(0, 3), "running"), (ask(SIGTERM), "freezing", "freeze 1: 0; deadline freezing 15", "msrun received SIGTERM"),
        (froze(0, 3), "dumping", f"save 3 by 0; {PROGRESS}", "step 3"), (wrote(0), "committing", "commit 3 by 0; deadline committing 20", "step 3"), (done(), "stopping", STOP_2, "msrun received SIGTERM; step 3 is saved"), (gone(0, -15), "stopping"), (gone(1, -15), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; step 3 is saved in /d")]),
    ("a more patient signal changes nothing", TWO, [*running(2, 4), (wish(), "holding", "hold 1: 0,1; deadline holding 585", "e.json"), (ev.StopRequested(SIGUSR1, grace_s=600.0), "holding")]),
    ("the second signal then means now", TWO, [*STARTED_2, (reg(0, 3), "running"), (wish(1), "freezing", "freeze 1: 0; deadline freezing 15", "rank 1 received SIGUSR1"), (ask(SIGTERM), "freezing"), (ask(SIGTERM), "killing", "abandon; KILL 0,1; deadline killing 10", "again")]),
    ("nothing is saved of what nobody committed", TWO, [*STARTED_2, (reg(0), "running"), (wish(), "freezing", "freeze 1: 0; deadline freezing 15", "e.json asks"), (froze(0, 0), "stopping", f"abandon; {STOP_2}", "no step was committed yet"), (wish(1), "stopping", "dismiss 1", "rank 1 caught the signal, but the job is stopping"), (gone(0, -15), "stopping"), (gone(1, -15), "stopped", "sweep; finish stopped 143", "e.json asks for it")]),
    ("a file asks before all have started", TWO, [BEGIN, (up(0), "starting"), (wish(), "stopping", "TERM 0; cancel; deadline stopping 30", "e.json"), (no_start(1), "stopping"), (wish(1), "stopping"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "e.json asks for it")]),
    ("a file asks a script without hooks", TWO, [*STARTED_2, (wish(), "stopping", STOP_2, "e.json asks"), (gone(0, 0), "stopping"), (gone(1, 0), "stopped", "sweep; finish stopped 143", "e.json asks for it")]),
    ("a signal that is no script's business", TWO, [*STARTED_2, (ev.StopRequested(SIGUSR1, passes=False), "stopping", STOP_2, "msrun received SIGUSR1"), (gone(0, -15), "stopping"), (gone(1, -15), "stopped", "sweep; finish stopped 138", "stopped by SIGUSR1")]),
    ("a file asks while a failure is cleared away: no restart follows", TWO, [*running(2, 4), (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "killed"), (wish(), "freezing"), (froze(0, 4, "torn"), "stopping", "abandon; TERM 0; deadline stopping 30", "torn"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "e.json asks for it")]),
    ("a file asks while a failure's state is written", TWO, [*running(2, 4), (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "killed"), (froze(0, 4), "dumping", f"save 4 by 0; {PROGRESS}", "step 4"), (wish(), "dumping"), (ask(SIGTERM), "dumping"), (ask(SIGTERM), "killing", "abandon; KILL 0; deadline killing 10", "again")]),
    ("who catches the signal that makes room for a restart asks for nothing", TWO, [*running(2, 4), (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "killed"), (froze(0, 4, "torn"), "stopping", "abandon; TERM 0; deadline stopping 30", "torn"), (wish(0), "stopping", "dismiss 0", "rank 0 caught the signal"), (gone(0, -15), "starting", "sweep; start 1; deadline starting 600", "restart 1 of 3")]),
    ("a file that asks then is heard", TWO, [*running(2, 4), (gone(1, -9), "freezing", "freeze 1: 0; deadline freezing 15", "killed"), (froze(0, 4, "torn"), "stopping", "abandon; TERM 0; deadline stopping 30", "torn"), (wish(0), "stopping", "dismiss 0", "rank 0 caught the signal"), (wish(), "stopping"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "e.json asks for it")]),
    # --- at once
    ("now, while training", TWO, [*running(2, 4), (now(), "killing", "KILL 0,1; deadline killing 10", "msrun stop --now")]),
    ("now, while starting", TWO, [BEGIN, (up(0), "starting"), (now(), "killing", "KILL 0; cancel now; deadline killing 10", "msrun stop --now"), (now(), "killing")]),
    ("now, while holding", TWO, [*AGREED, (now(), "killing", "KILL 0,1; deadline killing 10", "msrun stop --now"), (stands(0, 9), "killing"), (froze(0, 6), "killing")]),
]  # fmt: skip
