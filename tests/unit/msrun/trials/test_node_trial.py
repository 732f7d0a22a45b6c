"""What a drill does with nodes that are struck; the nodes here only remember what befell them."""

import json
from signal import SIGINT, SIGTERM
from types import SimpleNamespace

import pytest

from msrun.trials import node_trial
from msrun.trials.node_fault import NodeDeed, NodeFault, NodesOfDrill
from msrun.trials.node_trial import NodesTrial, job_code
from msrun.trials.trial import Command

LONG = {"deed": NodeDeed.CUT, "delay": 0.0, "for_s": 30.0}  # nobody waits so long


class PlayedNode:
    """Its msruns run until they have been looked at so often, and end with these codes."""

    def __init__(self, index, codes):
        self.index, self.name, self.init = index, f"node{index}", object()
        self.codes, self.befell, self.words, self.signals = codes, [], [], []

    def run(self, argv, **_):
        looks = iter([None] * 5)
        code = self.codes[min(len(self.words), len(self.codes) - 1)]
        self.words.append(argv)
        process = SimpleNamespace(poll=lambda: next(looks, code))
        return SimpleNamespace(process=process, signal=self.signals.append)

    def kill(self):
        self.befell.append("kill")
        self.init = None

    def cut(self):
        self.befell.append("cut")

    def mend(self):
        self.befell.append("mend")

    def boot(self):
        self.init = object()

    def processes(self):
        return {}


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Run a trial of nodes that train to step 8 at once, whose msruns end with these codes."""

    def run(codes, faults, spares=0, states=(), count=2):
        nodes = [PlayedNode(index, each) for index, each in enumerate(codes)]

        class PlayedCluster:
            def __init__(self, *_):
                self.nodes = nodes

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        monkeypatch.setattr(node_trial, "Cluster", PlayedCluster)
        command = Command((), ("train.py",))
        trial = NodesTrial(tmp_path / "trial", command, NodesOfDrill(count, spares), faults)
        lines = [{"life": 0}, *({"commit": step, "at": step / 1000} for step in range(1, 9))]
        trace = tmp_path / "trial/traces/rank_0.jsonl"
        trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for at, state in enumerate(states):
            (folder := tmp_path / "trial/logs" / str(at)).mkdir()
            (folder / "status.json").write_text(json.dumps({"state": state}))
        return nodes, trial.run({}, 60)

    return run


def test_where_all_nodes_are_cut_off_for_long_the_job_has_not_ended(play):
    """Nothing was awaited, and a job without an end was judged."""
    faults = [NodeFault(node, 3, **LONG) for node in range(2)]
    nodes, ended = play([[1, 0], [1, 0]], faults)
    assert [each.exit_code for each in ended.departures] == [1, 0]
    assert all("--resume" in node.words[1] and "mend" in node.befell for node in nodes)


def test_a_node_that_comes_back_too_late_is_not_awaited(play):
    nodes, ended = play([[0], [1]], [NodeFault(1, 3, **LONG)])
    assert (ended.exit_code, nodes[1].befell) == (0, ["cut"])


def test_a_fault_strikes_the_spare_node_that_has_the_place_of_one_cut_off_for_long(play):
    faults = [NodeFault(1, 3, **LONG), NodeFault(1, 4, delay=0.0)]
    nodes, _ = play([[0], [1], [0, 0]], faults, spares=1)
    assert [node.befell for node in nodes] == [[], ["cut"], ["kill"]]
    assert "--node-rank=1" in nodes[2].words[1]  # started again, it has the place that it had


def test_of_two_nodes_that_are_lost_at_once_the_spare_one_may_have_either_place(play):
    """The other one was refused, and the job waited for a node until the drill stopped it."""
    faults = [NodeFault(1, 3, delay=0.0), NodeFault(2, 3, delay=0.0)]
    nodes, _ = play([[0], [-9, 0], [-9, 0], [0]], faults, spares=1, count=3)
    assert [len(node.words) for node in nodes] == [1, 1, 2, 1]
    assert not any(word.startswith("--node-rank") for word in nodes[2].words[1])


def test_a_job_that_was_asked_to_stop_at_one_node_is_resumed_on_all(play):
    asked = [NodeFault(1, 3, NodeDeed.REQUEST, 0.0, number=SIGINT)]
    nodes, ended = play([[0, 0], [0, 0]], asked, states=["stopped"])
    assert [node.signals for node in nodes] == [[], [SIGINT]]
    assert [each.exit_code for each in ended.departures] == [0, 0, 0]  # nobody writes a new state
    assert all("--resume" in node.words[1] for node in nodes)


def test_a_job_that_ended_before_it_could_stop_is_not_resumed(play):
    asked = [NodeFault(1, 3, NodeDeed.REQUEST, 0.0)]
    nodes, ended = play([[0], [0]], asked, states=["succeeded"])
    assert len(ended.departures) == 1
    assert [len(node.words) for node in nodes] == [1, 1]


def test_a_preemption_asks_all_nodes_and_kills_them_after_the_grace(play):
    fault = NodeFault(0, 3, NodeDeed.PREEMPT, 0.0, grace_s=0.0)
    nodes, ended = play([[-9, 0], [-9, 0]], [fault])
    assert [node.signals for node in nodes] == [[SIGTERM], [SIGTERM]]
    assert [node.befell[0] for node in nodes] == ["kill", "kill"]
    found = [(each.exit_code, each.is_killed) for each in ended.departures]
    assert found == [(-9, True), (0, False)]
    assert all("--resume" in node.words[1] for node in nodes)


@pytest.mark.parametrize(
    ("awaited", "struck", "code"),
    [
        ((0, None), (), None),
        ((0, 0), (None,), 0),
        ((1, 1), (None,), 1),
        ((1, 3), (0,), 1),
        ((1, 0), (None,), None),  # the half that was cut off may have gone on with the spare node
        ((1, 0), (0,), 0),
        ((1, 0), (1,), 1),
        ((1, 0), (), 1),
    ],
)
def test_of_two_halves_the_one_that_has_gone_on_says_how_the_job_ended(awaited, struck, code):
    """It was resumed once more from where the other half had ended, and steps called lost."""
    assert job_code(awaited, struck) == code
