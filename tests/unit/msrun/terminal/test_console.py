"""Good news are green and bad news red, where somebody sees colours."""

import pytest

from agent.text.tone import Tone
from msrun.terminal import console


@pytest.mark.parametrize(
    ("environ", "is_terminal", "expected"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_are_for_terminals_that_show_them(monkeypatch, environ, is_terminal, expected):
    monkeypatch.setattr(console.os, "isatty", lambda _: is_terminal)
    assert console.has_colours(environ) is expected


@pytest.mark.parametrize(
    ("tone", "expected"),
    [(Tone.GOOD, "\033[32mback\033[0m"), (Tone.BAD, "\033[31mback\033[0m"), (Tone.PLAIN, "back")],
)
def test_the_tone_is_the_colour(monkeypatch, tone, expected):
    said = []
    monkeypatch.setattr(console, "say", said.append)
    monkeypatch.setattr(console, "has_colours", lambda *_: True)
    console.tell("back", tone)
    monkeypatch.setattr(console, "has_colours", lambda *_: False)
    console.tell("back", tone)
    assert said == [expected, "back"]
