"""What `msrun stop` leaves for a run: read once, and never believed beyond its form."""

import pytest

from agent.records.stop_note import NOTE, StopNote, take_note, write_note


@pytest.mark.parametrize(
    "note", [StopNote(is_graceful=True), StopNote(grace_s=2.5), StopNote(is_now=True)]
)
def test_a_note_is_taken_once(tmp_path, note):
    write_note(tmp_path, note)
    assert (tmp_path / NOTE).stat().st_mode & 0o077 == 0
    assert take_note(tmp_path) == note
    assert take_note(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"is_now": true, "x": 1}', '{"grace_s": "5"}', '{"grace_s": -1}', "\udcff"],
)
def test_what_is_no_note_is_none_and_goes(tmp_path, content):
    (tmp_path / NOTE).write_bytes(content.encode(errors="surrogateescape"))
    assert take_note(tmp_path) is None
    assert not (tmp_path / NOTE).exists()


def test_no_folder_no_note(tmp_path):
    assert take_note(tmp_path / "gone") is None
    with pytest.raises(OSError):
        write_note(tmp_path / "gone", StopNote(is_now=True))


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (StopNote(), "msrun stop"),
        (StopNote(grace_s=3), "msrun stop"),
        (StopNote(is_graceful=True), "msrun stop --graceful"),
        (StopNote(is_now=True), "msrun stop --now"),
    ],
)
def test_a_note_in_words(note, words):
    assert note.words == words
