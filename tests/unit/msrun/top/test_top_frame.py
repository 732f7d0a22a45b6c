"""Frames of `msrun top`: facts in, lines out."""

import os

import pytest

from msrun.runs.cost import PastIncident
from msrun.top import frame
from msrun.top.columns import chart, fit, rate, size, span
from msrun.top.facts import JobFacts, RankFacts
from msrun.top.history import EventHistory
from msrun.top.view import TopView

STEPS = tuple(0.03 + 0.001 * (at % 10) for at in range(64))
RANK = RankFacts(
    rank=0, pid=4_194_304, state="running", phase="backward", epoch=2, step=48, steps_per_s=31.4,
    step_s=STEPS, own_s=0.012, rss_bytes=261 << 20, cpu_percent=98.7,
)  # fmt: skip
INCIDENT = PastIncident(
    at=100.0, attempt=1, ranks=(2,), kind="killed", cause="rank 2 was killed by SIGKILL",
    step=48, answer="replaced", lost_s=0.31, lost_steps=0,
)  # fmt: skip
JOB = JobFacts(
    run="20261121-150740-a4a49b", script="/home/me/train.py", state="running", uptime="2 min 7 s",
    ranks=tuple(RANK._replace(rank=rank) for rank in range(8)), counts=("attempt 2", "1 of 3 restarts", "1 replaced"),
    incident=INCIDENT,
    checkpoint=40, now=112.0,
)  # fmt: skip
GPU = RANK._replace(gpu_bytes=12 << 30, gpu_percent=100.0)
LONG = RANK._replace(rank=999, epoch=10_000, step=123_456_789, steps_per_s=123_456.0, silent_s=4.2)
HARD = JOB._replace(
    script="/x/" + "long" * 60 + ".py",
    ranks=(LONG._replace(rss_bytes=1 << 50),),
    incident=INCIDENT._replace(cause="rank 1 raised \x1b[2Jé世界\nError " + "x" * 300, answer=""),
)
EMPTY = JOB._replace(ranks=(), incident=None, checkpoint=None, state="starting")
JOBS = {
    "8 ranks": JOB,
    "gpu": JOB._replace(ranks=(GPU,)),
    "hard": HARD,
    "no rank yet": EMPTY,
    "silent": JOB._replace(ranks=tuple(one._replace(silent_s=75.0) for one in JOB.ranks)),
}


def titles(width, *ranks):
    return [one.column.title for one in fit(ranks or (RANK,), width)]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(job, width):
    screen = os.terminal_size((width, 24))
    frames = (
        frame.table(job, width),
        frame.screen(job, TopView(), screen),
        frame.log(job, TopView(), screen, "/" + "p" * 300, ["\tx" * 200, "\x1b[2J"]) if job.ranks else [],
    )  # fmt: skip
    for lines in frames:
        assert max((line.cell_len for line in lines), default=0) <= width
        assert not any("\n" in line.plain or "\x1b" in line.plain for line in lines)
    assert [len(lines) for lines in frames[1:] if lines] == [24] * (1 + bool(job.ranks))


def test_a_job_at_80_columns():
    lines = [line.plain for line in frame.table(JOB, 80)]
    assert lines[:5] == [
        "20261121-150740-a4a49b  running  up 2 min 7 s  train.py",
        "step 48  saved step 40  attempt 2  1 of 3 restarts  1 replaced",
        "12 s ago rank 2 was killed by SIGKILL: replaced, 0 steps and 0.3 s lost",
        "rank     pid state     phase     ep/step steps/s step time       RSS CPU% silent",
        "   0 4194304 running   backward     3/48    31.4 ▇▇▇▇█████▇▇▇▇  261M   99       ",
    ]
    assert len(lines) == 4 + 8
    shadowed = next(iter(frame.table(JOB._replace(shadows="16 shadows 1.2G"), 80)))
    assert shadowed.plain.endswith("up 2 min 7 s  16 shadows 1.2G  train.py")


