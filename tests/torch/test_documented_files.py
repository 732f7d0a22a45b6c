"""What a real job writes is what the manual says: events.jsonl and status.json by their schemas."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from jsonschema import Draft202012Validator
from support.jobs import ROOT, WORKERS, Job, Launcher, poll
from support.recorded_runs import Page

from agent.accounting.summary import percent
from msrun.terminal.table import brief

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCHEMAS = ROOT / "docs/reference/schemas"


class Told(NamedTuple):
    """What a job whose rank 1 was killed and replaced, and that was then stopped, wrote."""

    statuses: list[dict[str, Any]]
    events: list[dict[str, Any]]
    said: str
    report: str


@pytest.fixture(scope="module")
def told(launcher: Launcher) -> Told:
    words = ("--worker_num=2", "--report=run.html", WORKERS / "train_small.py", "--epochs=9999")
    job = launcher.start(*words)
    statuses = [poll(lambda: trains(job, since=20))]  # so many steps make a pace
    os.kill(job.pids()[1], signal.SIGKILL)
    statuses.append(poll(lambda: job.status()["attempt"] == 1 and trains(job, since=60)))
    poll(lambda: any(each["ranks"] == [0, 1] for each in job.seen("StepsTimed")))  # every 2 s
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0
    statuses.append(job.status())
    return Told(statuses, job.events(), ended.err, (launcher.tmp / "run.html").read_text())


def trains(job: Job, since: int) -> dict[str, Any] | None:
    """The job's status once it is past a step, and tells how quick its ranks are."""
    now = job.status()
    ranks = now["workers"]
    is_told = len(ranks) == 2 and all(rank.get("step", 0) > since for rank in ranks)
    return now if is_told and all("step_median_s" in rank for rank in ranks) else None


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / name).read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def undescribed(schema: dict[str, Any], value: Any) -> Iterator[str]:
    """Fields of a value that its schema does not name."""
    if isinstance(value, list):
        for each in value:
            yield from undescribed(schema["items"], each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name in schema["properties"]:
                yield from undescribed(schema["properties"][name], each)
            else:
                yield name


def test_every_line_of_events_is_as_its_schema_says(told):
    checked = validator("events.schema.json")
    for line in told.events:
        checked.validate(line)
    named = {line["event"] for line in told.events}
    assert named >= {"WorkerExited", "FreezeRanks", "ReplaceRanks", "DumpCommitted", "Finish"}
    assert named <= checked.schema["$defs"].keys()


def test_every_field_of_an_event_is_described(told):
    kinds = validator("events.schema.json").schema["$defs"]
    for line in told.events:
        assert line.keys() - kinds[line["event"]]["properties"].keys() == {"time", "event"}


def test_every_status_is_as_its_schema_says(told):
    checked = validator("status.schema.json")
    for status in told.statuses:
        checked.validate(status)
        assert list(undescribed(checked.schema, status)) == []


def test_what_the_death_cost_is_the_same_everywhere(told):
    before, during, ended = told.statuses
    assert before["incidents"] == [] and before["goodput"]["incidents"] == 0
    (noted,) = (line for line in told.events if line["event"] == "IncidentOver")
    (incident,) = ended["incidents"]
    assert incident == during["incidents"][0] == {name: noted[name] for name in incident}
    assert (incident["ranks"], incident["kind"], incident["answer"]) == ([1], "killed", "replaced")
    assert incident["lost_steps"] == 0
    (died, back) = (
        next(line["time"] for line in told.events if line["event"] == name)
        for name in ("FreezeRanks", "GoOn")
    )
    assert incident["lost_s"] == pytest.approx(back - died, abs=0.1)
    cost = ended["goodput"]
    assert cost["lost_s"] == incident["lost_s"] and cost["incidents"] == 1
    assert 0 < cost["training_s"] < cost["wall_s"] - cost["lost_s"]
    assert cost["share"] == pytest.approx(cost["training_s"] / cost["wall_s"], abs=1e-3)
    # the status has three decimals, of which the sentence is not made
    seconds = {f"{incident['lost_s'] + more:.1f}" for more in (-0.0005, 0.0, 0.0005)}
    lost = tuple(f"1 rank replaced, 0 steps and {each} s lost" for each in seconds)
    (line,) = (line for line in told.said.splitlines() if "training was" in line)
    assert line.startswith("msrun: training was ") and line.endswith(lost)


def test_the_report_at_the_end_shows_the_death_and_what_it_cost(told):
    page = Page(told.report)
    (incident,) = told.statuses[-1]["incidents"]
    assert "rank 1 was killed by SIGKILL" in page.text and "replaced" in page.texts
    at = page.texts.index("goodput: share that was training")
    assert page.texts[at - 1] == percent(told.statuses[-1]["goodput"]["share"])
    assert "lost, until it is replaced" in page.text and "a rank failed" in page.text
    assert "rank 0" in page.texts and "rank 1" in page.texts  # lines of step times
    row = page.texts.index("msrun, this run")
    assert page.texts[row + 1 : row + 3] == ["0", brief(incident["lost_s"])]
    again = sum((incident["step"] - 1) % interval for interval in (10,))
    row = page.texts.index("torchrun, a checkpoint every N = 10 steps")
    assert page.texts[row + 1] == str(again)


def test_the_schemas_refuse_what_is_wrong(told):
    events, status = validator("events.schema.json"), validator("status.schema.json")
    exited = next(line for line in told.events if line["event"] == "WorkerExited")
    assert not events.is_valid({**exited, "rank": "one"})
    assert not events.is_valid({name: exited[name] for name in exited if name != "exit_code"})
    assert not events.is_valid({**exited, "job": "sleeping"})
    assert not status.is_valid({**told.statuses[0], "state": "sleeping"})
    assert not status.is_valid({**told.statuses[0], "workers": [{}]})
