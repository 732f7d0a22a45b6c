"""Whether a control group keeps a process from running, as version 1 and 2 of the kernel tell it."""

import pytest

from worker_hooks.machine.cgroup import is_frozen

V1 = {"proc/7/cgroup": "6:freezer:/pod/job\n4:memory:/elsewhere\n0::/\n"}
V2 = {"proc/7/cgroup": "0::/pod/job\n"}
OURS_1, TOP_1 = "sys/fs/cgroup/freezer/pod/job/freezer.state", "sys/fs/cgroup/freezer/freezer.state"
OURS_2, TOP_2 = "sys/fs/cgroup/pod/job/cgroup.events", "sys/fs/cgroup/cgroup.events"
FREE, FROZEN = "populated 1\nfrozen 0\n", "populated 1\nfrozen 1\n"


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ({}, False),
        (V1, False),
        (V1 | {OURS_1: "THAWED\n"}, False),
        (V1 | {OURS_1: "FROZEN\n"}, True),
        (V1 | {OURS_1: "FREEZING\n"}, True),
        (V1 | {TOP_1: "FROZEN\n"}, True),  # in a container, which sees another path than it has
        (V1 | {OURS_1: "THAWED\n", TOP_1: "FROZEN\n"}, False),
        (V2 | {OURS_2: FREE}, False),
        (V2 | {OURS_2: FROZEN}, True),
        (V2 | {TOP_2: FROZEN}, True),
        (V2 | {"sys/fs/cgroup/unified/pod/job/cgroup.events": FROZEN}, True),
        ({"proc/8/cgroup": "0::/pod/job\n", OURS_2: FROZEN}, False),  # another's
    ],
)
def test_who_is_frozen(tmp_path, files, answer):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert is_frozen(7, tmp_path) == answer
