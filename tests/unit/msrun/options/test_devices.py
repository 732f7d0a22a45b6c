"""--spare-devices: what is planned, and what is refused in one sentence with what to do."""

import re

import pytest

from agent.spec.device_plan import DevicePlan
from agent.spec.job_spec import UsageError
from msrun.options.devices import plan_devices


def plan(listed, spares=1, workers=2, given_up=(), **environ):
    return plan_devices(
        range(workers), spares, {"CUDA_VISIBLE_DEVICES": listed, **environ}, given_up
    )


def test_without_the_option_nothing_is_looked_at():
    assert plan_devices((0, 1), 0, {"HIP_VISIBLE_DEVICES": "x"}, ("1",)) == DevicePlan()


def test_the_workers_have_the_first_devices_and_the_next_ones_are_spare():
    assert plan("7, GPU-a,3,5") == DevicePlan({0: "7", 1: "GPU-a"}, ("3",), ("5",))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "set CUDA_VISIBLE_DEVICES to 3 devices, as in CUDA_VISIBLE_DEVICES=0,1,2"),
        ({"CUDA_VISIBLE_DEVICES": " "}, "set CUDA_VISIBLE_DEVICES to 3 devices"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2 workers need 3 devices, and .*=0,1 lists 2: list"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,1"}, "lists a device twice: name each once"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, "must list whole devices .*, and '-1' is none"),
        ({"CUDA_VISIBLE_DEVICES": "0,,2"}, "must list whole devices .*, and '' is none"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, "whole devices .*, and 'MIG-a' is none"),
        ({"HIP_VISIBLE_DEVICES": "0,1,2"}, "for CUDA, and HIP_VISIBLE_DEVICES is set.*unset it"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "for CUDA, and ROCR_VISIBLE_DEVICES is set.*unset it"),
    ],
)
def test_what_cannot_be_kept_is_refused(environ, words):
    listed = {"CUDA_VISIBLE_DEVICES": "0,1,2"} if "HIP" in words or "ROCR" in words else {}
    with pytest.raises(UsageError) as refused:
        plan_devices((0, 1), 1, listed | environ)
    said = str(refused.value)
    assert said.startswith("--spare-devices=1")
    assert re.search(words, said), said
    assert "\n" not in said


def test_a_device_that_failed_in_the_resumed_run_is_not_used():
    assert plan("0,1,2", given_up=("1",)) == DevicePlan({0: "0", 1: "2"}, given_up=("1",))


def test_it_may_have_left_the_list_and_another_one_may_have_taken_its_place():
    assert plan("0,2", given_up=("1",)) == DevicePlan({0: "0", 1: "2"}, given_up=("1",))
    assert plan("0,2,3", given_up=("1",)).spare == ("3",)


def test_a_device_that_was_no_spare_one_does_not_become_one():
    found = plan("0,1,2,3", given_up=("1",))
    assert (found.slots, found.spare, found.others) == ({0: "0", 1: "2"}, (), ("3",))


def test_too_few_that_did_not_fail_are_refused():
    with pytest.raises(UsageError, match="0,2 failed in the run that is resumed, so 1 remain for 2 workers"):  # fmt: skip
        plan("0,1,2", given_up=("0", "2"))
