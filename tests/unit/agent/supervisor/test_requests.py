"""Who is meant by a signal: the node whose msrun gets it, or the whole job."""

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1
from types import SimpleNamespace

import pytest

from agent.records.stop_note import StopNote, write_note
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind
from agent.supervisor.requests import Requests

PROGRAM = Program("train.py", (), ProgramKind.SCRIPT, "python")
MAY_LEAVE = ClusterSpec(3, least=1, leaves=True)


def asked(folder, signum, cluster, graceful=(SIGUSR1,)):
    """What this signal to the msrun of node 1 asks for."""
    spec = JobSpec(
        PROGRAM,
        2,
        "r",
        "r",
        cluster=cluster,
        nodes=(2, 2, 2),
        node_rank=1,
        graceful_signals=graceful,
    )
    events = []
    requests = Requests(spec, folder, 0.0, print)
    loop = SimpleNamespace(add_signal_handler=lambda *_: None, call_soon_threadsafe=lambda *_: None)
    requests.attach(loop, events.append, lambda: 0)
    requests._on_stop(signum)
    return events[0]


@pytest.mark.parametrize(
    ("signum", "leaves"), [(SIGTERM, True), (SIGUSR1, True), (SIGINT, False), (SIGHUP, False)]
)
def test_a_batch_system_means_the_node_and_a_person_at_the_keyboard_the_job(
    tmp_path, signum, leaves
):
    event = asked(tmp_path, signum, MAY_LEAVE)
    assert (event.leaves, event.node) == (leaves, 1)


@pytest.mark.parametrize("signum", [SIGINT, SIGQUIT])
def test_a_key_means_the_job_although_it_asks_for_a_graceful_exit(tmp_path, signum):
    event = asked(tmp_path, signum, MAY_LEAVE, graceful=(signum,))
    assert (event.leaves, event.passes) == (False, False)


@pytest.mark.parametrize("cluster", [None, ClusterSpec(3, least=1)])
def test_without_the_option_every_signal_means_the_job(tmp_path, cluster):
    assert not asked(tmp_path, SIGTERM, cluster).leaves


@pytest.mark.parametrize("is_now", [True, False])
def test_msrun_stop_means_the_job(tmp_path, is_now):
    write_note(tmp_path, StopNote(is_now=is_now))
    event = asked(tmp_path, SIGTERM, MAY_LEAVE)
    assert (event.leaves, event.is_now) == (False, is_now)
