"""Flags and environment to a JobSpec: what each means."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from agent.records.run_record import new_record_id
from agent.spec.job_spec import BindSpec, DumpSpec, ProgramKind, StartMethod, Std, UsageError
from msrun import __version__
from msrun.job.request import parse
from msrun.options.rank_maps import words
from msrun.options.settings import Setting


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every case runs beside a script, a program, a package and a table."""
    (tmp_path / "t.py").touch()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    (tmp_path / "table.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _job(line, environ=None, script="t.py"):
    return parse([*line.split(), script], environ or {}).job


def test_a_bare_script_is_one_worker_in_the_foreground():
    request = parse(["t.py", "--lr", "1"], {})
    job = request.job
    assert (job.nproc, job.nnodes, job.node_rank, job.role) == (1, 1, 0, "default")
    assert (job.master_addr, job.master_port, job.max_restarts) == ("127.0.0.1", None, 0)
    assert (request.join, request.dry_run, request.sim_rank_id) == (True, False, None)
    assert request.warnings == ()
    assert job.program.name == "t.py"
    assert job.program.args == ("--lr", "1")
    assert job.program.kind is ProgramKind.SCRIPT
    assert job.program.interpreter == sys.executable
    assert (job.timeouts.start_s, job.timeouts.grace_s) == (600.0, 30.0)
    assert job.logs.redirects == job.logs.tee == {}
    assert job.run_id == job.record_id


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--nproc-per-node 4", "nproc", 4),
        ("--worker_num=8", "nproc", 8),
        ("--local_worker_num 3", "nproc", 3),
        ("--worker_num 8 --local_worker_num 8", "nproc", 8),
        ("--worker_num 8 --nproc-per-node 8 --nnodes 1:1", "nproc", 8),
        ("--nproc-per-node 10000", "nproc", 10000),
        ("--nnodes 1", "nnodes", 1),
        ("--role trainer", "role", "trainer"),
        ("--max-restarts 3", "max_restarts", 3),
        ("--start-method spawn", "start_method", StartMethod.SPAWN),
        ("--start-method fork", "start_method", StartMethod.AUTO),
        ("--start-method forkserver", "start_method", StartMethod.AUTO),
        ("--preload numpy,a.b", "preload", ("numpy", "a.b")),
        ("--rdzv-id job7", "run_id", "job7"),
        ("--virtual-local-rank", "virtual_local_rank", True),
        ("--rank_table_file table.json", "rank_table_file", "table.json"),
        ("--event-log-handler console", "event_log_handler", "console"),
        ("--signals-to-handle SIGTERM,SIGUSR1,SIGTERM", "signals", ("SIGTERM", "SIGUSR1")),
        ("--bind_core true", "bind", BindSpec(auto=True)),
        ("--bind_core False", "bind", BindSpec()),
        ('--bind_core {"device0":["0-3","8"]}', "bind", BindSpec(cores={0: ("0-3", "8")})),
        ("--bind_numa True", "bind", BindSpec(numa="node")),
        ("--bind_numa socket", "bind", BindSpec(numa="socket")),
        ("--numa-binding exclusive --bind_numa exclusive", "bind", BindSpec(numa="exclusive")),
        ("--numa-binding core-complex", "bind", BindSpec(numa="core-complex")),
        ("--monitor-interval 1 --logs-specs default --rdzv-conf timeout=9,x='a;b'", "nproc", 1),
        ("--node_rank -1", "node_rank", 0),
    ],
)
def test_a_flag_reaches_its_field(line, field, value):
    assert getattr(_job(line), field) == value


