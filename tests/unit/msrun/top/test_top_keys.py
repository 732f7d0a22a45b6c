"""Keys of `msrun top`, as terminals send them."""

import pytest

from msrun.top.keys import keys


@pytest.mark.parametrize(
    ("data", "found", "rest"),
    [
        (b"q", ["quit"], b""),
        (b"jjk", ["down", "down", "up"], b""),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"], b""),
        (b"\x1b[5~\x1b[6~", ["page up", "page down"], b""),
        (b"l\r\n", ["log", "log", "log"], b""),
        (b"x\xc3\xa9\x00", [], b""),
        (b"\x1b[1;5Cj", ["down"], b""),  # Ctrl-right means nothing
        (b"\x1b", [], b"\x1b"),
        (b"j\x1b[", ["down"], b"\x1b["),
        (b"\x1b[1;", [], b"\x1b[1;"),
        (b"\x1bq", ["back", "quit"], b""),
        (b"\x1b\x1b[A", ["back", "up"], b""),
    ],
)
def test_keys(data, found, rest):
    assert keys(data, is_all=False) == (found, rest)


def test_an_escape_alone_is_a_key_once_nothing_follows():
    assert keys(b"\x1b", is_all=True) == (["back"], b"")
