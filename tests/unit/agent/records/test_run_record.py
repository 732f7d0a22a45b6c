from __future__ import annotations

import dataclasses
import json
import os

import pytest

from agent.records import run_record
from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from agent.text.wording import duration
from msrun.runs import run_state
from msrun.runs.elsewhere import UnansweredError
from msrun.runs.log_files import Wanted, checked_attempt, views
from msrun.runs.logs import show
from msrun.runs.status import show_run
from msrun.terminal.table import brief


@pytest.fixture
def environ(tmp_path):
    """All places for records are the test's own."""
    places = {"XDG_STATE_HOME": "state", "HOME": "home", "TMPDIR": "temporary"}
    return {name: str(tmp_path / place) for name, place in places.items()}


def record(
    name: str, *, alive: bool = False, run_id: str = "job", log_dir: object = "/nowhere"
) -> Record:
    pid = os.getpid()
    born = run_record.birth(pid) or 0
    return Record(
        name,
        run_id,
        pid,
        born if alive else born + 1,
        str(log_dir),
        ("msrun", "train.py"),
        "/",
        1.0,
    )


def written(environ, *made: Record) -> None:
    folder = run_record.writable_folder(environ)
    for one in made:
        run_record.write(folder, one)


def word(**changed: object) -> dict[str, object]:
    worker = {
        "rank": 0,
        "local_rank": 0,
        "pid": 7,
        "state": "running",
        "attempt": 1,
        "started": 1.0,
        "ended": None,
        "exit_code": None,
        "exit": "",
        "log": "/l/w_0.log",
    }
    said = {
        "record_id": "a",
        "run_id": "job",
        "host": os.uname().nodename,
        "state": "running",
        "attempt": 1,
        "restarts": 0,
        "max_restarts": 2,
        "replaced": 1,
        "reason": None,
        "started": 1.0,
        "updated": 2.0,
        "ended": None,
        "log_dir": "/l",
        "workers": [worker],
    }
    return said | changed


def run(tmp_path, *, alive: bool = False, **changed: object) -> run_state.RunState:
    (tmp_path / "status.json").write_text(json.dumps(word(**changed)))
    return run_state.look(record("a", alive=alive, log_dir=tmp_path))


# --- records -----------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(environ):
    written(environ, record("a", alive=True))
    assert list(run_record.records(environ)) == [record("a", alive=True)]


def test_devices_that_were_given_up_are_remembered_beside_all_else(environ):
    first = record("r")._replace(failed_devices=("7",))
    written(environ, first)
    folder = run_record.writable_folder(environ)
    kept = run_record.KeptRecord(folder, first)
    kept.give_up(("1",))
    kept.add_place("/ckpt")
    kept.give_up(("0", "2"))
    found = run_record.find(environ, "r")
    assert found.failed_devices == ("7", "1", "0", "2")
    assert found.checkpoints == ("/ckpt",)


def test_the_newest_checkpoint_is_known_at_once_and_written_later(environ):
    first = record("r", alive=True)
    assert first.complete is None
    written(environ, first)
    kept = run_record.KeptRecord(run_record.writable_folder(environ), first)
    told = []
    kept.tell = told.append
    done = CompleteCheckpoint("/ckpt/net-1_7", 7)
    kept.complete(done)
    assert kept.present.complete == done
    assert told == [done]
    assert run_record.find(environ, "r").complete is None
    kept.write()
    assert run_record.find(environ, "r").complete == done
    kept.know(done._replace(step=9))  # as another node has said
    assert kept.present.complete.step == 9
    assert told == [done]


def test_a_node_of_several_knows_its_ranks_and_the_run_that_its_msrun_goes_on_with(environ):
    first = record("r", alive=True)._replace(host="node1", ranks=(2, 3))
    written(environ, first, record("other", alive=True)._replace(born=1))
    assert [rank for rank in range(5) if run_record.find(environ, "r").has_rank(rank)] == [2, 3]
    assert record("alone").has_rank(7)
    assert run_record.successor(environ, first) is None
    kept = run_record.KeptRecord(run_record.writable_folder(environ), first)
    kept.add_place("/ckpt")
    kept.end()
    assert run_record.successor(environ, first) is None  # the nodes meet
    second = record("s", alive=True)
    written(environ, second)
    assert run_record.successor(environ, first) == second
    assert run_record.present(environ, first).checkpoints == ("/ckpt",)


