"""Which rungs a failure may take: flags, MindSpore's switch, and what follows from them."""

from __future__ import annotations

import pytest

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import first_job
from agent.spec.job_spec import ReplaceSpec, UsageError
from msrun.job.dry_run import facts
from msrun.job.request import parse
from worker_hooks.contract import protocol

ALL = "replace,dump,restart"


def job(*argv, **environ):
    return parse([*argv, "--master_port=0", __file__], environ).job


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ((), {}, (True, True, 0)),
        (("--max-restarts=2",), {}, (True, True, 2)),
        (("--on_failure=replace,dump",), {}, (True, True, 0)),
        (("--on-failure=dump,restart", "--max-restarts=2"), {}, (False, True, 2)),
        (("--on_failure", "restart"), {}, (False, False, 0)),
        (("--on_failure=replace",), {}, (True, False, 0)),
        ((), {"PET_ON_FAILURE": "dump"}, (False, True, 0)),
        ((), {"MS_ENABLE_TFT": "{TTP:1,ARF:1}"}, (True, True, 0)),
        ((), {"MS_ENABLE_TFT": "{TTP:1}"}, (True, True, 0)),
        ((), {"MS_ENABLE_TFT": "{ARF:0}"}, (False, True, 0)),
        ((), {"MS_ENABLE_TFT": "{TTP:0,ARF:1}"}, (False, True, 0)),
        ((f"--on_failure={ALL}",), {"MS_ENABLE_TFT": "{ARF:0}"}, (True, True, 0)),
        ((f"--on_failure={ALL}",), {"MS_ENABLE_TFT": "{TTP:0}"}, (False, True, 0)),
        (("--max_replacements=0",), {}, (False, True, 0)),
    ],
)
def test_the_rungs(argv, environ, expected):
    spec = job(*argv, **environ)
    policy = first_job(spec).policy
    assert (policy.replace.is_on, policy.dump.after_failure, policy.max_restarts) == expected
    assert bool(policy.replace.why_off) == (not policy.replace.is_on)


def test_how_often():
    spec = job("--max_replacements=3", "--replacement-period=60")
    assert spec.replace == ReplaceSpec(True, "", 3, 60.0)
    assert first_job(spec).policy.replace == spec.replace
    assert job().replace == ReplaceSpec(True, "", 20, 3600.0)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--on_failure=dump,replace",), "in this order, each once"),
        (("--on_failure=dump,dump",), "in this order, each once"),
        (("--on_failure=retry",), "--on_failure=retry: give one or more of replace, dump, restart"),
        (("--on_failure=",), "in this order, each once"),
        (("--on_failure=dump", "--max-restarts=1"), "contradicts --max-restarts=1"),
        (("--max_replacements=-1",), "at least 0"),
        (("--replacement_period=0",), "above 0"),
    ],
)
def test_what_cannot_be_meant(argv, sentence):
    with pytest.raises(UsageError, match=sentence):
        job(*argv)


def test_yaml_and_dry_run(tmp_path):
    (tmp_path / "job.yaml").write_text("on_failure: [replace, dump]\nmax_replacements: 5\n")
    spec = job(f"--config={tmp_path / 'job.yaml'}")
    assert (spec.replace.max_replacements, spec.replace.is_on) == (5, True)

    class Plan:
        choice = type("Choice", (), {"warmth": None, "reason": ""})
        folder = tmp_path

    def told(spec):
        Plan.spec = spec
        return dict(facts(Plan))["failure"]

    assert told(spec) == "replace at most 5 ranks within 3600 s, else save"
    assert told(job("--on_failure=restart")) == "stop"
    assert told(job("--on_failure=dump,restart", "--max-restarts=1")) == "save, else restart"


@pytest.mark.parametrize("is_asked", [False, True])
def test_without_dump_only_a_stop_is_saved(is_asked):
    job_ = first_job(job("--nproc-per-node=2", "--on_failure=restart"))
    happened = [ev.LaunchRequested(), *(ev.WorkerStarted(rank, 0, 1) for rank in (0, 1))]
    happened += [protocol.Registered(rank, 0, 5) for rank in (0, 1)]
    happened += [ev.WorkerExited(1, 0, -9)]
    happened += [ev.ExitRequestedByFile(0, "a file asks for it")] if is_asked else []
    happened += [protocol.Frozen(0, 0, 1, 5, True)]
    ordered = []
    for event in happened:
        job_, actions = (done := decide(job_, event)).job, done.actions
        ordered += actions
    assert any(isinstance(action, do.SaveRanks) for action in ordered) == is_asked
    if not is_asked:
        assert job_.now.outcome == "step 5 is not saved: saving after a failure is off"
