"""What `msrun status` says of the cost of failures."""

import json

import pytest

from msrun.runs.cost import LONGEST, incident_rows, read_cost

KILLED = {
    "at": 1_795_403_851.2,
    "attempt": 0,
    "ranks": [1],
    "kind": "killed",
    "cause": "rank 1 was killed by SIGKILL",
    "step": 20,
    "answer": "replaced",
    "lost_s": 0.208,
    "lost_steps": 0,
}
GOODPUT = {
    "share": 0.98754,
    "training_s": 714.0,
    "wall_s": 723.4,
    "lost_s": 2.94,
    "lost_steps": 0,
    "incidents": 3,
}
NOT_KNOWN = dict.fromkeys(("share", "training_s", "lost_s", "lost_steps"))


def read(goodput=GOODPUT, incidents=(KILLED,)):
    return read_cost(json.loads(json.dumps({"goodput": goodput, "incidents": incidents})))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "98.7 % of 12 min 3 s was training; 3 incidents, 2.94 s lost, steps lost: 0"),
        ({"incidents": 0}, "98.7 % of 12 min 3 s was training"),
        ({"incidents": 1, "lost_steps": None, "lost_s": None}, "98.7 % of 12 min 3 s was training; 1 incident, - lost, steps lost: unknown"),
        ({**NOT_KNOWN, "incidents": 0}, "unknown: not every rank has registered a TrainState"),
        ({**NOT_KNOWN, "incidents": 2}, "unknown: not every rank has registered a TrainState; 2 incidents"),
    ],
)  # fmt: skip
def test_one_line(changes, words):
    assert read({**GOODPUT, **changes}).words == words


def test_the_newest_incident_comes_first_and_what_is_not_known_is_not_guessed():
    open_ = {**KILLED, "ranks": [], "step": None, "answer": "", "lost_s": None, "lost_steps": None}
    rows = incident_rows(read(incidents=[KILLED, {**open_, "cause": "x" * 500}]).last)
    assert rows[0][1:] == ("-", "-", "x" * (LONGEST - 3) + "...", "-", "-", "-")
    assert rows[1][1:] == ("1", "20", "rank 1 was killed by SIGKILL", "replaced", "208 ms", "0")


def test_a_status_of_an_older_version_has_none():
    assert read_cost({}) is None