def test_a_record_of_an_older_version_names_no_devices(environ):
    written(environ, record("r"))
    path = next((run_record.writable_folder(environ) / "r").glob("*.json"))
    fields = json.loads(path.read_text())
    del fields["failed_devices"]
    path.write_text(json.dumps(fields))
    assert run_record.find(environ, "r").failed_devices == ()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a1", "a1"),
        ("a", "a1"),  # a unique beginning
        ("mine", "b1"),  # a run id
        ("b2", "b2"),
    ],
)
def test_a_run_is_found_by_id_run_id_or_unique_beginning(environ, name, found):
    written(
        environ, record("a1", alive=True), record("b1", alive=True, run_id="mine"), record("b2")
    )
    assert run_record.find(environ, name).record_id == found


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("b", "fits 2 runs"), ("c", "no run is called c"), ("x/../a1", "no run is called")],
)
def test_a_name_that_fits_none_or_several_is_refused(environ, name, sentence):
    written(environ, record("a1"), record("b1"), record("b2"))
    with pytest.raises(UsageError, match=sentence):
        run_record.find(environ, name)


def test_no_record_at_all_is_one_sentence(environ):
    with pytest.raises(UsageError, match="no run is recorded"):
        run_record.find(environ, "a")


def test_a_reused_pid_is_not_the_run_s_msrun():
    mine = record("a", alive=True)
    assert mine.is_alive()
    assert not mine._replace(born=mine.born + 1).is_alive()
    assert not mine._replace(pid=2**22 + 1).is_alive()


def test_a_damaged_record_is_skipped(environ):
    written(environ, record("a"), record("b"), record("c"))
    folder = run_record.writable_folder(environ)
    (folder / "b" / "record.json").write_text('{"record_id": "b"')
    (folder / "c" / "record.json").write_text('{"record_id": "c"}')
    assert [one.record_id for one in run_record.records(environ)] == ["a"]


def test_old_ended_runs_are_forgotten_and_living_ones_never(environ, monkeypatch):
    monkeypatch.setattr(run_record, "KEPT", 2)
    written(environ, record("a", alive=True), record("b"), record("c"), record("d"))
    assert sorted(one.record_id for one in run_record.records(environ)) == ["a", "c", "d"]


def test_without_a_home_records_live_in_a_private_temporary_folder(tmp_path):
    folder = run_record.writable_folder({"HOME": "relative", "TMPDIR": str(tmp_path / "temporary")})
    assert folder == tmp_path / "temporary" / f"msrun-{os.getuid()}" / "runs"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_not_trusted(environ, tmp_path):
    planted = tmp_path / "state" / "msrun" / "runs"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    with pytest.raises(UsageError, match=r"run records cannot be written .*state/msrun/runs"):
        run_record.writable_folder(environ)
    del environ["XDG_STATE_HOME"]
    planted = tmp_path / "home" / ".local" / "state" / "msrun" / "runs"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    assert run_record.writable_folder(environ).is_relative_to(tmp_path / "temporary")


def test_a_state_home_shows_its_own_runs_only(environ):
    elsewhere = {name: environ[name] for name in ("HOME", "TMPDIR")}
    written(elsewhere, record("foreign", alive=True))
    assert list(run_record.records(environ)) == []
    written(environ, record("mine"))
    assert run_record.find(environ, "mine").record_id == "mine"
    with pytest.raises(UsageError, match="no run is called foreign"):
        run_record.find(environ, "foreign")


def planted_link(runs, elsewhere):
    runs.parent.mkdir(mode=0o700)
    runs.symlink_to(elsewhere)


