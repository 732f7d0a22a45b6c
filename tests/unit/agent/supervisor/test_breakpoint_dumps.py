"""The dump that an exception leaves, where ModelCheckpoint wants it: asked for, decided on, named."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.histories.dumps import froze, gone, running, threw
from support.policies import policy
from support.stand_ins import Links, QueuedFileThread, services
from support.status_pages import kept, write

from agent.controller import actions as do
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.dump.executor import DumpExecutor
from agent.hooks.handshake import Handshake
from agent.hooks.status_pages import StatusPages
from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind
from worker_hooks.callbacks.protocol import CallbackList
from worker_hooks.contract.env import DRILL, RankEnv
from worker_hooks.contract.protocol import Hello, SaveFailed
from worker_hooks.training.startup import options_of, read_env

RECORD = SimpleNamespace(add_place=print, resumed=print)


class Saver:
    def __init__(self, checkpoints="", breakpoints=""):
        self.checkpoints, self.breakpoints = checkpoints, breakpoints


# --- what a script wants


@pytest.mark.parametrize(
    ("savers", "breakpoints"),
    [
        ([], ""),
        ([object()], ""),
        ([Saver("/a", "A")], "A"),
        ([Saver("/a")], ""),
        ([Saver("/a"), Saver("/a", "B"), Saver("/a", "C")], "B"),
        ([Saver("/a"), Saver("/b", "B")], ""),  # the agent knows the first folder only
        ([Saver("", "A")], ""),
    ],
)
def test_a_prefix_is_wanted_in_the_folder_that_is_told(savers, breakpoints):
    assert options_of(CallbackList(savers), None, RankEnv.read({})).breakpoints == breakpoints


def test_a_drill_saves_in_its_own_folder_only(tmp_path):
    plan = json.dumps({"faults": [], "folder": str(tmp_path), "ckpt": "/drill/ckpt"})
    env, observers = read_env({DRILL: plan})
    found = options_of(CallbackList([Saver("/a", "A")]), None, env)
    (trace,) = observers
    trace.close()
    assert (found.ckpt_save_path, found.breakpoints) == ("/drill/ckpt", "")


# --- what is decided


def orders(*happened):
    """The orders to save after these events, of three ranks that trained."""
    job, found = Job(policy((0, 1, 2))), []
    for event in (*(row[0] for row in running(3)), *happened):
        job, actions = (done := decide(job, event)).job, done.actions
        found += [action for action in actions if isinstance(action, do.SaveRanks)]
    return found


def test_an_exception_is_told_from_a_death():
    (raised,) = orders(threw(1), froze(0), froze(1), froze(2))
    assert raised.is_raised
    (killed,) = orders(gone(1, -9), froze(0), threw(2), froze(2))
    assert not killed.is_raised


def test_an_exception_that_follows_from_a_death_is_none():
    (order,) = orders(threw(0), froze(0), froze(2), gone(1, -9))
    assert not order.is_raised


# --- where it is saved


class Desk:
    """Rank 0 has a page and says where it saves; what the orders to save make of that."""

    def __init__(self, folder, breakpoints="Net", pages=None, step=5):
        self.folder, self.posted, links, self.files = folder, [], Links(), QueuedFileThread()
        if pages is None:
            pages, page = kept()
            write(page, step, 1)
        given = services(post=self.posted.append, files=self.files)
        handshake = Handshake(DumpSpec(), "id", folder / "dumps", links, RECORD, given)
        path, periodic = str(folder / "ckpt"), str(folder / "saved")
        handshake.begin(0, "")
        handshake.greet(Hello(0, 0, 1, path, False, "", periodic, breakpoints))
        program = Program("x", (), ProgramKind.SCRIPT, "python")
        spec = JobSpec(program, 2, "run", "id")
        self.saving = DumpExecutor(
            spec,
            folder / "dumps",
            links,
            pages,
            handshake,
            given,
        )

    def save(self, *, is_raised, place=0, number=0):
        """The folders that are being written then, relative to the test's."""
        self.saving.save(do.SaveRanks(1, 5, (0,), (), place, "", number, is_raised))
        self.files.work()
        return [str(made.relative_to(self.folder)) for made in self.folder.glob("*/*_tmp")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(QueuedFileThread, "continue_in_new_thread", lambda _: None, raising=False)
    yield
    gc.collect()  # pages are files


DUMP = "tft_saved_checkpoints-step_5.id_tmp"


def test_an_exception_s_is_beside_the_checkpoints_under_their_name(tmp_path):
    desk = Desk(tmp_path)
    assert desk.save(is_raised=True) == ["saved/Net-3_50_breakpoint.id_tmp"]
    # what is known by now does not move what is being written
    assert desk.save(is_raised=False, number=1) == ["saved/Net-3_50_breakpoint.id_tmp"]


@pytest.mark.parametrize(
    ("is_raised", "change"),
    [
        (False, {}),
        (True, {"breakpoints": ""}),
        (True, {"pages": StatusPages()}),
        (True, {"step": 4}),
    ],
    ids=["a death", "not wanted", "no page", "no record of the step"],
)
def test_everything_else_is_an_ordinary_dump(tmp_path, is_raised, change):
    assert Desk(tmp_path, **change).save(is_raised=is_raised) == [f"ckpt/{DUMP}"]


def test_the_fallback_is_that_of_dumps(tmp_path):
    Path(tmp_path, "saved").touch()
    desk = Desk(tmp_path)
    assert desk.save(is_raised=True) == []
    assert [type(event) for event in desk.posted] == [SaveFailed]
    assert desk.save(is_raised=True, place=1, number=1) == [f"dumps/{DUMP}"]


def test_an_attempt_forgets_what_the_one_before_wanted(tmp_path):
    handshake = Handshake(
        DumpSpec(), "id", tmp_path, Links(), RECORD, services(files=QueuedFileThread())
    )
    handshake.begin(0, "")
    handshake.greet(Hello(1, 0, 1, "", False, "", "/a", "Net"))
    assert handshake.breakpoint((0,)) == (Path("/a"), "Net")  # that of another rank
    handshake.begin(1, "")
    assert handshake.breakpoint((0, 1)) is None
