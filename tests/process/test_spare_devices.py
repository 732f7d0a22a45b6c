"""Jobs without hooks whose device fails: all ranks start again, with a list without that device."""

import json

import pytest
from support.cuda_errors import ECC, ERROR, watchdogs
from support.jobs import refused

SCRIPT = f"""
import os, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("devices", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"], flush=True)
failing = attempt < int(sys.argv[2])
has_said = sys.argv[0] + str(attempt)
if rank == "0":
    open(has_said, "w").close()
if rank == "1" and failing:
    while not os.path.exists(has_said):
        time.sleep(0.01)
    if sys.argv[1] == "raise":
        raise RuntimeError({ERROR!r})
    os.write(2, {watchdogs().encode()!r})
    os.abort()
while failing:
    time.sleep(0.01)
"""

GIVEN_UP = (
    f"msrun: device 1 of rank 1 failed ({ECC}) and is not used again: its successor gets device 2, "
    "the last spare one\n"
)
KEPT = (
    f"msrun: device 2 of rank 1 failed ({ECC}), and no spare device is left: its successor gets "
    "the same one\n"
)


def start(msrun, how, times, *options, devices="0,1,2"):
    script = msrun.tmp / "script.py"
    script.write_text(SCRIPT)
    options = ("--worker_num=2", *options, script, how, times)
    return msrun.start(*options, CUDA_VISIBLE_DEVICES=devices)


def lists(job, rank):
    """What a rank was given in each attempt."""
    logs = sorted(
        (job.folder).glob(f"worker_{rank}*.log"), key=lambda path: path.stat().st_mtime_ns
    )
    return [path.read_text().splitlines()[0] for path in logs]


@pytest.mark.parametrize("how", ["raise", "abort"])
def test_after_a_restart_no_rank_sees_the_device_that_failed(msrun, how):
    job = start(msrun, how, 1, "--spare-devices=1", "--max-restarts=1")
    ended = job.wait()
    assert ended.code == 0, ended
    assert ended.err.count(GIVEN_UP) == 1
    assert set(lists(job, 0)) == {"devices 0,1,2 0", "devices 0,2 0"}
    assert set(lists(job, 1)) == {"devices 0,1,2 1", "devices 0,2 1"}
    (given_up,) = job.seen("GiveUpDevices")
    assert given_up["devices"] == ["1"]
    (record,) = (msrun.tmp / "state").rglob("record.json")
    assert json.loads(record.read_text())["failed_devices"] == ["1"]


def test_when_none_is_left_it_is_said_and_the_same_one_is_used(msrun):
    job = start(msrun, "abort", 2, "--spare_devices=1", "--max-restarts=2")
    ended = job.wait()
    assert ended.code == 0, ended
    assert ended.err.count(GIVEN_UP) == ended.err.count(KEPT) == 1
    assert [one["devices"] for one in job.seen("StartAttempt")] == [
        ["0", "1", "2"],
        ["0", "2"],
        ["0", "2"],
    ]


def test_without_the_option_all_is_as_it_was_and_the_report_names_the_fault(msrun):
    job = start(msrun, "abort", 2, "--max-restarts=1")
    ended = job.wait()
    assert ended.code == 1
    assert "is not used again" not in ended.err
    assert f"hint: its device failed ({ECC}): have it reset" in ended.err
    assert [one["devices"] for one in job.seen("StartAttempt")] == [[], []]
    assert set(lists(job, 1)) == {"devices 0,1,2 1"}


def test_what_cannot_be_kept_is_refused_before_anything_starts(msrun):
    script = msrun.tmp / "script.py"
    script.write_text(SCRIPT)
    command = ("--worker_num=2", "--spare-devices=1", script, "raise", 1)
    said = refused(msrun.run(*command, CUDA_VISIBLE_DEVICES=""))
    assert said.endswith("set CUDA_VISIBLE_DEVICES to 3 devices, as in CUDA_VISIBLE_DEVICES=0,1,2")
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        said = refused(msrun.run(*command, **{"CUDA_VISIBLE_DEVICES": "0,1,2", name: "0"}))
        assert f"{name} is set" in said
    assert "list more, or ask for fewer" in refused(msrun.run(*command, CUDA_VISIBLE_DEVICES="0,1"))
    assert "--spare-devices=many" in refused(
        msrun.run("--spare-devices=many", script, CUDA_VISIBLE_DEVICES="0,1")
    )
