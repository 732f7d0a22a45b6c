"""`msrun top` against real pages, files and processes: those of the test itself."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from agent.records import run_record
from agent.records.run_record import Record, birth
from msrun.runs.run_state import WorkerState
from msrun.top.checkpoints import Checkpoints
from msrun.top.facts import RankFacts, rate
from msrun.top.gather import Gatherer
from msrun.top.gpu import GpuUse, parsed
from msrun.top.processes import ProcessLoads, sample, shadows
from msrun.top.status_pages import OpenPages
from worker_hooks.contract.process_stat import SHADOW
from worker_hooks.contract.status_page import Page, Phase, create
from worker_hooks.storage import manifest
from worker_hooks.storage.manifest import Manifest


@pytest.fixture
def held():
    """Makes pages that this process holds as an agent would."""
    pages = []

    def hold(rank, attempt, steps):
        fd = create(rank, attempt, [])
        pages.append(Page(fd))
        os.close(fd)
        for step in range(steps + 1):
            pages[-1].beat(step, 3, step, Phase.DATA)
        pages[-1].enter(Phase.BACKWARD)
        return pages[-1]

    yield hold
    for page in pages:
        page.close()


@pytest.fixture
def opened():
    pages = OpenPages(os.getpid())
    yield pages
    pages.close()


def test_pages_are_read_where_their_owner_holds_them(held, opened):
    assert opened.look() == {}
    page = held(1, 0, 5)
    held(0, 0, 7)
    told = opened.look()
    assert {rank: (one.beat.step, one.beat.phase) for rank, one in told.items()} == {
        0: (7, Phase.BACKWARD), 1: (5, Phase.BACKWARD),
    }  # fmt: skip
    assert [pace.step for pace in told[0].paces] == [2, 3, 4, 5, 6, 7]
    page.beat(6, 3, 6, Phase.FORWARD)
    assert opened.look()[1].beat.step == 6


def test_a_newer_attempt_takes_a_ranks_place_and_what_its_owner_closed_is_let_go(held, opened):
    held(0, 1, 4)
    assert opened.look()[0].attempt == 1
    newer = held(0, 2, 9)
    held(0, 1, 30)
    assert (opened.look()[0].attempt, opened.look()[0].beat.step) == (2, 9)
    newer.beat(10, 3, 10, Phase.DATA)
    assert opened.look()[0].beat.step == 10


def test_what_is_no_page_is_passed_over(opened):
    fd = os.memfd_create("msrun-page-0", os.MFD_CLOEXEC)
    try:
        os.write(fd, b"MSRUNPG" + bytes(4000))
        assert opened.look() == {}
    finally:
        os.close(fd)


def test_what_a_rank_said_last_stays_until_it_has_another_page(held):
    """The owner is another process: this one's own view of a page would count as holding it."""
    (order_r, order_w), (answer_r, answer_w) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.close(order_w)
        page = held(0, 0, 6)
        os.write(answer_w, b".")
        os.read(order_r, 1)
        page.close()
        os.write(answer_w, b".")
        os.read(order_r, 1)
        held(0, 1, 2)
        os.write(answer_w, b".")
        os.read(order_r, 1)
        os._exit(0)
    os.close(order_r)
    pages, found = OpenPages(pid), []
    for _ in range(3):
        os.read(answer_r, 1)
        told = pages.look()[0]
        found.append((told.attempt, told.beat.step, told.is_held))
        os.write(order_w, b".")
    os.waitpid(pid, 0)
    told = pages.look()[0]
    found.append((told.attempt, told.beat.step, told.is_held))
    assert found == [(0, 6, True), (0, 6, False), (1, 2, True), (1, 2, False)]
    pages.close()
    for fd in (order_w, answer_r, answer_w):
        os.close(fd)


def test_a_run_as_it_is_shown(held, tmp_path):
    held(0, 1, 8)
    me = os.getpid()
    record = Record(
        "20260101-000000-abc",
        "run",
        me,
        birth(me),
        str(tmp_path),
        ("msrun", "train.py"),
        "/",
        time.time(),
    )
    worker = {
        "local_rank": 0,
        "state": "running",
        "attempt": 1,
        "started": 1.0,
        "ended": None,
        "exit": "",
        "log": "worker_0.log",
    }
    status = {
        "record_id": record.record_id, "host": "h", "state": "running", "attempt": 2, "restarts": 1, "max_restarts": 3, "replaced": 4, "reason": None,
        "started": 1.0, "updated": 1.0, "ended": None,
        "workers": [{**worker, "rank": 1, "pid": None}, {**worker, "rank": 0, "pid": me}],
    }  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    restart = {"event": "StartAttempt", "time": 1.0, "attempt": 1, "resume": None}
    (tmp_path / "events.jsonl").write_text(f"nonsense\n[]\n{json.dumps(restart)}\n{{")
    gather = Gatherer({"XDG_STATE_HOME": str(tmp_path)}, record)
    try:
        run, job = gather.look()
        assert run.alive and not job.is_over
        assert (job.script, job.step) == ("train.py", 8)
        assert job.counts == ("attempt 2", "1 of 3 restarts", "4 replaced")
        first, second = job.ranks
        assert (first.pid, first.state, first.phase, first.epoch, first.step) == (
            me,
            "running",
            "backward",
            3,
            8,
        )
        assert len(first.step_s) == 7 and first.steps_per_s > 100 and first.own_s is not None
        assert first.rss_bytes > 10 << 20 and first.cpu_percent is not None
        assert (second.rank, second.step, second.state, second.rss_bytes) == (
            1,
            None,
            "running",
            None,
        )
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('"event": "Finish", "reason": "why", "time": 2.0}\n')
        assert gather.look()[1].history.end == "why"
    finally:
        gather.close()


