"""Whether nodes can be made of namespaces here; if not, one sentence that says what to do."""

import pytest

from msrun.cluster.namespaces import NEEDED, refusal


@pytest.fixture
def programs(tmp_path):
    """A folder of programs that do nothing, and a way to write them."""

    def write(name, script="exit 0"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    for name in NEEDED:
        write(name)
    return tmp_path, write


def test_where_all_is_allowed_nothing_is_said(programs):
    folder, _ = programs
    assert refusal(str(folder)) == ""


def test_what_is_missing_is_named_with_its_packages(programs):
    folder, _ = programs
    (folder / "ip").unlink()
    why = refusal(str(folder))
    assert "ip would have to be installed" in why
    assert "apt install iproute2" in why


def test_what_the_kernel_said_is_one_line_with_what_to_do(programs):
    folder, write = programs
    write("unshare", "echo one >&2; echo 'unshare failed: Operation not permitted' >&2; exit 1")
    why = refusal(str(folder))
    assert "\n" not in why
    assert "one; unshare failed: Operation not permitted" in why
    for way in (
        "user.max_user_namespaces",
        "apparmor_restrict_unprivileged_userns",
        "--privileged",
    ):
        assert way in why


def test_a_switch_and_network_namespaces_are_tried_as_a_cluster_needs_them(programs):
    """A kernel without bridges would otherwise be found in the middle of a drill."""
    folder, write = programs
    write("unshare", 'case "$*" in *"type bridge"*) echo "Unknown device type" >&2; exit 2;; esac')
    assert "Unknown device type" in refusal(str(folder))