@pytest.mark.parametrize(
    ("line", "addr", "port"),
    [
        ("", "127.0.0.1", None),
        ("--master-port 0", "127.0.0.1", None),
        ("--master_port 29500", "127.0.0.1", 29500),
        ("--master-addr h --master-port 1", "h", 1),
        ("--master-addr [::1]", "::1", None),
        ("--standalone", "127.0.0.1", None),
        ("--standalone --master-port 29500 --rdzv-backend bogus", "127.0.0.1", None),
        ("--local-addr 10.0.0.1", "10.0.0.1", None),
        ("--local-addr 10.0.0.1 --master-addr m", "m", None),
        ("--rdzv-endpoint h:29500", "h", 29500),
        ("--rdzv-endpoint [::1]:29500", "::1", 29500),
        ("--rdzv-endpoint h:5 --master-addr H --master-port 5", "h", 5),
        ("--rdzv-endpoint localhost:5 --master-addr 127.0.0.1", "localhost", 5),
        ("--rdzv-backend c10d", "127.0.0.1", None),
        ("--rdzv-backend c10d --rdzv-endpoint h", "h", None),
        ("--rdzv-backend c10d --rdzv-endpoint h:0", "h", None),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:7", "localhost", 7),
        ("--rdzv-backend c10d --rdzv-endpoint fe80::1", "fe80::1", None),
        ("--rdzv-backend=c10d --rdzv-endpoint=/a/b --rdzv-conf=store_type=file", "127.0.0.1", None),
        ("--rdzv-backend c10d --master-port 7", "127.0.0.1", 7),
    ],
)
def test_a_port_is_fixed_only_when_one_was_asked_for(line, addr, port):
    job = _job(line)
    assert (job.master_addr, job.master_port) == (addr, port)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("-r 3", "redirects", {0: Std.ALL, 1: Std.ALL}),
        ("-r 0", "redirects", {}),
        ("-t 0:1,1:0", "tee", {0: Std.OUT}),
        ("--local-ranks-filter 0,1", "local_ranks_filter", frozenset({0, 1})),
        ("--tail_worker_log -1", "tail", None),
        ("--tail_worker_log 1", "tail", frozenset({1})),
        ("--worker_log_name w", "worker_log_name", "w"),
        ("--log-dir /dev/null", "disabled", True),
        ("--log-dir /dev/null -r 3", "torchrun_tree", False),
        ("--duplicate-stdout-filters a,b,,c", "duplicate_stdout_filters", ("a", "b,c")),
        ("--duplicate-stderr-filters a", "duplicate_stderr_filters", ("a",)),
    ],
)
def test_a_log_flag_reaches_its_field(line, field, value):
    assert getattr(_job(f"--nproc-per-node 2 {line}").logs, field) == value


def test_maps_and_filters_know_ranks_of_two_digits():
    logs = _job("--nproc-per-node 12 -r 10:1,11:3 -t 11:2 --local-ranks-filter 10,11").logs
    assert logs.redirects == {10: Std.OUT, 11: Std.ALL}
    assert logs.tee == {11: Std.ERR}
    assert logs.local_ranks_filter == frozenset({10, 11})


def test_log_dir_is_absolute_and_may_not_exist_yet(folder):
    assert _job("--log_dir out/x").logs.log_dir == folder / "out" / "x"


def test_host_name_and_address_are_filled_into_the_log_name():
    assert "{" not in _job("--worker_log_name w_{hostname}_{ip}").logs.worker_log_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ()), ("a", ("a",)), ("a,b", ("a", "b")), ("a,,b", ("a,b",)), ("a,,,b", ("a,", "b")), (",", ()), (",,", (",",))],
)  # fmt: skip
def test_a_doubled_comma_is_a_comma(text, expected):
    assert words(Setting(text, "--x")) == expected


@pytest.mark.parametrize(
    ("line", "script", "kind"),
    [
        ("-m", "any.module", ProgramKind.MODULE),
        ("--no-python", "./run.sh", ProgramKind.PROGRAM),
        ("--no-python", "sh", ProgramKind.PROGRAM),
        ("--run-path", "t.py", ProgramKind.RUN_PATH),
        ("--run-path --no-python", "t.py", ProgramKind.RUN_PATH),
        ("", "package", ProgramKind.SCRIPT),
        ("", "t${local_rank}.py", ProgramKind.SCRIPT),
        ("", "pytest", ProgramKind.PROGRAM),
    ],
)
def test_the_program_is_run_as_asked(folder, line, script, kind):
    (folder / "bin").mkdir()
    for name in ("sh", "pytest"):
        (folder / "bin" / name).touch(mode=0o755)
    assert _job(line, {"PATH": f"/nowhere:{folder}/bin"}, script).program.kind is kind


@pytest.mark.parametrize("text", ["True", "true", "TRUE", "1", "yes", "on"])
def test_join_is_true_in_any_case(text):
    assert parse([f"--join={text}", "t.py"], {}).join


@pytest.mark.parametrize("text", ["False", "false", "0", "no"])
def test_join_is_false_in_any_case(text):
    assert not parse(["--join", text, "t.py"], {}).join


