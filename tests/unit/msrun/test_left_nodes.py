"""The token that the nodes of a job have made outlives the node that leaves it."""

from types import SimpleNamespace

import pytest

from agent.spec.job_spec import LeftEarlyError, NotStartedError
from agent.supervisor import run as runs
from agent.supervisor.run import RunResult
from msrun import cli

GOES_ON = RunResult(0, next=object())


@pytest.mark.parametrize(
    ("result", "error", "is_forgotten"),
    [
        (RunResult(0), None, True),
        (RunResult(0, has_left=True), None, False),
        (GOES_ON, LeftEarlyError("this node has left while the nodes meet again"), False),
        (GOES_ON, NotStartedError("not all nodes came"), True),
    ],
)
def test_it_is_deleted_by_who_ends_the_job(monkeypatch, result, error, is_forgotten):
    forgotten = []

    def meet(*_):
        raise error

    monkeypatch.setattr(runs, "run", lambda *_: result)
    monkeypatch.setattr(cli, "_next", meet)
    monkeypatch.setattr(cli, "_forget_token", forgotten.append)
    request = SimpleNamespace(job=SimpleNamespace(record_id="r"), report=None)
    try:
        cli._run_to_its_end(request, SimpleNamespace(spec="the job"), None, None)
    except NotStartedError as raised:
        assert raised is error
    assert forgotten == ["the job"] * is_forgotten
