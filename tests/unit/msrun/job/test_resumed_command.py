"""Which run `msrun --resume` goes on with, from where, and by which command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.checkpoints import saved

from agent.records import run_record
from agent.records.run_record import Record, remembered, unrecorded
from agent.spec.job_spec import UsageError
from msrun.job.request import parse
from msrun.job.resume import names_origin
from msrun.job.resume_point import ResumeOrigin
from msrun.options.argv import command_words, scan


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """All records are the test's own; it runs in a folder of its own beside a script."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def remember(places, name, *argv, cwd=None, alive=False, started=1.0, **fields) -> Record:
    """A recorded run that saves into ``<cwd>/ckpt``."""
    cwd = str(cwd or Path.cwd())
    pid = os.getpid()
    born = (run_record.birth(pid) or 0) + (0 if alive else 1)
    argv = ("msrun", *(argv or ("--worker_num=4", "train.py", "--lr", "1")))
    made = Record(
        name, "job", pid, born, f"{cwd}/logs", argv, cwd, started, (f"{cwd}/ckpt",)
    )._replace(**fields)
    run_record.write(run_record.writable_folder(places), made)
    return made


def elsewhere(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "train.py").touch()
    return folder


def refused(argv, environ) -> str:
    with pytest.raises(UsageError) as raised:
        parse(argv, environ)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- which run ---------------------------------------------------------------------------------


def test_without_a_name_it_is_the_newest_ended_run_of_this_folder(environ, tmp_path):
    remember(environ, "old", started=1)
    remember(environ, "new", started=2)
    remember(environ, "bare", started=3, checkpoints=())
    remember(environ, "away", started=4, cwd=elsewhere(tmp_path))
    remember(environ, "alive", started=5, alive=True)
    request = parse(["--resume"], environ)
    assert request.origin == ResumeOrigin(
        (Path.cwd() / "ckpt", Path.cwd() / "logs" / "dumps"), ("new",), is_run=True
    )
    assert request.job.nproc == 4
    assert (request.job.program.name, request.job.program.args) == ("train.py", ("--lr", "1"))
    assert not request.job.is_away


def test_a_run_of_another_folder_must_be_named(environ, tmp_path):
    away = elsewhere(tmp_path)
    remember(environ, "a", cwd=away)
    said = refused(["--resume"], environ)
    assert "msrun --resume" not in said  # that line would be refused
    saved(away / "ckpt", run="a")
    said = refused(["--resume"], environ)
    assert f"of {away}: msrun --resume a" in said
    request = parse(["--resume", "a"], environ)
    assert request.job.is_away
    assert Path.cwd() == away
    assert request.origin.lineage == ("a",)


def test_other_arguments_of_the_script_are_said(environ):
    remember(environ, "a")
    same = parse(["--resume", "a", "--worker_num=2", "train.py", "--lr", "1"], environ)
    assert not [each for each in same.warnings if "arguments" in each]
    other = parse(["--resume", "a", "--worker_num=2", "train.py", "--lr", "2"], environ)
    (said,) = (each for each in other.warnings if "arguments" in each)
    assert said.endswith("which had: --lr 1")


@pytest.mark.parametrize("name", ["2026a", "2026", "mine"])
def test_a_run_is_named_by_its_id_or_beginning(environ, name):
    remember(environ, "2026a")
    remember(environ, "2025b", started=9, run_id="mine")
    wanted = "2025b" if name == "mine" else "2026a"
    for argv in (["--resume", name], [f"--resume={name}"]):
        assert parse(argv, environ).origin.lineage == (wanted,)


@pytest.mark.parametrize("name", ["ckpt", "ckpt/tft_saved_checkpoints-step_7", "logs/dumps"])
def test_a_folder_means_the_newest_run_that_saved_there(environ, name):
    remember(environ, "old", started=1)
    remember(environ, "new", started=2)
    remember(environ, "other", started=3, checkpoints=("/x",), log_dir="/x")
    saved(Path("ckpt"))
    Path("logs/dumps").mkdir(parents=True)
    request = parse(["--resume", name], environ)
    assert request.origin == ResumeOrigin((Path(name).absolute(),), ("new",))