@pytest.mark.parametrize(
    ("line", "dry_run", "rank"),
    [
        ("--dry_run", True, None),
        ("--sim_level 0", True, None),
        ("--sim_level=3 --sim_rank_id=1", True, 1),
        ("--dry-run --sim_rank_id 0", True, 0),
        ("--sim_level -1", False, None),
        ("--sim_rank_id 1", False, None),
    ],
)
def test_a_dry_run_is_asked_for_in_either_dialect(line, dry_run, rank):
    request = parse([*line.split(), "--worker_num=2", "t.py"], {})
    assert (request.dry_run, request.sim_rank_id) == (dry_run, rank)


@pytest.mark.parametrize(
    ("environ", "line", "field", "value"),
    [
        ({"PET_NPROC_PER_NODE": "4"}, "", "nproc", 4),
        ({"PET_NPROC_PER_NODE": "4"}, "--nproc-per-node 2", "nproc", 2),
        ({"PET_WORKER_NUM": "4"}, "", "nproc", 4),
        ({"PET_MASTER_PORT": ""}, "", "master_port", None),
        ({"PET_MASTER_PORT": "7"}, "", "master_port", 7),
        ({"PET_STANDALONE": "true", "PET_MASTER_PORT": "7"}, "", "master_port", None),
        ({"PET_STANDALONE": "", "PET_MASTER_PORT": "7"}, "", "master_port", 7),
        ({"PET_STANDALONE": "0"}, "", "nproc", 1),
        ({"PET_NUMA_BINDING": "bogus"}, "", "bind", BindSpec()),
        ({"MASTER_PORT": "7", "MASTER_ADDR": "h"}, "", "master_port", None),
    ],
)
def test_the_environment_sets_defaults(environ, line, field, value):
    assert getattr(_job(line, environ), field) == value