def test_columns_drop_out_by_their_order_and_what_is_left_over_goes_to_the_chart():
    assert titles(200, GPU) == [
        "rank", "pid", "state", "phase", "ep/step", "steps/s", "step time", "own", "RSS", "CPU%",
        "GPU", "GPU%", "silent",
    ]  # fmt: skip
    assert set(titles(200, GPU)) - set(titles(200)) == {"GPU", "GPU%"}
    assert set(titles(120)) - set(titles(80)) == {"own"}
    assert titles(33) == ["rank", "state", "ep/step", "steps/s"]
    assert [one.width for one in fit((RANK,), 200) if one.column.title == "step time"] == [64]


def test_the_chart_shows_the_newest_steps():
    assert chart((1, 2, 4, 8, 9, 0), 8, 5) == "▂▄██▁"
    assert chart((1, 8), 8, 5, blocks=".#") == ".#"
    assert chart((0, 0), 0, 5) == ""


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({"answer": "restarted", "lost_s": 3.21, "lost_steps": 4}, "x…: restarted, 4 steps and 3.2 s lost"),
        ({"answer": "replaced", "lost_s": None, "lost_steps": None}, "x…: replaced"),
        ({"answer": "", "lost_s": None, "lost_steps": None}, "x…: the job is running"),
        ({"answer": "ended", "lost_s": 0.5, "lost_steps": None}, "x…: ended, 0.5 s lost, and steps that are not saved"),
    ],
)  # fmt: skip
def test_a_long_cause_leaves_room_for_what_was_done(change, end):
    incident = INCIDENT._replace(cause="rank 2 raised RuntimeError: " + "x" * 300, **change)
    line = frame.table(JOB._replace(incident=incident), 100)[2].plain
    assert line.startswith("12 s ago rank 2 raised RuntimeError: x") and len(line) == 100
    assert line.endswith(end)


def test_what_a_resumed_job_saved_is_what_it_saved_itself():
    job = JOB._replace(checkpoint=None, resumed=7)
    assert "  nothing saved since step 7  " in frame.table(job, 80)[1].plain


def test_an_ended_job_says_why():
    history = EventHistory(end="rank 1 exited with code 3, no restart left")
    lines = frame.table(JOB._replace(state="failed", is_over=True, history=history), 80)
    assert lines[2].plain == "rank 1 exited with code 3, no restart left"


def test_a_thousand_ranks_are_scrolled_through():
    job = JOB._replace(ranks=tuple(RANK._replace(rank=rank) for rank in range(1000)))
    room = frame.room(24)
    view = TopView().after("down", 1000, room)
    assert view == TopView(1, 0)
    view = TopView().after("last", 1000, room)
    shown = frame.screen(job, view, os.terminal_size((80, 24)))
    assert [line.plain.split()[0] for line in shown[4:-1]] == [str(n) for n in range(981, 1000)]
    assert [span.style for span in shown[-2].spans if span.style == "reverse"] == ["reverse"]
    assert shown[-1].plain.endswith("ranks 981-999, 1000 in all")
    assert view.after("page up", 1000, room) == TopView(980, 980)
    assert view.after("up", 1000, room) == TopView(998, 981)
    assert view.settled(10, room) == TopView(9, 0)
    assert TopView().after("up", 0, room) == TopView()


def test_the_log_is_shown_for_one_rank_and_left_again():
    view = TopView(3, 0).after("log", 8, 19)
    assert view.is_log and view.after("down", 8, 19) == TopView(4, 0, is_log=True)
    shown = frame.log(JOB, view, os.terminal_size((80, 5)), "/logs/worker_3.log", list("abcdef"))
    assert [line.plain for line in shown[:-1]] == ["rank 3: /logs/worker_3.log", "d", "e", "f"]
    assert view.after("back", 8, 19) == TopView(3, 0) == view.after("log", 8, 19)


def test_numbers_are_short():
    assert [rate(each) for each in (None, 0.0123, 8.5, 99.96, 1234.5)] == [
        "-", "0.0123", "8.50", "100.", "1234",
    ]  # fmt: skip
    assert [span(each) for each in (None, 0.0004, 0.038, 7.25, 600.0, 36000.0)] == [
        "-", "0.4ms", "38ms", "7.2s", "10m", "10h",
    ]  # fmt: skip
    assert [size(each) for each in (None, 900, 261 << 20, 3 << 30, 1 << 49)] == [
        "-", "0.9K", "261M", "3.0G", "512T",
    ]  # fmt: skip