def test_a_run_that_lives_is_never_started_twice(environ):
    remember(environ, "a", alive=True)
    pid = os.getpid()
    said = f"run a is alive (msrun pid {pid}): `msrun stop a` ends it"
    Path("ckpt").mkdir()
    for argv in (["--resume"], ["--resume=a"], ["--resume", "ckpt"], ["--resume", "train.py"]):
        assert refused(argv, environ) == said
    remember(environ, "b", started=0)
    remember(environ, "c", alive=True, lineage=("x", "b"), checkpoints=())
    assert (
        refused(["--resume=b"], environ)
        == f"run b has been resumed already, as run c (msrun pid {pid})"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--resume"], "no run of this user on this host has saved a checkpoint"),
        (["--resume=zzz"], "no run is called zzz"),
        (["--resume", "zzz"], "no run is called zzz"),
        (["--resume", "./zzz/"], "--resume ./zzz/: the folder does not exist"),
        (["--resume=bare"], "run bare has no checkpoint"),
        (["--resume", "."], "no recorded run has saved into"),
        (["--resume", "train.py"], "no recorded run of train.py in this folder has a checkpoint"),
        (["--resume", "nothing.py", "x"], "no recorded run of nothing.py in this folder"),
    ],
)
def test_nothing_to_go_on_with_is_one_sentence(environ, argv, said):
    remember(environ, "bare", checkpoints=())
    assert refused(argv, environ).startswith(said)


def test_a_run_that_succeeded_must_be_named(environ):
    folder = Path.cwd() / "logs"
    folder.mkdir()
    remember(environ, "a")
    (folder / "status.json").write_text(
        '{"record_id": "a", "host": "h", "state": "succeeded", "attempt": 0, "max_restarts": 0,'
        '"reason": null, "started": 1, "updated": 1, "ended": 1, "workers": []}'
    )
    said = "the newest run a finished, there is nothing to resume"
    nothing = f"{said}; it needed no checkpoint, and saved none"  # a line to type would be refused
    assert refused(["--resume"], environ) == nothing
    saved(Path("ckpt"), run="b")
    assert refused(["--resume"], environ) == nothing
    saved(Path("ckpt"), step=8, run="a")
    assert (
        refused(["--resume"], environ)
        == f"{said}; to resume it anyway, from step 8: msrun --resume a"
    )
    assert parse(["--resume=a"], environ).origin.lineage == ("a",)
    remember(environ, "b", started=2.0, checkpoints=())  # stopped before its first step
    assert refused(["--resume"], environ) == (
        "run b came to no step that could be saved, and the one before it, a, finished: there is "
        "nothing to resume; to resume it anyway, from step 8: msrun --resume a"
    )


def test_a_run_that_may_live_on_another_host_needs_its_folder(environ):
    Path("logs").mkdir()
    Path("ckpt").mkdir()
    remember(environ, "a")
    Path("logs/status.json").write_text(
        '{"record_id": "a", "host": "far", "state": "running", "attempt": 0, "max_restarts": 0,'
        '"reason": null, "started": 1, "updated": 1, "ended": null, "workers": []}'
    )
    said = refused(["--resume"], environ)
    assert "last seen on host far" in said
    assert parse(said.rpartition("msrun ")[2].split(), environ).origin.lineage == ("a",)


def test_a_folder_of_a_run_that_is_gone_is_said(environ, tmp_path):
    away = elsewhere(tmp_path)
    remember(environ, "a", cwd=away)
    (away / "train.py").unlink()
    away.rmdir()
    assert "the folder of run a cannot be entered" in refused(["--resume", "a"], environ)


# --- which command line ------------------------------------------------------------------------


