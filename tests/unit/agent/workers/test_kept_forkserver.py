"""A forkserver that starts the ranks of one run after the other."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.forkserver import server
from agent.forkserver.adoption import AdoptionResult
from agent.launch import prepare
from agent.launch.prepare import StartedForkserver, start_forkserver
from agent.spec.job_spec import JobSpec, LogSpec, Program, ProgramKind
from agent.workers import starter as starters
from agent.workers.forkserver_client import ForkserverClient
from agent.workers.starter import Starter
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import JOB, OMP_NUM_THREADS, RUNS
from worker_hooks.contract.layout import RunLayout

ORDER = protocol.WorkerOrder(0, ("python", "train.py"), {}, "", "")


@pytest.fixture
def forkserver():
    """The agent's side of one that is there; ``theirs``: what it would read."""
    client = ForkserverClient(None, {"A": "1", RUNS: "before"}, "before", None, is_ours=True)
    client.link, client.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.link.setblocking(False)
    client.ready = True
    yield client
    client.forget()
    client.theirs.close()


@pytest.fixture
def starter(forkserver, monkeypatch):
    monkeypatch.setattr(starters, "is_stopped", lambda _: False)
    loop, listener = asyncio.new_event_loop(), socket.create_server(("127.0.0.1", 0))
    journal = SimpleNamespace(event=lambda *_, **__: None)
    made = Starter(forkserver, listener, journal, lambda _: None)
    made.attach(loop, lambda _: None, lambda _: None)
    yield made
    made.close()
    loop.close()
    listener.close()


def heard(forkserver):
    """What it is told; ``None``: to end."""
    return wire.receive(forkserver.theirs)[0]


def test_it_outlives_a_run_and_forgets_its_ranks(starter, forkserver):
    assert starter.keep()
    starter.close()
    assert starter.kept() is forkserver
    assert starter.spared == {forkserver.pid}
    assert heard(forkserver) == protocol.StartWorkers(-1, ())


def test_it_ends_with_a_run_that_is_the_last(starter, forkserver):
    starter.close()
    assert starter.kept() is None
    assert starter.spared == frozenset()
    assert heard(forkserver) is None


def test_one_that_is_at_work_or_unfit_starts_no_rank_of_another_run(
    starter, forkserver, monkeypatch
):
    forkserver.ready = False
    assert not starter.keep()
    forkserver.ready = True
    starter.start(0, (ORDER,))  # it may be stuck in that
    assert not starter.keep()
    starter._on_message(protocol.Forked(0, 0, 7))
    assert starter.keep()
    monkeypatch.setattr(starters, "is_stopped", lambda _: True)
    assert not starter.keep()


def test_one_that_has_died_meanwhile_is_not_kept(starter, forkserver):
    assert starter.keep()
    forkserver.theirs.close()
    assert starter.kept() is None


def test_it_spares_nobody_of_the_run_before(monkeypatch):
    """Their process ids may be those of others by now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = []
    monkeypatch.setattr(server, "end_orphans", lambda *told: ended.append(told))
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    pids = iter((11, 12))
    monkeypatch.setattr(
        server,
        "_fork_workers",
        lambda _, order, *__: tuple(AdoptionResult(next(pids)) for _ in order.workers),
    )

    def leave(_):
        raise SystemExit

    monkeypatch.setattr(server.os, "_exit", leave)
    for message in (
        protocol.StartWorkers(0, (ORDER,)),
        protocol.ProtectWorker(11),
        protocol.StartWorkers(-1, ()),
        protocol.StartWorkers(0, (ORDER,)),
    ):
        wire.send(ours, message)
    ours.close()
    with theirs, pytest.raises(SystemExit):
        server._serve(theirs, server.Orders(fd=-1, agent_pid=1, record_id="before"))
    assert ended == [("before", frozenset({12}), frozenset())]


# --- the environment of the next run's ranks --------------------------------------------------


def next_run():
    program = Program("train.py", (), ProgramKind.SCRIPT, "python")
    logs = LogSpec(disabled=True)
    spec = JobSpec(program=program, nproc=1, run_id="next", record_id="next", logs=logs)
    layout = RunLayout(Path("/logs"), "next", "next")
    return SimpleNamespace(spec=spec, port=1234, layout=layout, bindings=())


def used(forkserver):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0test-kept-forkserver")
    return StartedForkserver(forkserver, SimpleNamespace(warmth=None), listener, is_used=True)


def test_ranks_are_known_by_both_runs_and_controlled_by_none_of_the_past(forkserver, monkeypatch):
    """Processes are found by what was in the environment of the forkserver, as it began."""
    monkeypatch.setattr(prepare.signals, "hold", lambda _: None)
    forkserver.know({JOB: "before"})
    early = used(forkserver)
    with early.hooks_listener:
        started = start_forkserver(next_run(), {"A": "1"}, "", early)
    assert started.forkserver is forkserver
    assert started.environ[RUNS] == "before:next"
    assert started.environ[JOB] == ""
    assert forkserver.environ.items() >= started.environ.items()


def test_a_variable_that_only_the_past_had_takes_another_forkserver(forkserver, monkeypatch):
    """Ranks have what it began with."""

    class AnewError(Exception):
        pass

    def start(*_):
        raise AnewError

    forkserver.know({OMP_NUM_THREADS: "1"})
    monkeypatch.setattr(prepare, "_hooks_listener", start)
    with pytest.raises(AnewError):
        start_forkserver(next_run(), {"A": "1"}, "", used(forkserver))
    assert forkserver.link is None


# --- the stores of all nodes ------------------------------------------------------------------------


def test_the_stores_move_to_another_node(starter):
    starter.meet_at(4000)
    assert (starter.port, starter.moved) == (4000, {})
    starter.move(4100, "10.0.0.2")
    assert starter.port == 4100
    assert (starter.moved["MASTER_ADDR"], starter.moved["MASTER_PORT"]) == ("10.0.0.2", "4100")


def test_the_stores_of_all_nodes_are_taken_over(starter):
    """Whoever decides for all begins an attempt first, then this node hears the same order."""
    starter.meet_at(4000)  # where they were
    listener = socket.create_server(("127.0.0.1", 0))
    port = starter.take_stores(listener, "10.0.0.1")
    assert port == listener.getsockname()[1]
    assert (starter.moved["MASTER_ADDR"], starter.moved["MASTER_PORT"]) == ("10.0.0.1", str(port))
    reserved = starter.reserve(5)
    assert starter.reserve(5) == starter.reserved_port == reserved != 4000
    starter.renew(5, ())
    assert starter.port == reserved
    starter.meet_at(reserved)  # as the order says
    starter.renew(5, ())
    assert starter.port == reserved
    starter.renew(6, ())
    assert starter.port not in {reserved, 4000}
