"""Nodes that are given no token make one, if they share the folder; nobody reads what is not meant."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.launch.job_token import KEPT_S, JobToken
from agent.spec.job_spec import ClusterSpec

LONG_S = 30.0  # no test waits for it to pass
NAME = "slurm-100.2-0-20000"
CLUSTER = ClusterSpec(2, own_token=NAME)


@pytest.fixture
def home(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path)}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "msrun/tokens" / NAME


def made(home):
    """The token of a node 0 whose folder another node has seen."""
    token = JobToken(CLUSTER, home)
    with JobToken(CLUSTER, home).marked():
        token.make(LONG_S)
    return token


def test_nodes_with_one_home_have_a_token_that_only_their_user_can_read(home, folder):
    token = made(home)
    assert len(token.read()) == 64
    assert JobToken(CLUSTER, home).read() == token.read()
    assert token.is_own
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    token.forget()
    assert list(folder.parent.iterdir()) == []


def test_whoever_comes_first_waits_for_the_other(home):
    """Node 0 waits for a mark; it looks at the folder, not at the clock."""
    zero = JobToken(CLUSTER, home)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(zero.make, LONG_S)
        with JobToken(CLUSTER, home).marked():
            making.result(LONG_S)
    assert len(zero.read()) == 64


def test_nodes_with_homes_of_their_own_have_none(tmp_path):
    zero = JobToken(CLUSTER, {"XDG_STATE_HOME": str(tmp_path / "0")})
    one = JobToken(CLUSTER, {"XDG_STATE_HOME": str(tmp_path / "1")})
    with one.marked():
        zero.make(0.2)
        assert (zero.read(), one.read()) == (b"", b"")
    assert list(tmp_path.rglob("tokens/*")) == []


def test_a_token_that_is_given_counts_and_is_not_written_down(home, folder, tmp_path):
    (tmp_path / "t").write_bytes(b"from a file\n")
    for cluster, environ, expected in (
        (CLUSTER, {"MSRUN_TOKEN": "given"}, b"given"),
        (CLUSTER._replace(token_file=tmp_path / "t"), {}, b"from a file"),
        (CLUSTER._replace(tls_config=tmp_path / "config.json"), {}, b""),
        (CLUSTER._replace(own_token=""), {}, b""),
    ):
        token = JobToken(cluster, home | environ)
        with token.marked():
            token.make(LONG_S)
            assert (token.read(), token.is_own) == (expected, False)
        token.forget()
    assert not folder.parent.exists()


def test_another_start_of_the_job_reads_nothing_of_what_was_left(home):
    left = made(home).read()
    requeued = CLUSTER._replace(own_token="slurm-100.2-1-20000")
    zero, one = JobToken(requeued, home), JobToken(requeued, home)
    assert one.read() == b""
    with one.marked():
        zero.make(LONG_S)
    assert one.read() == zero.read() != left


def test_a_node_0_that_is_started_again_keeps_the_token(home):
    """Of a killed one: the others know it already."""
    before = made(home).read()
    assert made(home).read() == before


def test_a_node_that_was_in_the_job_knows_the_token_when_the_file_is_gone(home):
    token = made(home)
    one = JobToken(CLUSTER, home)
    known = one.read()
    token.forget()
    assert one.read() == known
    assert JobToken(CLUSTER, home, known).read() == known
    assert JobToken(CLUSTER, home).read() == b""


def test_a_folder_that_cannot_be_written_means_no_token(home, folder):
    if os.getuid() == 0:
        folder.parent.mkdir(parents=True)
        folder.write_text("in the way")
    else:
        folder.parent.mkdir(parents=True, mode=0o500)
    token = JobToken(CLUSTER, home)
    with token.marked():
        token.make(0.0)
        assert token.read() == b""
    token.forget()


def test_an_empty_folder_may_vanish_at_any_moment(home, folder):
    """Each node deletes it when it was the last one there."""
    zero = JobToken(CLUSTER, home)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(zero.make, LONG_S)
        while not making.done():
            with JobToken(CLUSTER, home).marked():
                pass
    assert len(zero.read()) == 64
    assert [path.name for path in folder.iterdir()] == ["token"]


def test_what_killed_msruns_have_left_is_deleted_a_month_later(home, folder):
    for name, age_s in (("old", KEPT_S + 60), ("new", KEPT_S - 60)):
        (left := folder.parent / name).mkdir(parents=True)
        (left / "token").touch()
        os.utime(left, (time.time() - age_s,) * 2)
    made(home)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["new", NAME]
