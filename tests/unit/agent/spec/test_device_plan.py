"""Which device the ranks that start now have, and what a fault changes: only for successors."""

from agent.spec.device_plan import DevicePlan

ECC, BUS = "uncorrectable ECC error encountered", "Xid 79"
PLAN = DevicePlan({0: "0", 1: "1"}, ("2",))


def test_nothing_is_planned_by_default():
    plan = DevicePlan()
    assert (plan.is_on, plan.visible) == (False, ())
    assert plan.failed(0, ECC).renewed((0,)) == (plan, "")


def test_a_fault_alone_gives_nothing_up():
    plan = PLAN.failed(1, ECC)
    assert (plan.visible, plan.spare, plan.given_up) == (("0", "1", "2"), ("2",), ())


def test_the_failed_device_leaves_the_list_and_a_spare_one_takes_its_place():
    plan, said = PLAN.failed(1, ECC).renewed((1,))
    assert plan.visible == ("0", "2")
    assert (plan.given_up, plan.spare, plan.faults) == (("1",), (), {})
    assert said == (
        f"device 1 of rank 1 failed ({ECC}) and is not used again: its successor gets device 2, "
        "the last spare one"
    )


def test_the_number_of_a_local_rank_still_names_its_device():
    plan, said = DevicePlan({0: "a", 1: "b"}, ("c", "d"), ("e",)).failed(0, ECC).renewed((0, 1))
    assert plan.visible == ("c", "b", "d", "e")
    assert said.endswith("gets device c, 1 spare left")


def test_a_device_fails_and_the_spare_one_fails_as_well():
    plan, _ = DevicePlan({0: "0", 1: "1"}, ("2", "3")).failed(1, ECC).renewed((1,))
    plan, _ = plan.failed(1, ECC).renewed((1,))
    assert (plan.visible, plan.given_up) == (("0", "3"), ("1", "2"))


def test_without_a_spare_device_it_is_said_and_the_same_one_is_used():
    plan, _ = PLAN.failed(1, ECC).renewed((1,))
    plan, said = plan.failed(0, BUS).renewed((0, 1))
    assert (plan.visible, plan.given_up, plan.faults) == (("0", "2"), ("1",), {})
    assert said == (
        "device 0 of rank 0 failed (Xid 79), and no spare device is left: its successor gets the "
        "same one"
    )


def test_a_rank_that_was_ordered_early_keeps_its_device_when_another_fails():
    plan = DevicePlan({0: "0", 1: "1"}, ("2", "3")).failed(1, ECC)
    early, _ = plan.renewed((1,))
    late, said = plan.failed(0, ECC).renewed((0, 1))
    assert early.visible[1] == late.visible[1] == "2"
    assert late.visible == ("3", "2")
    assert said.count("is not used again") == 2


def test_ranks_that_are_not_ordered_keep_their_fault():
    plan, said = PLAN.failed(1, ECC).renewed((0,))
    assert (plan.faults, said) == ({1: ECC}, "")
