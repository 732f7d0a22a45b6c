"""The page that tells at which step the next copy is due."""

import os

import pytest

from worker_hooks.shadows.page import DuePage


def test_what_one_writes_others_read():
    page = DuePage.create()
    peer = DuePage(os.dup(page.fd))
    assert peer.read() == 0
    page.write(1 << 40)
    assert peer.read() == 1 << 40
    os.close(page.fd)
    os.close(peer.fd)


def test_a_file_that_the_script_has_at_its_place_is_not_touched(tmp_path):
    page = DuePage.create()
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    os.dup2(own, page.fd)
    for use in (page.read, lambda: page.write(7)):
        with pytest.raises(OSError, match="closed by the script"):
            use()
    assert (tmp_path / "own").read_bytes() == b""
    os.close(own)
    os.close(page.fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        page.read()
