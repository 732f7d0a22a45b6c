"""Histories as rows: what happened, and what the controller must do about it and say.

A row is a name, the rules, and steps. A step is an event, the state after it, the actions in short
(`TERM 0,2; deadline stopping 30`) and words that every reason given in that step must contain.
"""

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState
from support.histories.short import shorts
from support.policies import policy
from worker_hooks.contract import protocol


def rules(**changes):
    """Of a job whose ranks are not replaced, unless that is said."""
    return policy(**{"kill_s": 10.0, "is_on": False, **changes})


ONE, TWO, THREE = rules(ranks=(0,)), rules(), rules(ranks=(0, 1, 2))
ONE_AGAIN, TWO_AGAIN = rules(ranks=(0,), max_restarts=1), rules(max_restarts=1)


def launch():
    return ev.LaunchRequested()


def up(rank, attempt=0):
    return ev.WorkerStarted(rank, attempt, 100 + rank)


def gone(rank, exit_code, attempt=0, error=""):
    return ev.WorkerExited(rank, attempt, exit_code, error=error)


def no_start(rank, attempt=0, why="no memory"):
    return ev.StartFailed(rank, attempt, why)


def ask(signum):
    return ev.StopRequested(signum)


def wish(rank=None, attempt=0):
    """A file asks for a graceful exit, or a rank."""
    if rank is None:
        return ev.ExitRequestedByFile(attempt, "e.json asks for it")
    return protocol.ExitRequested(rank, attempt, f"rank {rank} received SIGUSR1")


def tell(signum):
    return ev.SignalReceived(signum)


def late(state, attempt=0):
    return ev.DeadlinePassed(JobState(state), attempt)


BEGIN = (launch(), "starting", "start 0; deadline starting 600", "the job begins")
STARTED = [BEGIN, (up(0), "running")]
STARTED_2 = [BEGIN, (up(0), "starting"), (up(1), "running")]
STARTED_3 = [BEGIN, (up(0), "starting"), (up(1), "starting"), (up(2), "running")]
AGAIN = "sweep; start 1; deadline starting 600"
STOP_2 = "TERM 0,1; deadline stopping 30"
KILL_2 = "KILL 0,1; deadline killing 10"
FAILING = [  # rank 1 of two died, rank 0 is being stopped for it
    *STARTED_2,
    (gone(1, -9), "stopping", "TERM 0; deadline stopping 30", "rank 1 was killed by SIGKILL"),
]
STUCK = [  # and rank 0 cannot be killed
    *FAILING,
    (late("stopping"), "killing", "KILL 0; deadline killing 10", "rank 0 still alive 30 s"),
]

