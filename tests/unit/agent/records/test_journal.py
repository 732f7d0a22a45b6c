"""The journal writes whole lines, says its troubles once, and never fails the job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.records import journal as room
from agent.records.journal import Journal
from worker_hooks.contract.layout import RunLayout


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path, "record", "run")


def written(layout):
    return [json.loads(line) for line in layout.events.read_text().splitlines()]


def test_an_event_is_a_json_line_and_a_line_for_people(layout):
    journal = Journal(layout, print)
    journal.event("WorkerExited", rank=3, reason="rank 3 was killed", path=Path("/x"))
    journal.close()
    (event,) = written(layout)
    assert (event["event"], event["rank"], event["path"]) == ("WorkerExited", 3, "/x")
    assert isinstance(event["time"], float)
    (line,) = layout.scheduler_log.read_text().splitlines()
    assert line.endswith('WorkerExited rank=3 reason="rank 3 was killed" path=/x')


def test_what_ranks_say_alike_is_a_json_line_of_each_and_one_for_people(layout):
    echoed = []
    journal = Journal(layout, print, echoed.append)
    journal.of_ranks("Frozen", [4, 0, 1], step=7, why="")
    journal.close()
    events = written(layout)
    assert [(each.pop("rank"), each.pop("time") > 0) for each in events] == [
        (4, True),
        (0, True),
        (1, True),
    ]
    assert events == [{"event": "Frozen", "step": 7, "why": ""}] * 3
    assert [json.loads(line)["rank"] for line in echoed] == [4, 0, 1]
    (line,) = layout.scheduler_log.read_text().splitlines()
    assert line.endswith('Frozen ranks=0-1,4 step=7 why=""')


@pytest.mark.parametrize("text", ["a\nb", "\ud800", "\u2028", 'say "x"', "\x1b[2J", ""])
def test_any_text_is_one_json_line(layout, text):
    journal = Journal(layout, print)
    journal.event("E", reason=text)
    journal.event("F")
    journal.close()
    events = written(layout)
    assert [event["event"] for event in events] == ["E", "F"]
    assert events[0]["reason"] == text


def test_events_are_echoed_where_asked(layout):
    echoed = []
    journal = Journal(None, print, echoed.append)
    journal.event("E", rank=1)
    assert json.loads(echoed[0])["rank"] == 1
    assert not layout.events.exists()


def test_troubles_are_said_once(tmp_path):
    said = []
    journal = Journal(RunLayout(tmp_path / "gone", "record", "run"), said.append)
    for _ in range(3):
        journal.event("E")
        journal.log("words")
        journal.replace(tmp_path / "gone" / "status.json", {})
        journal.trouble(tmp_path, OSError(28, "No space left on device"), "show")
    journal.close()
    assert len(said) == 1
    assert said[0].startswith(f"cannot write {tmp_path}/gone/events.jsonl (No such file")
    assert "the job continues" in said[0]


def test_a_disk_that_becomes_full_within_a_line_leaves_whole_lines(layout, monkeypatch):
    said = []
    journal = Journal(layout, said.append)
    journal.event("First")
    write = os.write
    monkeypatch.setattr(room.os, "write", lambda fd, data: write(fd, data[:10]))
    journal.event("Torn")
    monkeypatch.undo()
    journal.event("Last")  # there is room again
    journal.close()
    assert [event["event"] for event in written(layout)] == ["First", "Last"]
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_status_is_replaced_whole(layout):
    journal = Journal(layout, print)
    for count in range(3):
        journal.replace(layout.status, {"count": count}, durable=count == 1)
    assert json.loads(layout.status.read_bytes()) == {"count": 2}
    assert os.listdir(layout.folder) == ["status.json"]