def test_who_stands_still_on_another_node_gets_slower_and_is_silent():
    told = WorkerState(0, 0, 7, "running", 0, None, None, "", "", step=6, step_median_s=0.5)
    rates = [RankFacts(0).as_told(told, standing_s) for standing_s in (0.0, 4.9, 10.0, None)]
    assert [(each.step, each.steps_per_s, each.silent_s) for each in rates] == [
        (6, 2.0, 0.0), (6, 2.0, 0.0), (6, 0.1, 10.0), (6, None, 0.0),
    ]  # fmt: skip


def test_ranks_of_other_nodes_are_shown_as_these_tell(held, tmp_path):
    """Their pids mean other processes here, and a page of that rank is of an earlier run."""
    held(0, 0, 8)
    held(2, 0, 8)
    me = os.getpid()
    record = Record(
        *("id", "run", me, birth(me), str(tmp_path), ("msrun", "train.py"), "/", time.time()),
        node=1,
        host="node1",
        ranks=(2, 3),
        resumed_step=5,
    )
    common = {
        "local_rank": 0, "state": "running", "attempt": 0, "started": 1.0, "ended": None, "exit": "", "log": "", "pid": me,
    }  # fmt: skip
    told = {"step": 6, "epoch": 2, "step_median_s": 0.25, "step_own_median_s": 0.2, "is_slow": True}
    workers = [{**common, "rank": 0, **told}, {**common, "rank": 1}, {**common, "rank": 2, **told}]
    status = {
        "record_id": "id", "host": "node1", "state": "running", "attempt": 0, "max_restarts": 3, "reason": None,
        "started": 1.0, "updated": 1.0, "ended": None, "workers": workers,
    }  # fmt: skip
    (tmp_path / "node_1.status.json").write_text(json.dumps(status))
    gather = Gatherer({"XDG_STATE_HOME": str(tmp_path)}, record)
    try:
        job = gather.look()[1]
        there, plain, here = job.ranks
        ended = workers[0] | {"state": "failed"}
        (tmp_path / "node_1.status.json").write_text(json.dumps({**status, "workers": [ended]}))
        (gone,) = gather.look()[1].ranks
    finally:
        gather.close()
    assert there == RankFacts(
        0, me, "slow", epoch=2, step=6, steps_per_s=4.0, own_s=pytest.approx(0.2)
    )
    assert plain == RankFacts(1, me, "running")
    assert (here.step, here.state) == (8, "slow")
    assert here.rss_bytes > 10 << 20
    assert job.resumed == 5
    assert gone == RankFacts(0, me, "failed", epoch=2, step=6)


def test_of_the_checkpoints_in_a_folder_the_runs_own_count(tmp_path):
    own = tmp_path / "msrun" / "runs" / "id"
    own.mkdir(parents=True)
    record = Record("id", "id", 1, 1, "", (), "/", 100.0)
    checkpoints = Checkpoints({"XDG_STATE_HOME": str(tmp_path)}, record)
    assert checkpoints.newest() is None
    place = tmp_path / "ckpt"
    record = record._replace(checkpoints=(str(place), str(tmp_path / "none")))
    run_record.write(own.parent, record)
    for step, run in ((50, "other"), (7, "id"), (8, "id")):
        dump = place / f"tft_saved_checkpoints-step_{step}"
        dump.mkdir(parents=True)
        manifest.write(dump, Manifest("dump", step, 1, step, 1, 0, run, "", 101.0, (), "d"))
        assert checkpoints.newest() == (None if step == 50 else step)
    (place / "tft_saved_checkpoints-step_9_tmp").mkdir()
    assert checkpoints.newest() == 8
    # another node of the job: what is saved has the name of the first one
    other = Record("id2", "id", 1, 1, "", (), "/", 100.0, record.checkpoints, job="id")
    assert Checkpoints({"XDG_STATE_HOME": str(tmp_path)}, other).newest() == 8


def test_processor_time_is_told_between_two_looks():
    loads, now = ProcessLoads(), sample(os.getpid())
    assert now.state == "R" and loads.percent(1, now._replace(born=0, used=0)) == 0
    assert loads.percent(1, now._replace(born=0, used=0)) is None  # at once: no time has passed
    assert sample(2**22 + 1) is None


def test_steps_a_second_sink_while_nothing_comes():
    assert rate((0.5,) * 64, 0.2) == pytest.approx(2)
    assert rate((0.1,) * 10, 9.0) == pytest.approx(1)
    assert rate((100.0, 0.1), 0.0) == pytest.approx(2 / 100.1)
    assert rate((), 5.0) is None


def test_answers_of_nvidia_smi():
    processes = "10, GPU-a, 512\n10, GPU-b, 256\n11, GPU-a, [N/A]\nno running processes\n"
    assert parsed(processes, "GPU-a, 37\nGPU-b, 99\n") == {
        10: GpuUse(768 << 20, 99.0), 11: GpuUse(None, 37.0),
    }  # fmt: skip
    assert parsed("", "") == {}


SLEEPER = """
import ctypes, sys
memory = bytearray(8 << 20)
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # its name
print(flush=True)
sys.stdin.read()
"""


def test_sleeping_copies_are_counted_with_their_memory():
    words = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    run = [sys.executable, "-c", SLEEPER]
    with contextlib.ExitStack() as stack:
        for name in (SHADOW, SHADOW, "another"):
            sleeper = stack.enter_context(subprocess.Popen([*run, name], **words))
            sleeper.stdout.readline()
        found = shadows(os.getpid())
    assert found.processes == 2
    assert found.nbytes > 2 * (8 << 20)
    assert shadows(os.getpid()).processes == 0
