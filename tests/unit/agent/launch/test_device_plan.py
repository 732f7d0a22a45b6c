"""Which device each rank has, and what the successor of one whose device failed gets."""

import pytest

from agent.launch.device_plan import DevicePlan, device_fault
from agent.spec.job_spec import JobSpec, Program, ProgramKind, UsageError

CUDA = """CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


def spec(**changes):
    program = Program("train.py", (), ProgramKind.SCRIPT, "python3")
    return JobSpec(program=program, run_id="job", record_id="rec", **changes)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"torch.AcceleratorError: {CUDA}", "uncorrectable ECC error"),
        ("its device reports an error: CUDA error: hardware stack error", "hardware stack error"),
        ("HIP error: hipErrorECCNotCorrectable", "hipErrorECCNotCorrectable"),
        ("level_zero backend failed: UR_RESULT_ERROR_DEVICE_LOST", "RESULT_ERROR_DEVICE_LOST"),
        ("CUDA error: an illegal memory access was encountered", ""),  # a program's fault
        ("CUDA error: device-side assert triggered", ""),
        ("torch.OutOfMemoryError: CUDA out of memory", ""),
        ("", ""),
    ],
)
def test_a_fault_of_a_device_is_told_from_one_of_a_program(text, fault):
    assert device_fault(text) == fault


def test_successors_get_spare_devices_as_long_as_there_are_any():
    plan = DevicePlan(spec(nproc=4, spare_devices=2), {})
    assert [plan.order(rank) for rank in range(4)] == [""] * 4
    said = plan.give_up(1, 1, "uncorrectable ECC error")
    assert said == (
        "device 1 of rank 1 failed (uncorrectable ECC error): its successor gets device 4, "
        "1 spare left"
    )
    assert [plan.order(rank) for rank in range(4)] == ["", "0,4,2,3,1,5", "", ""]
    assert plan.give_up(1, 1, "x").endswith("device 4 of rank 1 failed (x): its successor gets device 5, the last spare one")  # fmt: skip
    assert plan.order(1) == "0,5,2,3,4,1"
    assert not plan.has_spare
    assert [plan.only(rank) for rank in range(4)] == [None] * 4


def test_the_users_own_list_is_kept_in_its_order():
    plan = DevicePlan(spec(nproc=2, spare_devices=1), {"CUDA_VISIBLE_DEVICES": "7, GPU-a,3,5"})
    plan.give_up(0, 0, "x")
    assert plan.order(0) == "3,GPU-a,7"
    assert plan.order(1) == ""


def test_with_a_virtual_local_rank_the_one_device_is_another():
    plan = DevicePlan(spec(nproc=2, spare_devices=1, virtual_local_rank=True), {})
    plan.give_up(1, 1, "x")
    assert [plan.only(rank) for rank in range(2)] == ["0", "2"]
    assert plan.order(1) == ""


def test_spare_devices_that_are_not_there_are_refused():
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1"}
    wanted = "--spare-devices=1 needs one device a worker and 1 spare devices: CUDA_VISIBLE_DEVICES=0,1 lists 2 for 2 workers"
    with pytest.raises(UsageError, match=wanted):
        DevicePlan(spec(nproc=2, spare_devices=1), inherited)
    DevicePlan(spec(nproc=2), {"CUDA_VISIBLE_DEVICES": "0"})  # nobody asked for more
