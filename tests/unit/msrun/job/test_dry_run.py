from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from agent.launch import rank_plan
from agent.launch.rank_plan import Binding
from agent.spec.job_spec import (
    BindSpec,
    ClusterSpec,
    DumpSpec,
    JobSpec,
    LogSpec,
    Program,
    ProgramKind,
    StartMethod,
    Std,
    Timeouts,
    UsageError,
)
from msrun.job import dry_run

SPEC = JobSpec(
    program=Program(
        "/no/train.py", ("--name", "it's ${local_rank}"), ProgramKind.SCRIPT, sys.executable
    ),
    nproc=3,
    run_id="job",
    record_id="rec",
)
RECORDS = Path("/state/runs")
SECOND = {
    "cluster": ClusterSpec(2, None, 1),
    "nodes": (2, 3),
    "node_rank": 1,
    "master_addr": "h",
    "master_port": 7,
}
"""The second of two nodes."""


def text(
    spec: JobSpec, rank: int | None = None, bindings: tuple[Binding, ...] = (), **environ: str
) -> str:
    return "\n".join(dry_run.lines(dry_run.make_plan(spec, environ, bindings, RECORDS), rank))


def exported(shown: str) -> dict[str, str]:
    words = [shlex.split(line)[1] for line in shown.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for word in words)


def of_ranks(shown: str) -> list[list[str]]:
    """The words of each rank's `env ...` command, as a shell would read them."""
    return [
        shlex.split(part.partition("\n\n")[0].replace("\\\n", ""))
        for part in shown.split("\nenv ")[1:]
    ]


def test_the_environment_shown_is_the_one_workers_get():
    shown = exported(text(SPEC._replace(master_port=29501)))
    assert shown == rank_plan.job_env(SPEC._replace(master_port=29501), 29501).environ({}, "rec")
    assert list(shown) == sorted(shown)


def test_each_rank_is_shown_with_its_own_environment_and_command():
    plan = dry_run.make_plan(SPEC, {}, (), RECORDS)
    for words, order in zip(of_ranks(text(SPEC)), plan.orders, strict=True):
        told = [f"{name}={value}" for name, value in sorted(order.environ.items())]
        assert words == [*told, *order.argv]
    assert "it's 2" in of_ranks(text(SPEC))[2]


@pytest.mark.parametrize("port", [None, 0])
def test_without_a_port_a_free_one_is_promised_and_none_is_bound(port):
    shown = text(SPEC._replace(master_port=port))
    assert not exported(shown).keys() & {"MASTER_PORT", "MS_SCHED_PORT"}
    assert "# MASTER_PORT: a free port" in shown
    assert "# master    127.0.0.1, a free port" in shown


def test_one_rank_alone_can_be_shown():
    shown = text(SPEC, 1)
    assert "# rank 1" in shown and "# rank 0" not in shown and len(of_ranks(shown)) == 1


@pytest.mark.parametrize("rank", [3, -2])
def test_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(
        UsageError, match=f"--sim-rank-id={rank} is out of range: the ranks are 0 to 2"
    ):
        text(SPEC, rank)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "# world     3 ranks on 1 node, 3 here"),
        (SECOND, "# world     5 ranks on 2 nodes, this is 1, 3 here"),
        (SECOND, "# nodes     meet at h, port 7; the workers at a free port there"),
        (SECOND, "# MASTER_PORT: a free port"),
        (SECOND, "#   stdout  /state/runs/rec/worker_4.log"),
        (
            {**SECOND, "cluster": ClusterSpec(2)},
            "# world     5 ranks on 2 nodes, numbered by their addresses when all are here, 3 here",
        ),
        ({"master_port": 5, "master_addr": "h"}, "# master    h, port 5"),
        ({"start_method": StartMethod.SPAWN}, "# start     cold: --start-method spawn"),
        ({}, "# start     cold: the script does not import torch"),
        ({"max_restarts": 4}, "# restarts  at most 4"),
        ({"dump": DumpSpec(recover_arg="--go")}, "# resumes   with --go appended"),
        ({"dump": DumpSpec(recover_arg="")}, "# resumes   with no argument appended"),
        (
            {"timeouts": Timeouts(None, 2.5, 1)},
            "# timeouts  start unbounded, grace 2.5 s, kill 1 s",
        ),
        ({"logs": LogSpec(log_dir=Path("/l"))}, "# logs      /l"),
        ({"logs": LogSpec(log_dir=Path("/l"))}, "#   stdout  /l/worker_2.log"),
        ({}, "# logs      /state/runs/rec"),
        ({"logs": LogSpec(disabled=True)}, "# logs      none (/dev/null)"),
        ({"logs": LogSpec(disabled=True)}, "#   stdout  the console"),
        (
            {"logs": LogSpec(redirects={0: Std.ERR})},
            "#   stderr  /state/runs/rec/job_rec/attempt_0/0/stderr.log",
        ),
        ({"bind": BindSpec(numa="node")}, "# binding   by NUMA (node)"),
        ({"logs": LogSpec(log_dir=Path("/l\nrm -r x\x1b"))}, "# logs      /l\\nrm -r x\\x1b"),
    ],
)
def test_the_summary_says(change, line):
    assert line in text(SPEC._replace(**change)).splitlines()


def test_nothing_but_comments_assignments_and_commands_can_be_read_by_a_shell():
    spec = SPEC._replace(run_id="a\nb; rm x", logs=LogSpec(log_dir=Path("/l\nrm -r x")))
    shown = text(spec)
    assert (
        exported(shown.replace("'a\nb; rm x'", "'a b; rm x'"))["TORCHELASTIC_RUN_ID"] == "a b; rm x"
    )
    assert "rm" not in shlex.split(shown, comments=True)


def test_a_rank_s_binding_is_shown():
    shown = text(
        SPEC._replace(bind=BindSpec(auto=True)),
        1,
        tuple(Binding((i, i + 1, 7)) for i in range(3)),
    )
    assert "#   cpus    1-2,7" in shown
    assert "# binding   an even share of the cores" in shown


def test_too_few_visible_devices_are_a_usage_error():
    with pytest.raises(UsageError, match="--virtual-local-rank needs one device a worker"):
        text(SPEC._replace(virtual_local_rank=True), CUDA_VISIBLE_DEVICES="0,1")


def test_the_records_folder_is_found_and_not_made(tmp_path):
    found = dry_run._records_folder({"XDG_STATE_HOME": str(tmp_path / "s"), "HOME": str(tmp_path)})
    assert found == tmp_path / "s" / "msrun" / "runs"
    assert os.listdir(tmp_path) == []


def test_a_home_that_is_a_file_is_passed_over(tmp_path):
    (tmp_path / "home").touch()
    found = dry_run._records_folder({"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)})
    assert found == tmp_path / f"msrun-{os.getuid()}" / "runs"