def test_what_is_typed_now_replaces_what_was_recorded(environ):
    remember(
        environ, "a", "--nproc-per-node=4", "--max_restarts", "3", "-r", "3", "--standalone",
        "--resume=old", "--is_recover=1", "train.py", "--lr", "1",
    )  # fmt: skip
    request = parse(["--resume", "--worker_num=2", "--max-restarts=5", "--role=x"], environ)
    job = request.job
    assert (job.nproc, job.max_restarts, job.role) == (2, 5, "x")
    assert job.argv == (
        "--max-restarts=5", "-r=3", "--standalone", "--worker_num=2", "--role=x",
        "train.py", "--lr", "1",
    )  # fmt: skip
    again = parse(list(job.argv), environ)
    assert again.origin is None
    assert again.job._replace(record_id="", run_id="") == job._replace(record_id="", run_id="")


def test_a_given_script_is_run_anew_from_the_newest_run_of_the_same_script(environ, tmp_path):
    remember(environ, "other", "other.py", started=9)
    remember(environ, "away", cwd=elsewhere(tmp_path), started=8)
    remember(environ, "a", environ={"GONE": "1"})
    request = parse(["--resume", "--worker_num=3", "train.py", "--lr", "2"], environ)
    assert request.origin.lineage == ("a",)
    assert (request.job.nproc, request.job.program.args) == (3, ("--lr", "2"))
    assert request.job.argv == ("--worker_num=3", "train.py", "--lr", "2")
    assert request.environ == {}


def test_a_given_script_needs_no_record_when_the_folder_is_given(environ):
    Path("ckpt").mkdir()
    request = parse(["--resume", "ckpt", "train.py"], environ)
    assert request.origin == ResumeOrigin((Path("ckpt").absolute(),))
    assert parse(["--resume", ".", "train.py"], environ).origin.folders == (Path.cwd(),)


def test_a_script_in_a_yaml_file_is_found_in_both(environ):
    Path("job.yaml").write_text("script: train.py\nworker_num: 3\nresume: true\n")
    remember(environ, "a", "--config=job.yaml")
    request = parse(["--config=job.yaml"], environ)
    assert (request.origin.lineage, request.job.nproc) == (("a",), 3)
    assert parse(["--resume=a", "--worker_num=2"], environ).job.nproc == 2


@pytest.mark.parametrize(
    ("argv", "variables", "is_resumed"),
    [
        (["--is_recover=1", "train.py"], {}, True),
        (["--is_recover=True", "train.py"], {}, True),
        (["--is_recover=0", "train.py"], {}, False),
        (["train.py", "--is_recover=1"], {}, False),
        (["train.py"], {"PET_RESUME": "1"}, True),
        (["train.py"], {"PET_RESUME": "a"}, True),
        (["train.py"], {"PET_RESUME": "0"}, False),
        (["--resume=0", "train.py"], {"PET_RESUME": "a"}, False),
        (["--is_recover=1"], {}, True),
    ],
)
def test_resuming_is_said_in_three_ways(environ, argv, variables, is_resumed):
    remember(environ, "a")
    request = parse(argv, environ | variables)
    assert (request.origin is not None) == is_resumed
    assert "--is_recover=1" not in request.job.argv[:1]


def test_missing_variables_of_the_launch_come_back_and_present_ones_stay(environ):
    remember(environ, "a", environ={"LR": "1", "MODE": "old", "PET_MAX_RESTARTS": "4"})
    request = parse(["--resume"], environ | {"MODE": "new"})
    assert request.environ == {"LR": "1", "PET_MAX_RESTARTS": "4"}
    assert request.job.max_restarts == 4


@pytest.mark.parametrize(("typed", "said"), [([], 1), (["--join=False"], 0), (["--join=True"], 0)])
def test_a_run_that_was_detached_says_that_it_is_again(environ, typed, said):
    remember(environ, "a", "--join=False", "train.py")
    warnings = parse(["--resume", *typed], environ).warnings
    assert sum("was detached" in warning for warning in warnings) == said


