"""The seat of a job as nodes use it: who is met where, node 0 that keeps it, a node that asks for it."""

import asyncio
import socket
import time

import pytest
from support.fake_etcd import fake_etcd
from support.jobs import poll

from agent.machine.file_thread import FileThread
from agent.seat import job_seat as module
from agent.seat.etcd import Etcd
from agent.seat.job_seat import Whereabouts, claim_of, store_of, tenure_of
from agent.seat.records import NodeShare, Seat, SeatRecord, StoreError, Will
from agent.seat.rights import SuccessorRight
from agent.seat.store import SeatStore
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind, UsageError

OTHER = Seat("later", "mn1", "127.0.0.1", 41000, 8)
WILL = Will("lost", 2, "/ckpt/step_3")
JOB = JobSpec(
    Program("train.py", (), ProgramKind.SCRIPT, "python"),
    2,
    "record",
    "record",
    cluster=ClusterSpec(2),
    master_addr="mn0",
    master_port=29500,
)


@pytest.fixture
def etcd():
    with fake_etcd() as (made, port):
        made.job = JOB._replace(cluster=ClusterSpec(2, store=(("127.0.0.1", port),)))
        yield made


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_job_without_a_store_asks_nobody():
    assert store_of(JOB) is store_of(JOB._replace(cluster=None)) is None
    assert tenure_of(JOB, "record", 2, None, print) is None
    where = Whereabouts(JOB, print)
    where.check()
    assert where() is None
    assert not where.settle(lambda _: True)


def test_all_nodes_of_a_job_find_the_same_seat_also_where_node_0_is_another_one(etcd):
    cluster = etcd.job.cluster._replace(home=("mn0", 29500))
    later = etcd.job._replace(master_addr="mn1", master_port=41000, cluster=cluster)
    named = etcd.job._replace(run_id="mine")
    store_of(etcd.job).take(OTHER, WILL)
    assert store_of(later).look().seat == OTHER
    assert store_of(named).look().seat is None
    store_of(named).take(OTHER, WILL)
    assert store_of(named._replace(master_addr="10.0.0.1")).look().seat == OTHER


# --- where it is met ------------------------------------------------------------------------------


