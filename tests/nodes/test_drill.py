"""`msrun drill --nodes`: real faults of nodes made of namespaces, and each promise judged."""

import json

import pytest
from support.jobs import Launcher
from support.node_trainings import SCRIPT

from msrun.cluster.namespaces import refusal

pytestmark = pytest.mark.torch
JOB = ("--", "--worker_num=4", SCRIPT, "--epochs=4", "--pause=0.02")


def drilled(msrun: Launcher, *words: object) -> dict:
    if why := refusal():
        pytest.skip(why)
    ended = msrun.drill("--json", "--nodes=2", *words, *JOB, within_s=600)
    content = json.loads(ended.out)
    assert ended.code == (0 if content["ok"] else 1), ended.err
    assert bool(list(msrun.tmp.glob("msrun-drill-*"))) != content["ok"]
    return content


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--spare-nodes=1", "--kill=node=1,step=4"), "2 replaced"),
        (("--kill=agent=1,step=4",), "2 replaced"),
        (("--spare-nodes=1", "--poweroff=node=1,step=4"), "2 replaced"),
        (("--cut=node=0,step=4,for=9",), ""),
        (("--kill=rank=3,step=4",), "1 replaced"),
        (("--kill=controller,step=4",), "node 0 replaced 1x"),
    ],
    ids=["node", "agent", "poweroff", "cut", "rank", "controller"],
)
def test_nothing_is_lost(msrun: Launcher, words: tuple[str, ...], answer: str) -> None:
    (drill,) = drilled(msrun, *words)["drills"]
    assert (drill["verdict"], drill["answer"]) == ("nothing lost", answer)
    assert (drill["steps_lost"], drill["weights_equal"]) == (0, True)


def test_a_fault_behind_the_end_is_a_broken_drill(msrun: Launcher) -> None:
    content = drilled(msrun, "--kill=node=1,step=99")
    assert not content["ok"]
    assert "never struck" in content["drills"][0]["verdict"]
