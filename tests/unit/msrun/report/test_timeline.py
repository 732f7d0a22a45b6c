"""What each rank did when, and how it is drawn."""

import pytest
from support.recorded_runs import BEGAN, kills

from msrun.report.lanes import CELLS, MOST, lanes
from msrun.report.pace import MOST_POINTS, PaceNote, lines, thinned, typical_s
from msrun.report.timeline import Doing, Timeline
from msrun.report.whole_restarts import INTERVALS, whole_restarts


def taken(events, ranks):
    timeline = Timeline(ranks)
    for event in events:
        timeline.take(event)
    return timeline


def doings(timeline, rank):
    return [doing for _, doing in timeline.spans[rank]]


D = Doing


def test_a_rank_is_killed_and_replaced():
    found = taken(kills(3, 1), 3)
    assert doings(found, 0) == [D.STARTING, D.TRAINING, D.LOST, D.TRAINING, D.OVER]
    assert doings(found, 1) == [D.STARTING, D.TRAINING, D.FROZEN, D.TRAINING, D.OVER]
    lost, back = found.spans[0][2][0], found.spans[0][3][0]
    assert back - lost == pytest.approx(0.31)
    assert found.start_s == pytest.approx(1.002)


def line(at, event, **fields):
    return {"time": BEGAN + at, "event": event, **fields}


STARTED = [
    line(0, "StartAttempt", attempt=0),
    line(1, "WorkerStarted", rank=0, job="starting"),
    line(2, "WorkerStarted", rank=1, job="running"),
]
JOINED = [
    line(3, "Registered", rank=0, job="running"),
    line(4, "Registered", rank=1, job="running"),
]


def test_ranks_without_hooks_run_and_nobody_says_that_they_train():
    found = taken([*STARTED, line(9, "WorkerExited", rank=1, exit_code=1, job="stopping")], 2)
    assert doings(found, 0) == [D.STARTING, D.RUNNING, D.STOPPING]
    assert doings(found, 1)[-1] is D.LOST and found.start_s is None


def test_a_hang_is_drawn_from_the_last_progress_and_a_restart_starts_all():
    events = [
        *STARTED,
        *JOINED,
        line(20, "RankHung", rank=1, silent_s=8.0, job="freezing"),
        line(21, "SaveFailed", rank=0, job="stopping"),
        line(22, "WorkerExited", rank=0, exit_code=-15, job="starting"),
        line(22, "StartAttempt", attempt=1),
        line(23, "WorkerStarted", rank=0, job="starting"),
        line(24, "WorkerStarted", rank=1, job="running"),
        line(25, "Registered", rank=0, job="running"),
        line(26, "Registered", rank=1, job="running"),
    ]
    found = taken(events, 2)
    assert doings(found, 1) == [D.STARTING, D.TRAINING, D.LOST, D.STARTING, D.TRAINING]
    assert found.spans[1][2][0] == BEGAN + 12
    assert doings(found, 0)[-4:] == [D.FROZEN, D.STOPPING, D.STARTING, D.TRAINING]


def test_a_stop_is_no_training():
    events = [*STARTED, *JOINED, line(9, "StopRequested", job="holding")]
    assert doings(taken(events, 2), 0)[-1] is D.STOPPING


# --- lanes --------------------------------------------------------------------------------------


def test_ranks_that_did_the_same_share_a_lane():
    spans = {rank: [(0.0, D.STARTING), (10.0, D.TRAINING)] for rank in range(4)}
    spans[2] = [(0.0, D.STARTING), (10.0, D.TRAINING), (50.0, D.LOST), (75.0, D.TRAINING)]
    first, second = lanes(spans, [(50.0, [2])], 0.0, 100.0)
    assert (first.ranks, first.marks) == ((0, 1, 3), ())
    assert first.runs == ((0, 100, D.STARTING), (100, 1000, D.TRAINING))
    assert (second.ranks, second.marks) == ((2,), (500,))
    assert second.runs[2] == (500, 750, D.LOST)