def test_who_comes_is_sent_to_who_has_the_seat(etcd, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    said = []
    where = Whereabouts(etcd.job, said.append)
    where.check()
    assert (where(), said) == (None, [])
    store = store_of(etcd.job)
    held = store.take(OTHER, WILL)
    assert where() == where() == ("127.0.0.1", 41000)
    assert said == ["the store says that mn1 (127.0.0.1:41000) controls this job"]
    etcd.odd = 500, b""
    assert where() == ("127.0.0.1", 41000)  # it may still be so
    etcd.odd = None
    store.leave(held, is_over=False)
    assert where() is None


def test_where_it_was_to_be_met_is_no_news(etcd):
    store_of(etcd.job).take(OTHER._replace(address="mn0", port=29500), WILL)
    where = Whereabouts(etcd.job, print)
    where.check()
    assert where() is None
    assert not where.settle(lambda _: True)


def test_a_store_that_is_not_there_is_a_wrong_request():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        at = gone.getsockname()[:2]
    job = JOB._replace(cluster=ClusterSpec(2, store=(at,)))
    why = f"--controller-store: the store at 127.0.0.1:{at[1]} does not answer"
    with pytest.raises(UsageError, match=why) as raised:
        Whereabouts(job, print).check()
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("host", ["a..b", " b", "x" * 64 + ".org"])
def test_a_name_that_is_none_is_a_wrong_request(host):
    job = JOB._replace(cluster=ClusterSpec(2, store=((host, 2379),)))
    with pytest.raises(UsageError, match="--controller-store: the store at") as raised:
        Whereabouts(job, print).check()
    assert raised.value.exit_code == 2


def test_what_an_earlier_run_saved_is_said_unless_it_is_resumed(etcd):
    store = store_of(etcd.job)
    store.leave(store.take(OTHER, WILL), is_over=False)
    said = []
    where = Whereabouts(etcd.job, said.append)
    where.check()
    assert not where.settle(lambda _: True)
    (sentence,) = said
    assert sentence.endswith("to go on from what it saved, add --resume=/ckpt/step_3")
    resumed = etcd.job._replace(dump=etcd.job.dump._replace(resume="/ckpt/step_3"))
    where = Whereabouts(resumed, pytest.fail)
    where.check()
    assert not where.settle(lambda _: True)


def test_node_0_goes_where_somebody_answers_and_waits_for_the_seat_of_the_dead(etcd, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "KNOCK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        store_of(etcd.job).take(OTHER._replace(port=port), WILL)
        where = Whereabouts(etcd.job, lambda _: None)
        where.check()
        assert where.settle(lambda _: False)
        own = etcd.job._replace(master_port=port)  # the seat of this machine's last run
        store_of(own).take(OTHER._replace(port=port), WILL)
        mine = Whereabouts(own, lambda _: None)
        mine.check()
        assert not mine.settle(lambda _: True)
    looks = []

    def look():
        looks.append(1)
        etcd.late_s += 4.0
        return where_now()

    where_now = where._store.look
    monkeypatch.setattr(where._store, "look", look)
    assert not where.settle(lambda host: host == "mn0")
    assert len(looks) >= 2
    assert where.settle(lambda _: False)  # this is not mn0: whoever takes the seat will tell where


# --- node 0 ---------------------------------------------------------------------------------------


def test_node_0_takes_the_seat_tells_all_and_leaves_nothing(etcd, loop):
    told, said, verdicts = [], [], []
    tenure = tenure_of(etcd.job, "record", 2, None, said.append)
    tenure.attach(loop, lambda node, action: told.append((node, action.term)))
    tenure.came("b")

    def turned(until):
        def turn():
            loop.call_later(0.01, loop.stop)
            loop.run_forever()
            return until()

        poll(turn)

    turned(lambda: told)
    first = tenure.held
    assert told == [("b", first.term)]
    seat = store_of(etcd.job).look().seat
    assert (seat.address, seat.port, seat.job) == ("mn0", 29500, "record")
    tenure.lost("b", is_silent=True)
    tenure.judge(NodeShare.HALF, lambda: verdicts.append("goes on"), verdicts.append)
    turned(lambda: verdicts)
    assert verdicts == ["goes on"]
    assert tenure.held.term != first.term
    late = claim_of(etcd.job, "record", 2, "", SuccessorRight(first.term))
    poll(lambda: late.look(NodeShare.HALF) or "goes on" in late.right.why_not(NodeShare.HALF))
    late.close()
    tenure.close(goes_on=False, is_done=True, saved="")
    assert store_of(etcd.job).look() == SeatRecord()
    assert said == []


def test_what_is_saved_stays_known_after_an_end_before_its_time(etcd, loop):
    tenure = tenure_of(etcd.job, "record", 2, store_of(etcd.job).take(OTHER, WILL), print)
    tenure.attach(loop, lambda *_: None)
    tenure.close(goes_on=False, is_done=False, saved="/ckpt/step_9")
    found = store_of(etcd.job).look()
    assert (found.seat, found.will) == (None, Will("record", 2, "/ckpt/step_9"))


def test_a_node_that_takes_node_0s_part_has_the_seat_for_what_follows(etcd, loop):
    term = store_of(etcd.job).take(OTHER, WILL).term
    claim = claim_of(etcd.job, "lost", 2, "/ckpt/step_3", SuccessorRight(term))
    claim.look(NodeShare.HALF)
    assert not claim.right.may_go_on(NodeShare.HALF)
    etcd.late_s += 11  # node 0 is silent for the store, too
    poll(lambda: claim.look(NodeShare.HALF) or claim.right.may_go_on(NodeShare.HALF))
    claim.close()
    tenure = tenure_of(etcd.job, "next", 2, claim.right.held, print)
    tenure.attach(loop, lambda *_: None)
    assert tenure.held == claim.right.held
    tenure.close(goes_on=True, is_done=False, saved="")
    assert store_of(etcd.job).look().seat is not None


def test_the_seat_is_given_back_where_nodes_meet_elsewhere(etcd):
    term = store_of(etcd.job).take(OTHER, WILL).term
    claim = claim_of(etcd.job, "lost", 2, "", SuccessorRight(term))
    poll(lambda: claim.look(NodeShare.MOST) or claim.right.held)
    claim.close(is_given_back=True)
    poll(lambda: store_of(etcd.job).look().seat is None)


def test_a_store_that_hangs_holds_nobody_up():
    thread, answers = FileThread(lambda answer, found: answer(found)), []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = SeatStore(Etcd([mute.getsockname()[:2]], 0.3), "job")
        thread.do(store.look, answers.append)
        thread.close(0.01)
        assert answers == []  # it was not waited for
        poll(lambda: answers)
    assert isinstance(answers[0], StoreError)


def test_nothing_is_heard_after_the_loop_has_ended(etcd):
    loop = asyncio.new_event_loop()
    tenure = tenure_of(etcd.job, "record", 2, None, print)
    tenure.attach(loop, lambda *_: None)
    tenure._do(tenure._right.passed(time.monotonic()))
    loop.close()
    tenure.close(goes_on=True, is_done=False, saved="")
    assert tenure.held is None