@pytest.mark.parametrize(
    ("environ", "line", "grace_s"),
    [
        ({}, "--shutdown-timeout 0", 0.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "", 7.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "--shutdown-timeout 3", 3.0),
        ({"PET_SHUTDOWN_TIMEOUT": "5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "", 5.0),
    ],
)
def test_grace_comes_from_flag_then_variable(environ, line, grace_s):
    assert _job(line, environ).timeouts.grace_s == grace_s


@pytest.mark.parametrize(
    ("line", "environ", "field", "value"),
    [
        ("", {}, "", DumpSpec()),
        ("--freeze_timeout 1.5", {}, "freeze_s", 1.5),
        ("--update-grace 12", {}, "update_grace_s", 12),
        ("--audit 2%", {}, "audit", 0.02),
        ("--audit=0", {}, "audit", 0.0),
        ("--dump_timeout 25", {}, "stall_s", 25),
        ("--shutdown-timeout 15", {}, "stall_s", 10),
        ("--shutdown-timeout 1", {}, "stall_s", 10),
        ("--scheduler_grace 18", {}, "freeze_s", 2.5),
        ("--dump_split", {}, "split", True),
        ("--keep_dumps 7", {}, "keep", 7),
        ("--keep-dumps=0", {}, "keep", 0),
        ("--dump_fallback /a/b", {}, "fallback", Path("/a/b")),
        ("--recover_arg=--again", {}, "recover_arg", "--again"),
        ("--recover_arg=", {}, "recover_arg", ""),
        ("", {}, "recover_arg", None),
        ("--max-restarts 0", {}, "restarts_explicit", True),
        ("", {"PET_MAX_RESTARTS": "3"}, "restarts_explicit", True),
        ("", {"MS_ENABLE_TFT": "{TTP:0}"}, "ttp", False),
        ("", {"MS_ENABLE_TFT": "'{UCE:1, TTP:1}'", "MINDIO_FOR_MINDSPORE": "1"}, "ttp", True),
        ("", {"MS_ENABLE_TFT": "{UCE:1}"}, "ttp", True),
    ],
)
def test_an_option_of_the_power_off_checkpoint_reaches_its_field(line, environ, field, value):
    found = _job(line, environ).dump
    assert (getattr(found, field) if field else found) == value


@pytest.mark.parametrize(
    ("line", "hang_s"),
    [("", None), ("--hang_timeout auto", None), ("--hang-timeout=0", 0), ("--hang_timeout 2.5", 2.5)],
)  # fmt: skip
def test_how_long_a_rank_may_hang(line, hang_s):
    assert _job(line).timeouts.hang_s == hang_s


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_time_to_hang_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match=f"--hang_timeout={text} must be auto, or seconds"):
        _job(f"--hang_timeout={text}")


def test_a_relative_fallback_is_absolute_and_a_stop_fits_the_scheduler(folder):
    job = _job("--dump_fallback d --scheduler_grace 36")
    assert job.dump.fallback == folder / "d"
    assert (job.timeouts.grace_s, job.timeouts.scheduler_s) == (30, 36)


def test_a_command_line_is_kept_as_it_was_typed():
    assert parse(["-r", "0", "t.py", "--lr", "1"], {}).job.argv == ("-r", "0", "t.py", "--lr", "1")
    assert parse(["-v", "t.py"], {}).verbose


def test_a_negative_cluster_time_out_is_no_bound():
    assert _job("--cluster_time_out -1").timeouts.start_s is None


def test_interpreter_and_prefix_come_from_their_variables():
    environ = {"PYTHON_EXEC": "/py", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    job = _job("", environ)
    assert job.program.interpreter == "/py"
    assert job.logs.prefix_template == "[${rank}]"


def test_devices_size_the_job(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "agent.machine.devices.device_count", lambda word, _: asked.append(word) or 5
    )
    assert _job("--nproc-per-node auto").nproc == 5
    assert asked == ["auto"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--signals-to-handle SIGTERM,SIGNOPE", "SIGNOPE cannot be handled"),
        ("--signals-to-handle SIGKILL,SIGINT", "SIGKILL cannot be handled"),
        ("--node-rank 2", "--node-rank=2 is ignored"),
        ("--standalone --master-port 7", "--standalone overrides --master-port=7"),
        ("-r 0:3,5:3", "-r=0:3,5:3: local rank 5 is ignored"),
        ("-t 1:3", "-t=1:3: local rank 1 is ignored"),
        ("--local-ranks-filter 9", "local rank 9 is ignored"),
        ("--local-ranks-filter 0,9", "local rank 9 is ignored"),
        ("--sim_rank_id 0", "is ignored without --dry-run"),
        ("--duplicate-stdout-filters x", "filters=x is ignored: it picks lines of streams that -t"),
        ("-r 3 --duplicate-stderr-filters x", "--duplicate-stderr-filters=x is ignored"),
        ("-t 1 --duplicate-stderr-filters x", "--duplicate-stderr-filters=x is ignored"),
    ],
)
def test_what_torchrun_lets_pass_is_a_warning(line, said):
    (warning,) = parse([*line.split(), "t.py"], {}).warnings
    assert said in warning
    assert warning.endswith(".")


@pytest.mark.parametrize(
    "line",
    [
        "-t 3",
        "-t 2 --duplicate-stderr-filters x",
        "-r 3",
        "-r 0:3",
        "-r 2 -t 1",
        "--local-ranks-filter 0",
    ],
)
def test_streams_of_all_ranks_and_of_ranks_that_are_there_are_no_warning(line):
    assert parse([*line.split(), "t.py"], {}).warnings == ()


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--help", "usage: msrun"),
        ("--help-all", "usage: msrun"),
        ("--version", f"msrun {__version__}, torch {version('torch')}, P"),
    ],
)
def test_help_and_version_are_printed_and_leave_with_0(capsys, flag, said):
    with pytest.raises(SystemExit) as left:
        parse([flag], {})
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(said)


def test_a_record_id_is_unique_and_sorts_by_time():
    ids = {new_record_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", name) for name in ids)


def test_a_run_id_of_none_is_a_new_one():
    job = _job("--rdzv-id none")
    assert job.run_id == job.record_id


def test_a_report_has_the_name_that_stands_behind_the_equals_sign(folder):
    def wanted(*words, **environ):
        request = parse([*words, "t.py"], environ)
        assert request.job.program.name == "t.py"
        return request.report

    assert wanted() is None and wanted("--report=False") is None
    assert wanted("--report=r.html") == folder / "r.html"
    default = re.escape(str(folder)) + r"/msrun-report-\d{8}-\d{6}-\w{6}\.html"
    for path in (wanted("--report"), wanted("--report="), wanted(PET_REPORT="1")):
        assert re.fullmatch(default, str(path))
    for given in (
        ["--report", "--log-dir=/dev/null"],
        ["--report=none/r.html"],
        ["--report=package"],
    ):
        with pytest.raises(UsageError, match="--report"):
            parse([*given, "t.py"], {})
