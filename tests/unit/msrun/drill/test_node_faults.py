"""What befalls nodes in a drill: as words, in YAML, by chance; and what a job cannot have."""

from __future__ import annotations

from signal import SIGINT

import pytest
from click.testing import CliRunner

from agent.spec.job_spec import UsageError
from msrun.cluster.namespaces import ClusterError
from msrun.drill import session
from msrun.drill.command import drill
from msrun.drill.fault_options import FaultOrder, check, on_nodes, read_file, read_words
from msrun.drill.random_faults import ON_NODES, RandomFaults, draw
from msrun.trials.node_fault import NodeDeed, NodeFault, NodesOfDrill
from worker_hooks.drill.plan import Fault

KILL, OFF, CUT, MSRUN = NodeDeed.KILL, NodeDeed.POWEROFF, NodeDeed.CUT, NodeDeed.KILL_MSRUN


@pytest.mark.parametrize(
    ("deed", "words", "fault", "said"),
    [
        ("kill", "node=2,step=50", NodeFault(2, 50), "kill node 2 at step 50 + 0.50"),
        ("kill", "agent=1,step=5", NodeFault(1, 5, MSRUN), "kill -9 msrun of node 1 at step 5"),
        ("kill", "controller,step=9,delay=0", NodeFault(0, 9, MSRUN, 0), "kill -9 the controller"),
        ("poweroff", "node=1,step=30", NodeFault(1, 30, OFF), "power off node 1 at step 30"),
        ("cut", "node=1,step=20,for=4.5", NodeFault(1, 20, CUT, for_s=4.5), "cut node 1 for 4.5 s"),
    ],
)
def test_a_fault_of_a_node_in_words(deed, words, fault, said):
    order = read_words(words, deed)
    assert order == FaultOrder((fault,))
    assert order.words.startswith(said)