def planted_parent_link(runs, elsewhere):
    (elsewhere / "runs").mkdir()
    runs.parent.symlink_to(elsewhere)


def planted_by_another(runs, _):
    runs.mkdir(parents=True, mode=0o700)
    os.chown(runs, 12345, 12345)


def planted_in_another_s(runs, _):
    runs.mkdir(parents=True, mode=0o700)
    os.chown(runs.parent, 12345, 12345)


@pytest.mark.parametrize(
    "plant", [planted_link, planted_parent_link, planted_by_another, planted_in_another_s]
)
def test_a_fallback_folder_that_somebody_laid_ready_is_not_used(tmp_path, plant):
    if os.getuid() != 0 and plant in {planted_by_another, planted_in_another_s}:
        pytest.skip("needs root, to give a folder to another user")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    fallback = {"TMPDIR": str(tmp_path)}
    runs = tmp_path / f"msrun-{os.getuid()}" / "runs"
    plant(runs, elsewhere)
    with pytest.raises(UsageError, match="run records cannot be written"):
        run_record.writable_folder(fallback)
    run_record.write(runs, record("a"))
    assert not list(run_record.records(fallback))


def test_only_folders_that_hold_a_record_are_forgotten(environ, monkeypatch, tmp_path):
    monkeypatch.setattr(run_record, "KEPT", 1)
    folder = run_record.writable_folder(environ)
    for name in ("0", "1", "2"):
        (folder / name).mkdir()
        (folder / name / "thesis.tex").write_text("mine")
    (folder / "3").mkdir()
    places = tmp_path / "elsewhere"
    places.mkdir()
    run_record.write(places, record("away"))
    (folder / "4").symlink_to(places / "away")
    written(environ, record("5"), record("6"))
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "3", "4", "6"]
    assert (places / "away" / "record.json").exists()


# --- the state of a recorded run ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("alive", "changed", "state", "words"),
    [
        (True, {}, "running", "running"),
        (False, {"state": "failed"}, "failed", "failed"),
        (False, {}, "lost", "lost: msrun (pid PID) is gone"),
        (False, {"host": "far"}, "running", "running when it was last seen: it runs on host far"),
        (False, {"host": "far", "state": "stopped"}, "stopped", "stopped"),
        (True, {"record_id": "another"}, "starting", "starting"),
        (False, {"workers": "torn"}, "lost", "lost: msrun (pid PID) is gone"),
    ],
)
def test_a_run_s_state_is_believed_only_while_its_msrun_lives(
    tmp_path, alive, changed, state, words
):
    found = run(tmp_path, alive=alive, **changed)
    assert (found.state, found.state_words) == (state, words.replace("PID", str(os.getpid())))


def test_files_that_a_later_run_set_aside_are_found(tmp_path):
    aside = tmp_path / "earlier" / "a"
    aside.mkdir(parents=True)
    (aside / "status.json").write_text(json.dumps(word(state="succeeded")))
    found = run(tmp_path, record_id="later")
    assert (found.folder, found.state) == (aside, "succeeded")


@pytest.mark.parametrize(
    ("changed", "stop_s"),
    [({}, 60.0), ({"grace_s": 5, "kill_s": 1}, 6.0), ({"grace_s": None}, None)],
)
def test_a_stop_may_take_grace_and_kill_time(tmp_path, changed, stop_s):
    assert run(tmp_path, **changed).status.stop_s == stop_s


def test_a_record_id_means_its_run_though_other_nodes_of_the_job_here_have_it_as_their_run_id(
    environ,
):
    written(
        environ, record("scheduler"), record("worker", run_id="scheduler")._replace(started=2.0)
    )
    assert run_record.find(environ, "scheduler").record_id == "scheduler"
    assert run_record.find(environ, "worker").record_id == "worker"


def test_the_end_of_a_process_is_seen_even_before_it_is_reaped():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = record("a")._replace(pid=pid, born=run_record.birth(pid))
    assert run_state.open_process(zombie) is None
    os.waitpid(pid, 0)
    assert run_state.open_process(zombie) is None