def test_a_cell_shows_what_took_most_of_it_and_marks_are_always_there():
    training = [(0.0, D.TRAINING)]
    blink = [(0.0, D.TRAINING), (5000.0, D.LOST), (5001.0, D.TRAINING)]
    both = lanes({0: training, 1: blink}, [(5000.0, [1])], 0.0, 10_000.0)
    assert [lane.runs for lane in both] == [((0, CELLS, D.TRAINING),)] * 2
    assert both[1].marks == (500,)


def test_of_too_many_lanes_those_with_failures_are_drawn():
    spans = {rank: [(float(rank), D.TRAINING)] for rank in range(100)}
    found = lanes(spans, [(50.0, [77]), (60.0, [99])], 0.0, 1000.0)
    assert len(found) == MOST + 1 and found[-1].is_rest
    drawn = {rank for lane in found[:-1] for rank in lane.ranks}
    assert {77, 99} <= drawn and len(found[-1].ranks) == 100 - MOST
    assert not drawn & set(found[-1].ranks)


def test_times_before_the_picture_do_no_harm():
    (one,) = lanes({0: [(-5.0, D.STARTING), (5.0, D.TRAINING), (12.0, D.OVER)]}, [], 0.0, 10.0)
    assert one.runs == ((0, 500, D.STARTING), (500, 1000, D.TRAINING))


@pytest.mark.parametrize("back_s", [2.5, 30.0, 5000.0])
def test_a_clock_that_is_set_back_does_no_harm(back_s):
    joined = [{**event, "time": event["time"] - back_s} for event in JOINED]
    stop = line(9 - back_s, "StopRequested", job="holding")
    found = taken([*STARTED, *joined, stop], 2)
    began = found.first_start or 0.0
    for lane in lanes(found.spans, [(BEGAN - back_s, [0])], began, found.ended):
        assert [first for first, _, _ in lane.runs[1:]] == [last for _, last, _ in lane.runs[:-1]]
        assert (lane.runs[0][0], lane.runs[-1][1]) == (0, CELLS)


def test_of_times_that_go_back_the_later_one_counts():
    (one,) = lanes({0: [(5.0, D.STARTING), (2.0, D.TRAINING), (8.0, D.OVER)]}, [], 0.0, 10.0)
    assert one.runs == ((0, 200, D.OVER), (200, 800, D.TRAINING), (800, 1000, D.OVER))


# --- the time of steps --------------------------------------------------------------------------


def test_few_ranks_have_a_line_each_and_many_three():
    notes = [PaceNote(BEGAN + at, {0: 0.1, 1: 0.3}) for at in range(3)]
    found = lines(notes, BEGAN, BEGAN + 3)
    assert list(found) == ["rank 0", "rank 1"] and len(found["rank 1"]) == 3
    assert typical_s(notes) == pytest.approx(0.2) and typical_s([]) is None
    many = [PaceNote(BEGAN, {rank: 0.1 * (rank + 1) for rank in range(9)})]
    of_many = lines(many, BEGAN, BEGAN + 1)
    assert [points[0][1] for points in of_many.values()] == pytest.approx([0.9, 0.5, 0.1])


def test_a_line_is_thinned_and_keeps_the_slowest():
    points = [(float(at), 1.0 if at == 777 else 0.1) for at in range(100_000)]
    found = thinned(points, 0.0, 100_000.0)
    assert len(found) == MOST_POINTS and (777.0, 1.0) in found


def test_whole_restarts_train_again_what_follows_the_last_checkpoint():
    few, middle, many = whole_restarts([1, 105, 1205], 2.0, 0.1)
    assert INTERVALS == (10, 100, 1000)
    assert [each.steps for each in (few, middle, many)] == [8, 8, 308]
    assert many.seconds == pytest.approx(3 * 2.0 + 308 * 0.1)
    assert {each.seconds for each in whole_restarts([7], None, 0.1)} == {None}
    assert {each.seconds for each in whole_restarts([7], 1.0, None)} == {None}