HISTORIES = [
    # --- success
    ("one rank succeeds", ONE, [*STARTED, (gone(0, 0), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0")]),
    ("ranks may succeed long after one another", TWO, [
        *STARTED_2, (gone(1, 0), "running"), (gone(0, 0), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0")]),
    ("a rank may leave with 0 before the last one has started", TWO, [
        BEGIN, (up(0), "starting"), (gone(0, 0), "starting"), (up(1), "running"),
        (gone(1, 0), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0")]),
    # --- the first failure is the reason for everything after it
    ("one rank fails", ONE, [*STARTED, (gone(0, 3), "failed", "sweep; finish failed 1", "rank 0 exited with code 3")]),
    ("the others are stopped when one fails", THREE, [
        *STARTED_3, (gone(1, -11), "stopping", "TERM 0,2; deadline stopping 30", "rank 1 was killed by SIGSEGV"),
        (gone(0, -15), "stopping"), (gone(2, -15), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGSEGV")]),
    ("later failures are consequences", THREE, [
        *STARTED_3, (gone(2, 7), "stopping", "TERM 0,1; deadline stopping 30", "rank 2 exited with code 7"),
        (gone(0, 1), "stopping"), (gone(1, -6), "failed", "sweep; finish failed 1", "rank 2 exited with code 7")]),
    ("a rank that exited with 0 is not stopped", THREE, [
        *STARTED_3, (gone(0, 0), "running"), (gone(1, 1), "stopping", "TERM 2; deadline stopping 30", "rank 1 exited with code 1"),
        (gone(2, 0), "failed", "sweep; finish failed 1", "rank 1 exited with code 1")]),
    ("a failure before all have started calls the rest off", THREE, [
        BEGIN, (up(0), "starting"), (up(1), "starting"),
        (gone(0, 1), "stopping", "TERM 1; cancel; deadline stopping 30", "rank 0 exited with code 1"),
        (no_start(2), "stopping"), (gone(1, -15), "failed", "sweep; finish failed 1", "rank 0 exited with code 1")]),
    ("who does not leave in time is killed", TWO, [
        *STUCK, (gone(0, -9), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGKILL")]),
    ("the second of two deaths at once is not a second failure", TWO_AGAIN, [
        *FAILING, (gone(0, -9), "starting", AGAIN, "rank 1 was killed by SIGKILL")]),
    # --- restarts
    ("a failure is restarted while the budget allows", rules(ranks=(0,), max_restarts=2), [
        *STARTED, (gone(0, 1), "starting", AGAIN, "restart 1 of 2: rank 0 exited with code 1"),
        (up(0, 1), "running"), (gone(0, -6, 1), "starting", "sweep; start 2; deadline starting 600", "restart 2 of 2: rank 0 was killed by SIGABRT"),
        (up(0, 2), "running"), (gone(0, 4, 2), "failed", "sweep; finish failed 1", "rank 0 exited with code 4 (all 2 restarts are spent)")]),
    ("a restarted job can succeed", TWO_AGAIN, [
        *FAILING, (gone(0, -15), "starting", AGAIN, "restart 1 of 1: rank 1 was killed by SIGKILL"),
        (up(1, 1), "starting"), (up(0, 1), "running"), (gone(0, 0, 1), "running"),
        (gone(1, 0, 1), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0")]),
    ("no attempt begins before the last rank is gone", rules(ranks=(0, 1, 2), max_restarts=1), [
        *STARTED_3, (gone(2, 1), "stopping", "TERM 0,1; deadline stopping 30", "rank 2 exited with code 1"),
        (gone(0, -15), "stopping"), (late("stopping"), "killing", "KILL 1; deadline killing 10", "rank 1 still alive 30 s"),
        (gone(1, -9), "starting", AGAIN, "restart 1 of 1: rank 2 exited with code 1")]),
    ("the last rank of a nearly finished attempt can fail", TWO_AGAIN, [
        *STARTED_2, (gone(0, 0), "running"), (gone(1, 1), "starting", AGAIN, "restart 1 of 1: rank 1 exited with code 1")]),
    # --- starts that fail or take too long
    ("the only rank cannot be started", ONE, [
        BEGIN, (no_start(0), "failed", "sweep; finish failed 1", "rank 0 could not be started: no memory")]),
    ("a start that failed is restarted, too", ONE_AGAIN, [
        BEGIN, (no_start(0), "starting", AGAIN, "restart 1 of 1: rank 0 could not be started: no memory"), (up(0, 1), "running")]),
    ("one start fails, the others are called off or stopped", THREE, [
        BEGIN, (up(0), "starting"), (no_start(1), "stopping", "TERM 0; cancel; deadline stopping 30", "rank 1 could not be started: no memory"),
        (no_start(2, why="called off"), "stopping"), (gone(0, -15), "failed", "sweep; finish failed 1", "rank 1 could not be started: no memory")]),
    ("every start fails", TWO, [
        BEGIN, (no_start(1), "stopping", "cancel; deadline stopping 30", "rank 1 could not be started: no memory"),
        (no_start(0, why="called off"), "failed", "sweep; finish failed 1", "rank 1 could not be started: no memory")]),
    ("a start that was called off ends a failed attempt, and the budget is left", TWO_AGAIN, [
        BEGIN, (up(0), "starting"), (gone(0, 1), "stopping", "cancel; deadline stopping 30", "rank 0 exited with code 1"),
        (no_start(1, why="called off"), "starting", AGAIN, "restart 1 of 1: rank 0 exited with code 1")]),
    ("a start fails after the others have exited with 0", TWO_AGAIN, [
        BEGIN, (up(0), "starting"), (gone(0, 0), "starting"), (no_start(1), "starting", AGAIN, "rank 1 could not be started: no memory")]),
    ("a rank does not start in time", THREE, [
        BEGIN, (up(1), "starting"), (late("starting"), "stopping", "TERM 1; cancel; deadline stopping 30", "ranks 0, 2 did not start within 600 s (--cluster-time-out)"),
        (no_start(0), "stopping"), (no_start(2), "stopping"),
        (gone(1, -15), "failed", "sweep; finish failed 1", "ranks 0, 2 did not start within 600 s")]),
    ("a start that is never answered ends, too", ONE, [
        BEGIN, (late("starting"), "stopping", "cancel; deadline stopping 30", "rank 0 did not start within 600 s"),
        (late("stopping"), "killing", "cancel now; deadline killing 10", "rank 0 still alive 30 s"),
        (late("killing"), "failed", "sweep; finish failed 1", "rank 0 did not start within 600 s (--cluster-time-out); rank 0 cannot be killed")]),
    ("without --cluster-time-out starts may take for ever", rules(ranks=(0,), start_s=None), [
        (launch(), "starting", "start 0; deadline starting -", "the job begins"), (up(0), "running")]),
    ("a late start while stopping is stopped with the same signal", TWO, [
        BEGIN, (up(0), "starting"), (ask(SIGINT), "stopping", "INT 0; cancel; deadline stopping 30", "msrun received SIGINT"),
        (up(1), "stopping", "INT 1", "rank 1 came to life while the job is stopping"), (gone(0, -2), "stopping"),
        (gone(1, -2), "stopped", "sweep; finish stopped 130", "stopped by SIGINT")]),
    ("a late start while killing is killed", TWO, [
        BEGIN, (up(0), "starting"), (ask(SIGTERM), "stopping", "TERM 0; cancel; deadline stopping 30", "msrun received SIGTERM"),
        (ask(SIGTERM), "killing", "KILL 0; cancel now; deadline killing 10", "msrun received SIGTERM again"),
        (up(1), "killing", "KILL 1", "rank 1 came to life while the job is killing"), (gone(1, -9), "killing"),
        (gone(0, -9), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("after a failed attempt the late start is stopped politely", TWO_AGAIN, [
        BEGIN, (up(0), "starting"), (gone(0, 1), "stopping", "cancel; deadline stopping 30", "rank 0 exited with code 1"),
        (up(1), "stopping", "TERM 1", "rank 1 came to life"), (gone(1, -15), "starting", AGAIN, "restart 1 of 1: rank 0 exited with code 1")]),
    # --- requests to stop
    *((f"{signum.name} stops every rank and msrun leaves with {128 + signum}", TWO_AGAIN, [
        *STARTED_2, (ask(signum), "stopping", f"{signum.name[3:]} 0,1; deadline stopping 30", f"msrun received {signum.name}"),
        (gone(0, -signum), "stopping"), (gone(1, 1), "stopped", f"sweep; finish stopped {128 + signum}", f"stopped by {signum.name}")])
      for signum in (SIGTERM, SIGINT, SIGHUP, SIGQUIT)),
    ("ranks that leave with 0 when told to do not make it a success", TWO, [
        *STARTED_2, (ask(SIGTERM), "stopping", STOP_2, "msrun received SIGTERM"), (gone(1, 0), "stopping"),
        (gone(0, 0), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("the second request means now, the third changes nothing", TWO, [
        *STARTED_2, (ask(SIGINT), "stopping", "INT 0,1; deadline stopping 30", "msrun received SIGINT"),
        (ask(SIGTERM), "killing", KILL_2, "msrun received SIGTERM again"), (ask(SIGTERM), "killing"),
        (gone(0, -9), "killing"), (gone(1, -9), "stopped", "sweep; finish stopped 130", "stopped by SIGINT")]),
    ("a polite request that is not heard ends in a kill", TWO, [
        *STARTED_2, (ask(SIGTERM), "stopping", STOP_2, "msrun received SIGTERM"), (gone(0, -15), "stopping"),
        (late("stopping"), "killing", "KILL 1; deadline killing 10", "rank 1 still alive 30 s after the signal"),
        (gone(1, -9), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("a request while the ranks of a failure are stopped: no restart follows", TWO_AGAIN, [
        *FAILING, (ask(SIGTERM), "stopping"), (gone(0, -15), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("two requests while the ranks of a failure are stopped: now", TWO_AGAIN, [
        *FAILING, (ask(SIGINT), "stopping"), (ask(SIGINT), "killing", "KILL 0; deadline killing 10", "msrun received SIGINT again"),
        (gone(0, -9), "stopped", "sweep; finish stopped 130", "stopped by SIGINT")]),
    ("a request while the ranks of a failure are killed: no restart follows", TWO_AGAIN, [
        *STUCK, (ask(SIGHUP), "killing"), (ask(SIGINT), "killing"), (gone(0, -9), "stopped", "sweep; finish stopped 129", "stopped by SIGHUP")]),
    ("a request before anything has started", TWO, [
        BEGIN, (ask(SIGTERM), "stopping", "cancel; deadline stopping 30", "msrun received SIGTERM"),
        (no_start(0), "stopping"), (no_start(1), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    ("a request in the restart of a job", TWO_AGAIN, [
        *FAILING, (gone(0, -15), "starting", AGAIN, "restart 1 of 1"),
        (ask(SIGTERM), "stopping", "cancel; deadline stopping 30", "msrun received SIGTERM"),
        (no_start(0, 1), "stopping"), (no_start(1, 1), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    # --- what is killed after its start was never answered, or answered late
    ("a start is called off only while the others are killed, and the budget is left", TWO_AGAIN, [
        BEGIN, (up(0), "starting"), (gone(0, 1), "stopping", "cancel; deadline stopping 30", "rank 0 exited with code 1"),
        (late("stopping"), "killing", "cancel now; deadline killing 10", "rank 1 still alive 30 s"), (no_start(1), "starting", AGAIN, "restart 1 of 1: rank 0 exited")]),
    ("a start is called off only while the others are killed, and the budget is spent", TWO, [
        BEGIN, (up(0), "starting"), (gone(0, 1), "stopping", "cancel; deadline stopping 30", "rank 0 exited with code 1"),
        (late("stopping"), "killing", "cancel now; deadline killing 10", "rank 1 still alive 30 s"), (no_start(1), "failed", "sweep; finish failed 1", "rank 0 exited with code 1")]),
    ("starts are called off only while killing by request", TWO, [
        BEGIN, (ask(SIGTERM), "stopping", "cancel; deadline stopping 30", "msrun received SIGTERM"),
        (ask(SIGTERM), "killing", "cancel now; deadline killing 10", "msrun received SIGTERM again"), (no_start(0), "killing"),
        (no_start(1), "stopped", "sweep; finish stopped 143", "stopped by SIGTERM")]),
    # --- signals that are for the workers
    ("SIGUSR1 is passed on, and nothing else", TWO, [
        *STARTED_2, (tell(SIGUSR1), "running", "USR1 0,1", "msrun received SIGUSR1, which is for the workers")]),
    ("SIGUSR2 goes to the ranks that exist", THREE, [
        BEGIN, (tell(SIGUSR2), "starting"), (up(0), "starting"), (up(1), "starting"), (gone(1, 0), "starting"),
        (tell(SIGUSR2), "starting", "USR2 0", "for the workers")]),
    ("SIGUSR1 is passed on while stopping and killing", TWO, [
        *FAILING, (tell(SIGUSR1), "stopping", "USR1 0", "for the workers"),
        (late("stopping"), "killing", "KILL 0; deadline killing 10", "rank 0 still alive"), (tell(SIGUSR1), "killing", "USR1 0", "for the workers")]),
    # --- what cannot be killed
    ("a rank that cannot be killed: no restart, and the report says both", TWO_AGAIN, [
        *STUCK, (late("killing"), "failed", "sweep; finish failed 1", "rank 1 was killed by SIGKILL; rank 0 cannot be killed (waited 10 s)")]),
    ("ranks that cannot be killed after a request", TWO, [
        *STARTED_2, (ask(SIGTERM), "stopping", STOP_2, "msrun received SIGTERM"), (late("stopping"), "killing", KILL_2, "ranks 0, 1 still alive"),
        (late("killing"), "failed", "sweep; finish failed 1", "ranks 0, 1 cannot be killed (waited 10 s)")]),
    # --- news that are old
    ("news of an earlier attempt change nothing", TWO_AGAIN, [
        *FAILING, (gone(0, -15), "starting", AGAIN, "restart 1 of 1"), (up(0, 1), "starting"), (gone(0, -15), "starting"),
        (no_start(1), "starting"), (up(1), "starting"), (late("stopping"), "starting"), (late("starting"), "starting"), (up(1, 1), "running")]),
    ("news that were told before change nothing", TWO, [
        *STARTED_2, (up(0), "running"), (gone(0, 0), "running"), (gone(0, 0), "running"), (gone(0, 1), "running"), (up(0), "running"), (no_start(0), "running")]),
    ("the deadline of a state that was left changes nothing", TWO, [
        *STARTED_2, (late("starting"), "running"), (ask(SIGTERM), "stopping", STOP_2, "msrun received SIGTERM"), (late("starting"), "stopping"),
        (late("killing"), "stopping"), (ask(SIGTERM), "killing", KILL_2, "again"), (late("stopping"), "killing")]),
    ("after the end nothing changes anything", ONE_AGAIN, [
        *STARTED, (gone(0, 0), "succeeded", "sweep; finish succeeded 0", "every rank exited with 0"), (gone(0, 1), "succeeded"), (up(0), "succeeded"),
        (ask(SIGTERM), "succeeded"), (tell(SIGUSR1), "succeeded"), (late("starting"), "succeeded"), (launch(), "succeeded")]),
]  # fmt: skip


def replay(asked, events, **known):
    """The job after these events, from its beginning."""
    return replay_from(Job(asked, **known), events)


def replay_from(job, events):
    for event in events:
        job = decide(job, event).job
    return job


def play(asked, steps):
    """Every step of a history, as its row says; the job at its end."""
    job = Job(asked)
    for event, state, *told in steps:
        actions, words = (*told, None)[:2] if told else ("", None)
        decision = decide(job, event)
        assert decision.job.state.value == state, event
        assert shorts(decision.actions) == actions, event
        for action in decision.actions:
            assert isinstance(action, do.SetDeadline | do.WarmUp) or words in action.reason, event
        if not decision.actions and decision.job.state.is_end:
            assert decision.job == job, event
        job = decision.job
    return job