@pytest.mark.parametrize(
    ("deed", "words", "sentence"),
    [
        ("kill", "node=1", "step is missing"),
        ("kill", "node=1,step=3,phase=data", "'phase' is unknown"),
        ("kill", "node=x,step=3", "node=x must be a whole number"),
        ("kill", "controller=1,agent=0,step=3", "'controller' is unknown"),
        ("cut", "step=3", "node is missing"),
        ("cut", "node=1,step=3,for=0", "for=0 must be a number above 0"),
        ("poweroff", "node=1,step=3,for=2", "'for' is unknown"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(deed, words, sentence):
    with pytest.raises(UsageError, match=sentence):
        read_words(words, deed)


def test_faults_of_ranks_come_first_as_ranks_find_them_by_their_place():
    mixed = "node=1,step=9+rank=3,step=9+controller,step=9+rank=0,step=9"
    assert [type(fault) for fault in read_words(mixed, "kill").faults] == [
        *(Fault, Fault, NodeFault, NodeFault)
    ]


def test_faults_of_nodes_in_a_file(tmp_path):
    path = tmp_path / "drills.yaml"
    path.write_text(
        "- cut: {node: 1, step: 20, for: 8}\n- {kill: {node: 0, step: 3}, poweroff: {node: 1, step: 4}}\n"
    )
    assert read_file(str(path)) == (
        FaultOrder((NodeFault(1, 20, CUT, for_s=8.0),)),
        FaultOrder((NodeFault(0, 3), NodeFault(1, 4, OFF))),
    )


@pytest.mark.parametrize(
    ("deed", "words", "nodes", "sentence"),
    [
        ("kill", "node=2,step=1", 1, "give --nodes"),
        ("kill", "node=2,step=1", 2, "the nodes are 0 to 1"),
        ("kill", "rank=4,step=1", 2, "the ranks are 0 to 3"),
        ("kill", "rank=launcher,step=1", 2, "give controller or agent=N"),
        ("stop", "rank=launcher,step=1", 2, "leave out --nodes"),
        ("graceful", "node=1,step=1", 1, "give --nodes"),
    ],
)
def test_what_the_job_does_not_have_is_refused(deed, words, nodes, sentence):
    with pytest.raises(UsageError, match=sentence):
        check([read_words(words, deed)], 4, nodes)


@pytest.mark.parametrize(
    ("kind", "nodes", "sentence"),
    [("cut", 1, "give --nodes"), ("pair", 1, "give --nodes")],
)
def test_random_kinds_that_the_job_cannot_have_are_refused(kind, nodes, sentence):
    with pytest.raises(UsageError, match=sentence):
        check([RandomFaults(3, 0, (kind,))], 4, nodes)


def test_on_several_nodes_what_asks_for_an_exit_asks_from_outside():
    asked = NodeFault(0, 4, NodeDeed.REQUEST, 0.25, number=SIGINT)
    order = on_nodes(read_words("step=4,delay=0.25,signal=INT", "graceful"))
    assert order == FaultOrder((asked,))
    assert order.words == "graceful exit by SIGINT to node 0 at step 4 + 0.25"
    (of_node,) = read_words("step=4,node=2", "graceful").faults
    assert of_node.words == "graceful exit asked for at node 2 at step 4 + 0.50"
    mixed = on_nodes(read_words("step=9,grace=7", "preempt"))
    assert mixed.words == "preemption of all nodes with 7 s at step 9 + 0.50"
    lots = RandomFaults(3, 0, ("graceful",))
    assert on_nodes(lots) is lots
    killed = read_words("rank=1,step=3", "kill")
    assert on_nodes(killed) == killed


@pytest.mark.parametrize("words", ["step=4,phase=backward", "step=4,attempt=1"])
def test_from_outside_no_phase_of_a_rank_is_seen(words):
    with pytest.raises(UsageError, match="give no phase and no attempt"):
        on_nodes(read_words(words, "graceful"))


def test_of_pairs_none_takes_along_what_is_promised_to_last():
    for faults in draw(RandomFaults(200, 4, ("pair",)), 6, 20, 3):
        one, other = faults
        assert one.step == other.step > 2
        assert other.node > 0
        if isinstance(one, Fault):
            assert one.rank in {0, 1}  # of node 0
        else:
            assert {one.node, other.node} == {1, 2}


def test_random_faults_of_nodes_are_all_kinds_on_all_nodes():
    kinds = tuple(kind for kind in ON_NODES if kind != "pair")
    lots = RandomFaults(600, 1, kinds)
    drawn = [one for (one,) in draw(lots, 6, 20, 3)]
    assert draw(lots, 6, 20, 3) == draw(lots, 6, 20, 3)
    of_nodes = [one for one in drawn if isinstance(one, NodeFault)]
    assert {(one.node, one.deed) for one in of_nodes} == {
        (node, deed) for node in range(3) for deed in NodeDeed
    }
    cuts = [one.for_s for one in of_nodes if one.deed is CUT]
    assert all(0.5 <= each <= 8 or 12 <= each <= 30 for each in cuts)
    assert {each < 10 for each in cuts} == {True, False}
    assert {one.rank for one in drawn if isinstance(one, Fault)} == set(range(6))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--spare-nodes 1 --kill rank=0,step=1 -- t.py", "--spare-nodes needs --nodes"),
        ("--nodes 2 --patterns -- ", "leave out --nodes"),
        ("--nodes 2 --marathon 5 -- ", "leave out --nodes"),
    ],
)
def test_options_that_exclude_each_other_are_a_sentence(words, sentence):
    refused = CliRunner().invoke(drill, words.split())
    assert isinstance(refused.exception, UsageError)
    assert sentence in str(refused.exception)


def test_a_machine_that_refuses_in_the_end_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(session, "refusal", str)
    monkeypatch.setattr(session, "become_subreaper", lambda: None)  # orphans of other tests

    def refuse(*_):
        raise ClusterError("no switch: too many open files")

    monkeypatch.setattr(session.NodesTrial, "run", refuse)
    options = session.DrillOptions(("--worker_num=4", "t.py"), size=NodesOfDrill(2))
    with pytest.raises(UsageError, match="cannot be made: no switch: too many open files"):
        session.drill([read_words("node=1,step=3", "kill")], options, {})