def test_paths_typed_elsewhere_are_those_of_that_place(environ, tmp_path):
    here = Path.cwd()
    remember(environ, "a", "--log_dir=logs", "train.py", cwd=elsewhere(tmp_path))
    assert parse(["--resume", "a"], environ).job.logs.log_dir == tmp_path / "elsewhere" / "logs"
    os.chdir(here)
    assert parse(["--resume", "a", "--log_dir=new"], environ).job.logs.log_dir == here / "new"


@pytest.mark.parametrize(
    "argv",
    [
        ["--worker_num=4", "-mr3", "pkg.train", "--", "a"],
        ["--role=", "--", "-odd.py", "x y"],
        ["--role", "a b", "t.py", "--", "--", "a"],
        ["t.py", "--", "a"],
        ["--config", "job.yaml"],
        ["-t", "0:1,1:2", "--virtual", "--monitor-i", "0.5", "t.py"],
    ],
)
def test_the_words_of_a_line_are_read_as_that_line(argv):
    def read(words):
        line = scan(words)
        texts = {dest: setting.text for dest, setting in line.given.items()}
        return texts, line.script, line.script_args

    assert read(command_words(scan(argv))) == read(argv)


@pytest.mark.parametrize(
    ("following", "is_origin"),
    [
        (["train.py"], False),
        (["ckpt"], True),
        (["ckpt", "train.py"], True),
        (["package"], False),
        (["a"], True),
        (["a", "train.py"], True),
        (["job", "train.py"], True),
        (["typo"], True),
        (["python", "train.py"], False),
        ([""], False),
    ],
)
def test_the_next_word_is_a_run_a_folder_or_the_script(environ, following, is_origin):
    remember(environ, "abc")
    Path("ckpt").mkdir()
    Path("package").mkdir()
    Path("package/__main__.py").touch()
    assert names_origin(following, environ) == is_origin


# --- what a record keeps -----------------------------------------------------------------------


def test_a_record_keeps_neither_secrets_nor_the_session_nor_what_is_the_scripts_own(environ):
    kept = {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "TORCH_LOGS": "dynamo",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PET_MAX_RESTARTS": "3",
        "MS_ENABLE_TFT": "{TTP:1}",
        "LC_ALL": "C",
    }
    own = {
        "LR": "1",
        "http_proxy": "http://h:1/",
        "WEBHOOK": "https://h/secret",
        "DB_PASSWORD": "s",
    }
    left = {
        "PWD": "/",
        "SHLVL": "1",
        "_": "x",
        "TERM": "x",
        "TERM_PROGRAM": "x",
        "COLUMNS": "80",
        "SSH_TTY": "x",
        "XDG_SESSION_ID": "1",
        "DBUS_SESSION_BUS_ADDRESS": "x",
        "PS1": "$",
        "WANDB_API_KEY": "s",
        "HF_TOKEN": "s",
        "aws_secret": "s",
        "CUDA_VISIBLE_DEVICES": "3",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NCCL_AUTH_TOKEN": "s",
        "GOOGLE_APPLICATION_CREDENTIALS": "s",
        "HTTPS_PROXY": "http://me:word@h:1/",
        "PET_WEBHOOK": "https://h/services/secret",
        "MS_URL": "https://h/?token=s",
        "MSRUN_RUNS": "a",
        "MSRUN_DRILL": "{}",
        "TORCHELASTIC_ERROR_FILE": "/e",
    }
    assert remembered(kept | own | left) == kept
    secret = {"WANDB_API_KEY", "HF_TOKEN", "aws_secret", "GOOGLE_APPLICATION_CREDENTIALS"}
    named = {*own, *secret, "NCCL_AUTH_TOKEN", "HTTPS_PROXY", "PET_WEBHOOK", "MS_URL"}
    assert set(unrecorded(kept | own | left)) == named
    made = remember(environ, "a", unrecorded=("LR", "MODE"))
    assert made.unrecorded == ("LR", "MODE")
    (said,) = parse(["--resume"], environ | {"MODE": "1"}).warnings
    assert said.startswith("the run was started with LR, which are not set now")
    assert parse(["--resume"], environ | {"MODE": "1", "LR": ""}).warnings == ()


