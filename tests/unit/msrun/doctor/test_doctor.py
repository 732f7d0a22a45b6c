"""What the doctor says about what it finds; nothing that hangs holds it up."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import pytest

from msrun.commands import run
from msrun.doctor import folder, folder_probe, limits, machine, network, software
from msrun.doctor.finding import Grade
from msrun.doctor.folder import FolderProbe, file_system, judged
from msrun.doctor.probe import Probe, ProbeAnswer

ROOT = Path(__file__).parents[4]
HANGS = "import signal, sys; print('begun', flush=True); signal.pause()"
OK, WARN, FAIL = Grade.OK, Grade.WARN, Grade.FAIL
MB = 10**6
PLACE = {"place": "/", "is_there": True}
ROOMY = {"free": 10**11, "size": 10**12}
FAST = {"step": "write", "nbytes": 256 * MB, "wrote_s": 0.9, "synced_s": 1.0}
DOINGS = ("sync of a folder", "rename of a folder", "hard link", "flock")


def said(*facts, code=0):
    return ProbeAnswer("".join(json.dumps(fact) + "\n" for fact in facts), "", code)


def grades(findings):
    return {one.part: one.grade for one in findings}


# --- children --------------------------------------------------------------------------------------


def test_a_child_that_hangs_is_killed_at_its_deadline_and_what_it_said_counts():
    probe = Probe((sys.executable, "-c", HANGS), 1.0)
    began = time.monotonic()
    assert probe.answer() == ProbeAnswer("begun\n", "", None)
    assert time.monotonic() - began < 5
    assert probe._child.returncode == -9


def test_a_program_that_is_not_there_is_an_answer():
    assert Probe(("/nowhere/python",), 1.0).answer().code == 1


# --- the folder ------------------------------------------------------------------------------------


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    found = FolderProbe(tmp_path).findings()
    assert not [one for one in found if one.grade is FAIL]
    assert {"write and sync", "free space", *DOINGS} <= grades(found).keys()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path):
    (first, *_) = FolderProbe(tmp_path / "a" / "b").findings()
    assert first.found.startswith(f"{tmp_path}/a/b does not exist yet, {tmp_path} does (")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_file_is_no_folder_that_does_not_exist_yet(tmp_path, below):
    (tmp_path / "file").touch()
    (found,) = FolderProbe(Path(f"{tmp_path}/file{below}")).findings()
    assert (found.grade, found.advice) == (FAIL, "name a folder")
    assert found.found == f"{tmp_path}/file is a file"


def test_a_probe_whose_reader_is_gone_leaves_nothing(tmp_path, monkeypatch):
    def say(**facts):
        if facts.get("step") == "mkdir":
            raise BrokenPipeError

    monkeypatch.setattr(folder_probe, "say", say)
    with pytest.raises(BrokenPipeError):
        folder_probe.main(str(tmp_path), "tried")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_no_place():
    (found,) = FolderProbe(Path("/proc")).findings()
    assert found.grade is FAIL


def test_a_file_server_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    program = tmp_path / "probe.py"
    doing = json.dumps({"doing": "hard link"})
    program.write_text(
        "import signal, sys\n"
        f"if len(sys.argv) > 3: open({str(tmp_path / 'cleaned')!r}, 'x')\n"
        f"else: print({doing!r}, flush=True); signal.pause()\n"
    )
    monkeypatch.setattr(folder, "_PROGRAM", str(program))
    monkeypatch.setattr(folder, "LIMIT_S", 1.0)
    found = FolderProbe(tmp_path).findings()
    assert found[-1].grade is FAIL
    assert "hard link has not ended within 1 s" in found[-1].found
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(
    ("facts", "part", "grade", "words"),
    [
        ([FAST], "write and sync", OK, "256 MB at 256 MB/s, of which the sync took 0.10 s"),
        ([{**FAST, "synced_s": 20}], "write and sync", WARN, "12.8 MB/s"),
        ([{"step": "write", "error": "Invalid argument"}], "write and sync", FAIL, "Invalid"),
        ([ROOMY], "free space", OK, "100 GB of 1 TB"),
        ([{"free": 500 * MB, "size": 10**9}], "free space", WARN, "500 MB of 1 GB"),
        ([{"free": 1 * MB, "size": 10**9}], "free space", FAIL, "1 MB of 1 GB"),
        ([{"step": "hard link", "error": "Operation not permitted"}], "hard link", WARN, "Oper"),
        ([{"step": "flock", "seconds": 0.1}], "flock", OK, "works"),
        ([{"step": "mkdir", "error": "Read-only file system"}], "folder", FAIL, "Read-only"),
    ],
)
def test_each_fact_of_a_folder_has_its_grade(facts, part, grade, words):
    (found,) = [one for one in judged("/", said(PLACE, *facts)) if one.part == part]
    assert found.grade is grade
    assert words in found.found
    assert bool(found.advice) == (grade is not OK)


def test_a_probe_that_crashes_is_a_failure():
    found = list(
        judged("/", ProbeAnswer('{"doing": "flock"}\n{"ste', "Traceback\nOSError: x\n", 1))
    )
    assert found[-1].found == "/: flock failed: OSError: x"
    assert found[-1].grade is FAIL


def test_the_kind_of_file_system_is_that_of_the_deepest_mount(tmp_path):
    rows = (
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
        r"23 22 0:40 / /mnt/a\040b rw shared:1 - nfs4 server:/x rw",
        "24 22 0:41 / /mnt rw - tmpfs tmpfs rw",
    )
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(rows) + "\n")
    places = ("/home", "/mnt/a b/ckpt", "/mnt/a", "/mntx")
    assert [file_system(each, table) for each in places] == ["ext4", "nfs4", "tmpfs", "ext4"]
    assert file_system("/", tmp_path / "none") == "unknown"


# --- the machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "grade"),
    [
        (machine.memory(10**10, 10**10), OK),
        (machine.memory(10**8, 10**10), WARN),
        (machine.memory(None, None), WARN),
        (machine.shared_memory("/nowhere"), FAIL),
        (machine.clock(0.0, None), FAIL),
        (machine.clock(2e9, synchronized=False), OK),
        (machine.ptrace("3"), OK),
        (machine.child_signals("SigBlk:\t0\nSigIgn:\t0000000000010000\n"), WARN),
        (machine.child_signals("SigIgn:\t0000000000001000\n"), OK),
        (limits.counted("x", 20, 100, (128, 1024), "more"), FAIL),
        (limits.counted("x", 20, 500, (128, 1024), "more"), WARN),
        (limits.counted("x", 20, 4096, (128, 1024), "more"), OK),
        (limits.counted("x", 20, resource.RLIM_INFINITY, (128, 1024), "more"), OK),
        (limits.core(resource.RLIM_INFINITY), WARN),
        (limits.core(0), OK),
        (network.loopback(), OK),
        (network.ports("32768\t60999"), OK),
        (network.ports("32768\t32800"), WARN),
        (network.ports(""), OK),
        (network.own_name(ProbeAnswer("", "", None), "node"), WARN),
        (network.own_name(ProbeAnswer("", "gaierror", 1), "node"), WARN),
        (network.own_name(ProbeAnswer("node 10.0.0.1\n", "", 0), "node"), OK),
    ],
)
def test_each_part_has_its_grade(found, grade):
    assert found.grade is grade
    assert found.found
    assert bool(found.advice) == (grade is not OK)


def test_the_tightest_control_group_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    job = tmp_path / "sys/fs/cgroup/job"
    (job / "step").mkdir(parents=True)
    (job / "pids.max").write_text("100\n")
    (job / "memory.max").write_text("4000000000\n")
    (job / "step/pids.max").write_text("max\n")
    (job / "step/memory.max").write_text("8000000000\n")
    (job / "step/cpu.max").write_text("50000 100000\n")
    found = {one.part: (one.grade, one.found) for one in limits.cgroup(tmp_path)}
    assert found == {
        "cgroup pids": (WARN, "100"),
        "cgroup memory": (OK, "4 GB"),
        "cgroup cpu": (WARN, "0.5 cores"),
    }


# --- torch -----------------------------------------------------------------------------------------

TORCH = {
    "version": "2.13.0+cpu", "seconds": 1.5, "built_for": "CPU", "has_distributed": True,
    "backends": ["gloo"], "devices": [], "threads": 2,
}  # fmt: skip


def torch_says(answer, environ=None):
    told = software.torch_findings(answer, {"CUDA_VISIBLE_DEVICES": ""} | (environ or {}))
    return {one.part: one for one in told}


@pytest.mark.parametrize(
    ("facts", "part", "grade", "words"),
    [
        ({}, "torch", OK, "2.13.0+cpu, built for CPU, imported in 1.5 s"),
        ({"version": "2.8.1"}, "torch", WARN, "2.8.1"),
        ({"version": "3.0.0"}, "torch", WARN, "3.0.0"),
        ({"version": "git"}, "torch", WARN, "git"),
        ({}, "backends", OK, "gloo"),
        ({"backends": []}, "backends", FAIL, "none"),
        ({}, "devices", OK, "CPU"),
        ({"devices": ["H100", "H100", "A"]}, "devices", WARN, "2 x H100, 1 x A"),
    ],
)
def test_torch_is_judged_by_what_it_says(facts, part, grade, words):
    found = torch_says(said(TORCH | facts))[part]
    assert (found.grade, words in found.found) == (grade, True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ProbeAnswer("", "", None), "has not ended"),
        (ProbeAnswer("", "ModuleNotFoundError: No module named 'torch'\n", 1), "No module named"),
        (ProbeAnswer("", "", -11), "exit code -11"),
        (ProbeAnswer("warning\n", "", 0), "cannot be imported"),
    ],
)
def test_a_torch_that_cannot_be_asked_is_a_failure(answer, words):
    assert (torch_says(answer)["torch"].grade, list(torch_says(answer))) == (FAIL, ["torch"])
    assert words in torch_says(answer)["torch"].found


def test_gpus_that_torch_does_not_see_are_named(monkeypatch):
    monkeypatch.setattr(software, "gpu_count", lambda _: 4)
    assert torch_says(said(TORCH))["devices"].grade is WARN


def test_the_versions_are_those_of_the_readme():
    line = re.search(r"torch (\d+)\.(\d+) to (\d+)\.(\d+)", (ROOT / "README.md").read_text())
    told = tuple(map(int, line.groups()))
    assert told == (*software.OLDEST, *software.NEWEST)


# --- the command -----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """A torch that answers at once: the real one is asked by tests/torch."""
    answer = f"print({json.dumps(TORCH)!r})"
    monkeypatch.setattr(software, "_CODE", answer)


@pytest.mark.usefixtures("quick")
def test_a_line_for_each_part_and_the_exit_code(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    code = run(["doctor", str(tmp_path)])
    out = capfd.readouterr().out
    assert re.search(r"^ok    torch +2\.13\.0\+cpu", out, re.MULTILINE)
    (failed,) = re.findall(r"^\d+ ok, \d+ warn, (\d+) fail$", out.splitlines()[-1])
    assert code == bool(int(failed))  # another machine may lack something
    assert not re.search(r"^fail +(python|folder|write and sync|flock)", out, re.MULTILINE)
    assert run(["doctor", "/proc"]) == 1
    assert re.search(r"^fail  folder +/proc .*\n +-> name", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("quick")
def test_programs_get_the_same(capfd):
    assert run(["doctor", "/proc", "--json"]) == 1
    content = json.loads(capfd.readouterr().out)
    assert content["worst"] == "fail"
    assert {"grade": "ok", "part": "backends", "found": "gloo", "advice": ""} in content["findings"]


@pytest.mark.usefixtures("quick")
def test_colours_are_shown_where_they_are_asked_for(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run(["doctor", str(tmp_path)])
    assert "\033[32mok    \033[0mpython" in capfd.readouterr().out