def test_a_rank_s_step_is_shown_where_ranks_tell(tmp_path, capfd):
    worker = word()["workers"][0]
    told = [worker | {"step": 412, "epoch": 3}, worker | {"rank": 1}]
    show_run(run(tmp_path, workers=told), 5.0)
    header, first, second = (line.split() for line in capfd.readouterr().out.splitlines()[-3:])
    assert header[-2:] == ["step", "epoch"]
    assert (first[-2:], second[-2:]) == (["412", "4"], ["-", "-"])
    show_run(run(tmp_path), 5.0)
    assert "step" not in capfd.readouterr().out.splitlines()[-2]


def test_a_rank_s_pace_is_shown_where_ranks_tell_and_a_slow_one_is_named(tmp_path, capfd):
    worker = word()["workers"][0]
    times = {"step": 412, "epoch": 3, "step_median_s": 0.0831, "step_p95_s": 1.5}
    told = [
        worker | times | {"step_own_median_s": 0.05},
        worker | times | {"rank": 1, "step_own_median_s": 0.08, "is_slow": True},
        worker | {"rank": 2},
    ]
    show_run(run(tmp_path, alive=True, workers=told), 5.0)
    lines = capfd.readouterr().out.splitlines()
    header, first, _, third = (line.split() for line in lines[-4:])
    assert header[-4:] == ["step", "epoch", "median", "p95"]
    assert (first[-6:], third[-2:]) == (["412", "4", "83.1", "ms", "1.5", "s"], ["-", "-"])
    assert "slow     rank 1 needs 80 ms a step without waiting, its peers 50 ms" in lines


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.00125, "1.25 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (95.4, "95 s")],
)
def test_a_step_s_time_is_brief(seconds, words):
    assert brief(seconds) == words


# --- the files of a run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "attempt", "name", "prefix"),
    [
        (Wanted(), 1, "w_0.log", b"[rank 0]: "),
        (Wanted(rank=0), 1, "w_0.log", None),
        (Wanted(rank=0), 0, "w_0.attempt_0.log", None),
        (Wanted(scheduler=True), 0, "scheduler.log", None),
    ],
)
def test_each_attempt_s_log_has_its_file(tmp_path, wanted, attempt, name, prefix):
    (view,) = views(run(tmp_path), wanted, attempt)
    assert (view.path, view.prefix) == (tmp_path / name, prefix)


def test_streams_in_torchrun_s_tree_come_after_the_worker_log(tmp_path):
    tree = tmp_path / "job_a" / "attempt_1" / "0"
    tree.mkdir(parents=True)
    (tree / "stderr.log").touch()
    assert [view.path for view in views(run(tmp_path), Wanted(), 1)] == [
        tmp_path / "w_0.log",
        tree / "stderr.log",
    ]


def test_the_log_of_a_rank_on_another_node_is_said_to_be_there(tmp_path):
    here = run(tmp_path)
    there = dataclasses.replace(here, record=here.record._replace(host="node1", ranks=(1,)))
    with pytest.raises(
        UnansweredError, match="rank 0 of run a ran on another node, and its log is"
    ):
        show({}, there, Wanted(rank=0))
    with pytest.raises(UsageError, match="has no worker logs in"):
        show({}, here, Wanted(rank=0))


def test_ranks_and_attempts_that_never_were_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no rank 4: its ranks are 0 to 0"):
        views(run(tmp_path), Wanted(rank=4), 1)
    with pytest.raises(UsageError, match="no attempt 2: it has attempts 0 to 1"):
        checked_attempt(run(tmp_path), Wanted(attempt=2))
    assert checked_attempt(run(tmp_path), Wanted()) == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (59.9, "59 s"), (127, "2 min 7 s"), (7260, "2 h 01 min"), (90000, "1 d 1 h")],
)
def test_durations_are_said_in_two_units(seconds, words):
    assert duration(seconds) == words