def test_a_web_hook_that_is_not_set_at_a_resume_is_named_first(environ):
    remember(environ, "a", unrecorded=("A", "B", "C", "D", "E", "F", "PET_WEBHOOK"))
    (said,) = parse(["--resume"], environ).warnings
    assert said.startswith("the run was started with PET_WEBHOOK, A, ")
    assert said.endswith("secrets and a script's own variables are recorded by name only")


def test_a_record_is_private_and_notes_each_folder_once(environ):
    made = remember(environ, "a", environ={"A": "\udc80"}, lineage=("b",))
    folder = run_record.writable_folder(environ)
    assert (folder / "a" / "record.json").stat().st_mode & 0o777 == 0o600
    added = run_record.add_checkpoints(folder, made, "/x")
    assert run_record.add_checkpoints(folder, added, "/x") == added
    assert next(run_record.records(environ)) == added
    assert added.checkpoints == (*made.checkpoints, "/x")


def test_a_record_of_an_earlier_version_is_read(environ):
    made = remember(environ, "a")
    path = run_record.writable_folder(environ) / "a" / "record.json"
    fields = json.loads(path.read_text())
    for name in ("checkpoints", "environ", "lineage"):
        del fields[name]
    path.write_text(json.dumps(fields))
    assert next(run_record.records(environ)) == made._replace(checkpoints=())


def test_a_run_whose_folder_holds_dumps_is_never_forgotten(environ, monkeypatch):
    monkeypatch.setattr(run_record, "KEPT", 1)
    remember(environ, "a")
    folder = run_record.writable_folder(environ)
    (folder / "a" / "dumps" / "tft_saved_checkpoints-step_1").mkdir(parents=True)
    remember(environ, "b")
    remember(environ, "c")
    assert {path.name for path in folder.iterdir()} == {"a", "c"}


# --- devices that failed -------------------------------------------------------------------------

TWO_AND_ONE = ("--worker_num=2", "--spare-devices=1", "train.py")


def of_devices(request):
    return [warning for warning in request.warnings if "failed" in warning]


def test_a_device_that_failed_is_not_used_again_and_that_is_said(environ):
    remember(environ, "a", *TWO_AND_ONE, failed_devices=("1",))
    request = parse(["--resume"], environ | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert request.job.devices.visible == ("0", "2")
    assert request.job.devices.given_up == ("1",)  # so a resume of this run knows it, too
    (said,) = of_devices(request)
    assert said == (
        "device 1 failed in the run that is resumed: not used here, used again with "
        "--spare-devices=0"
    )


@pytest.mark.parametrize(
    "typed", [["--resume", "--spare-devices=0"], ["--resume", "a", "--worker_num=2", "train.py"]]
)
def test_without_the_option_it_is_used_again_and_that_is_said(environ, typed):
    remember(environ, "a", *TWO_AND_ONE, failed_devices=("1", "2"))
    request = parse(typed, environ | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert not request.job.devices.is_on
    assert of_devices(request) == [
        "devices 1, 2 failed in the run that is resumed, and without --spare-devices used again"
    ]


def test_a_script_that_is_typed_again_does_not_use_it_either(environ):
    remember(environ, "a", *TWO_AND_ONE, failed_devices=("1",))
    typed = ["--resume", "a", *TWO_AND_ONE]
    request = parse(typed, environ | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert request.job.devices.visible == ("0", "2")


def test_a_device_that_is_not_listed_any_more_is_not_spoken_of(environ):
    remember(environ, "a", *TWO_AND_ONE, failed_devices=("1",))
    request = parse(["--resume"], environ | {"CUDA_VISIBLE_DEVICES": "0,2"})
    assert request.job.devices.visible == ("0", "2")
    assert of_devices(request) == []


def test_a_resume_without_the_list_of_devices_is_refused(environ):
    remember(environ, "a", *TWO_AND_ONE, failed_devices=("1",))
    assert "set CUDA_VISIBLE_DEVICES to 3 devices" in refused(["--resume"], environ)
