"""Histories of restarts: which attempts follow, and which checkpoint cannot be resumed from."""

from signal import SIGTERM

from agent.controller import events as ev
from support.histories.dumps import (
    AGAIN,
    ONE_LEFT,
    SAVED,
    done,
    froze,
    holds,
    reg,
    running,
    wrote,
)
from support.histories.plain import (
    BEGIN,
    STARTED,
    STARTED_2,
    STARTED_3,
    ask,
    gone,
    late,
    launch,
    no_start,
    rules,
    up,
)

THREE_AGAIN, TWO_AGAIN = rules(ranks=(0, 1, 2), max_restarts=3), rules(max_restarts=3)
HISTORIES = [
    ("a failure before the first commit is not retried unasked", rules(max_restarts=3, restarts_explicit=False), [
        *ONE_LEFT, (froze(0, 0), "stopping", "abandon; TERM 0; deadline stopping 30", "nothing to save"),
        (gone(0, -15), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGKILL, before the first commit, so a restart would meet the same: give --max-restarts to try nevertheless")]),
    ("without hooks it is retried", rules(max_restarts=3, restarts_explicit=False), [*STARTED_2, (gone(0, 1), "stopping", "TERM 1; deadline stopping 30", "code 1"), (gone(1, -15), "starting", AGAIN, "restart 1 of 3")]),
    *((f"no attempt helps; {words}", rules(max_restarts=1, stalls=0), [(launch(), "starting", "start 0; deadline starting 600", "begins"), (up(0), "starting"), (reg(0, 3), "starting"), *steps,
        (no_start(1), "failed", "sweep; finish failed 1", "0 attempts in a row reached no commit after step 3; step 3 is not saved")])
      for words, steps in (
          ("a start fails after the others left", [(gone(0, 0), "starting")]),
          ("a start is called off while stopping", [(gone(0, 1), "stopping", "cancel; deadline stopping 30", "code 1")]),
          ("a start is called off while killing", [(gone(0, 1), "stopping", "cancel; deadline stopping 30", "code 1"), (late("stopping"), "killing", "cancel now; deadline killing 10", "alive")]))),
    ("no attempt helps; the only rank dies", rules(ranks=(0,), max_restarts=1, stalls=0), [
        (launch(), "starting", "start 0; deadline starting 600", "begins"), (up(0), "running"), (reg(0, 3), "running"), (gone(0, -9), "failed", "sweep; finish failed 1", "step 3 is not saved: no rank can be asked: rank 0 ended")]),
    ("no attempt helps; a rank is killed", rules(max_restarts=1, stalls=0), [
        *SAVED[:1], (up(0), "starting"), (reg(0), "starting"), (ask(SIGTERM), "stopping", "TERM 0; cancel; deadline stopping 30", "SIGTERM"), (up(1), "stopping", "TERM 1", "rank 1 came to life"), (late("stopping"), "killing", "KILL 0,1; deadline killing 10", "alive"),
        (gone(0, -9), "killing"), (gone(1, -9), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM; no step was committed")]),
    ("no attempt helps; the last one is killed", rules(max_restarts=1, stalls=0), [
        *ONE_LEFT, (froze(0, 0), "stopping", "abandon; TERM 0; deadline stopping 30", "nothing"), (late("stopping"), "killing", "KILL 0; deadline killing 10", "alive"),
        (gone(0, -9), "failed", "sweep; finish failed 1", "1 attempts in a row reached no commit; no step was committed yet")]),
]  # fmt: skip


def found(attempt=0, path="/old", step=7):
    return ev.CheckpointFound(attempt, path, step)


def refused(*ranks, attempt=0):
    return ev.StartRefused(attempt, "no checkpoint can be trusted", ranks)


ASKED = [
    ("who asked is told why, the others are stopped, and nothing is tried again", THREE_AGAIN, [
        *STARTED_3, (refused(0, 2), "stopping", "refuse 0,2; TERM 1; deadline stopping 30", "no checkpoint can be trusted"),
        (gone(0, 2), "stopping"), (refused(0, 2), "stopping"), (gone(1, -15), "stopping"), (gone(2, 2), "failed", "sweep; finish failed 2", "no checkpoint can be trusted")]),
    ("a refusal before all have started calls the rest off", THREE_AGAIN, [
        *STARTED_3[:2], (refused(0), "stopping", "refuse 0; cancel; deadline stopping 30", "no checkpoint can be trusted"),
        (no_start(1), "stopping"), (no_start(2), "stopping"), (gone(0, 2), "failed", "sweep; finish failed 2", "no checkpoint can be trusted")]),
    ("a rank may ask before its start is announced", THREE_AGAIN, [
        *STARTED_3[:3], (refused(2), "stopping", "refuse 2; TERM 0,1; deadline stopping 30", "no checkpoint can be trusted"), (up(2), "stopping")]),
    ("who asked may be gone when the answer is known", THREE_AGAIN, [
        *STARTED_3, (gone(0, 0), "running"), (refused(0), "stopping", "TERM 1,2; deadline stopping 30", "no checkpoint can be trusted")]),
    ("who is refused and does not leave is killed", rules(ranks=(0,), max_restarts=3), [
        *STARTED, (refused(0), "stopping", "refuse 0; deadline stopping 30", "no checkpoint"), (late("stopping"), "killing", "KILL 0; deadline killing 10", "still alive"),
        (gone(0, -9), "failed", "sweep; finish failed 2", "no checkpoint can be trusted")]),
    ("a stop that was asked for counts more than a refusal", rules(ranks=(0,), max_restarts=3), [
        *STARTED, (refused(0), "stopping", "refuse 0; deadline stopping 30", "no checkpoint"), (ask(SIGTERM), "stopping"), (gone(0, 2), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("a refusal while a failure is cleared away changes nothing", rules(max_restarts=1), [
        *STARTED_2, (gone(1, -9), "stopping", "TERM 0; deadline stopping 30", "killed"), (refused(0), "stopping"), (gone(0, -15), "starting", AGAIN, "restart 1 of 1"), (refused(0), "starting")]),
]  # fmt: skip


NODE_GONE = "node 1 (b) is gone: its msrun closed the line"
FOUR_AGAIN = rules(ranks=(0, 1, 2, 3), max_restarts=3)  # 2 and 3 on another node than the others
STARTED_4 = [BEGIN, *((up(rank), "starting") for rank in (0, 1, 2)), (up(3), "running")]
TERM_01 = "TERM 0,1; deadline stopping 30"


def lost(rank, attempt=0):
    """Its node is gone, and nobody saw it end."""
    return ev.WorkerExited(rank, attempt, -9, lost=NODE_GONE)


def not_there(rank, attempt=0):
    return ev.StartFailed(rank, attempt, NODE_GONE, lost=NODE_GONE)


LOST_NODES = [
    ("survivors of a lost node save the step, and nothing is tried without it", FOUR_AGAIN, [
        *running(4), (lost(2), "freezing", "freeze 1: 0,1,3; deadline freezing 15", "rank 2 is lost: node 1 (b) is gone"), (lost(3), "freezing"),
        (froze(0), "freezing"), (froze(1), "dumping", "save 5 by 0 digest 1; deadline dumping 20", "step 5 is the newest"), (wrote(0), "dumping", "deadline dumping 20"),
        (holds(1), "committing", "commit 5 by 0; deadline committing 20", "step 5 is written by rank 0"), (done(), "stopping", TERM_01, "rank 2 is lost: node 1 (b) is gone: its msrun closed the line; step 5 is saved in /d"),
        (gone(0, -15), "stopping"), (gone(1, -15), "failed", "sweep; finish failed 1", "the job needs all its nodes, and none has taken the place of the lost one; step 5 is saved in /d")]),
    ("without hooks nothing is tried without it either", FOUR_AGAIN, [
        *STARTED_4, (lost(3), "stopping", "TERM 0,1,2; deadline stopping 30", "rank 3 is lost: node 1 (b) is gone"), (lost(2), "stopping"),
        (gone(1, -15), "stopping"), (gone(0, -15), "failed", "sweep; finish failed 1", "rank 3 is lost: node 1 (b) is gone: its msrun closed the line: the job needs all its nodes")]),
    ("a node is lost before its ranks have started", FOUR_AGAIN, [
        *STARTED_4[:3], (not_there(2), "stopping", "TERM 0,1; cancel; deadline stopping 30", "rank 2 could not be started: node 1 (b) is gone"), (not_there(3), "stopping"),
        (gone(1, -15), "stopping"), (gone(0, -15), "failed", "sweep; finish failed 1", "the job needs all its nodes")]),
    ("a node whose ranks had ended is missed by the restart", FOUR_AGAIN, [
        *STARTED_4, (gone(2, 0), "running"), (gone(3, 0), "running"), (gone(1, 1), "stopping", "TERM 0; deadline stopping 30", "rank 1 exited with code 1"),
        (gone(0, -15), "starting", AGAIN, "restart 1 of 3"), (not_there(2, 1), "stopping", "cancel; deadline stopping 30", "rank 2 could not be started: node 1"), (not_there(3, 1), "stopping"),
        (no_start(0, 1), "stopping"), (no_start(1, 1), "failed", "sweep; finish failed 1", "the job needs all its nodes")]),
    ("a node that is lost after a failure ends the job, too", FOUR_AGAIN, [
        *STARTED_4, (gone(0, 1), "stopping", "TERM 1,2,3; deadline stopping 30", "rank 0 exited with code 1"), (lost(2), "stopping"), (lost(3), "stopping"),
        (gone(1, -15), "failed", "sweep; finish failed 1", "rank 0 exited with code 1: the job needs all its nodes")]),
    ("a stop that was asked for counts more than a lost node", FOUR_AGAIN, [
        *STARTED_4, (ask(SIGTERM), "stopping", "TERM 0,1,2,3; deadline stopping 30", "msrun received SIGTERM"), (lost(2), "stopping"), (lost(3), "stopping"),
        (gone(1, -15), "stopping"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
]  # fmt: skip
