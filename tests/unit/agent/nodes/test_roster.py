"""Which node gets which rank, and who is refused."""

import itertools
import random

import pytest

from agent.nodes.messages import ANY_RANK, AskedSize, Join, LivingRanks, SurvivedStep
from agent.nodes.roster import (
    Gathering,
    OwnNode,
    Roster,
    WantedNodes,
    is_plausible,
    key_of,
    local_rank,
    natural,
)
from agent.nodes.run_messages import NodeFacts

OWN = OwnNode(ANY_RANK, 2, "mn0", 100, "run", "own", "1.0", "2.13", "10.0.0.1")


def wish(host="mn1", rank=ANY_RANK, nproc=2, pid=7, run_id="run", version="1.0", record="r"):
    return Join(run_id, record, rank, nproc, host, pid, version, "", "n", "")


def hosts(gathering):
    return [node.host for node in gathering.roster().nodes]


def test_ranks_are_numbered_through_nodes_of_any_size():
    roster = Roster(tuple(NodeFacts(at, "", "", nproc, 1) for at, nproc in enumerate([2, 1, 3])))
    assert roster.world_size == 6
    assert [roster.first_rank(node) for node in range(3)] == [0, 2, 3]
    assert [tuple(roster.ranks(node)) for node in range(3)] == [(0, 1), (2,), (3, 4, 5)]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_given_ranks_are_kept_whoever_comes_first(order):
    gathering = Gathering(OWN._replace(node_rank=2), WantedNodes(4))
    nodes = [
        (wish("a", 3), "10.0.0.9"),
        (wish("b", 0), "10.0.0.8"),
        (wish("c", 1, nproc=5), "10.0.0.7"),
    ]
    for at in order:
        assert not gathering.is_complete
        assert gathering.add(*nodes[at]) is None
    assert gathering.is_complete
    assert hosts(gathering) == ["b", "c", "mn0", "a"]
    assert [tuple(gathering.roster().ranks(node)) for node in range(4)] == [
        (0, 1),
        (2, 3, 4, 5, 6),
        (7, 8),
        (9, 10),
    ]
    assert gathering.node_ranks()[gathering.own_key] == 2
    assert gathering.node_ranks()[key_of(*nodes[0])] == 3


def test_without_given_ranks_addresses_count_then_process_ids_whoever_comes_first():
    nodes = [
        (wish("b", pid=9), "10.0.0.2"),
        (wish("a", pid=3), "10.0.0.10"),
        (wish("a", pid=20), "10.0.0.10"),
        (wish("d"), "9.255.0.1"),
    ]
    for _ in range(10):
        random.Random(1).shuffle(nodes)
        gathering = Gathering(OWN, WantedNodes(5))
        assert [gathering.add(*each) for each in nodes] == [None] * 4
        assert [(node.host, node.pid) for node in gathering.roster().nodes] == [
            ("mn0", 100), ("d", 7), ("b", 9), ("a", 3), ("a", 20),
        ]  # fmt: skip


def test_without_given_ranks_the_numbers_of_an_engine_count_before_addresses():
    """As where Slurm has placed them by the network's topology, and a person has named the first."""
    nodes = [
        (wish("d")._replace(place=0), "10.0.0.4"),
        (wish("b")._replace(place=3), "10.0.0.2"),
        (wish("c")._replace(place=12), "10.0.0.3"),
        (wish("a"), "10.0.0.1"),  # started by hand
    ]
    for shuffled in itertools.permutations(nodes):
        gathering = Gathering(OWN, WantedNodes(5))
        assert [gathering.add(*each) for each in shuffled] == [None] * 4
        assert hosts(gathering) == ["mn0", "d", "b", "c", "a"]


def test_nodes_without_a_rank_get_those_that_are_left():
    gathering = Gathering(OWN, WantedNodes(4))
    gathering.add(wish("c"), "10.0.0.5")
    gathering.add(wish("b", 2), "10.0.0.2")
    gathering.add(wish("d"), "10.0.0.6")
    assert hosts(gathering) == ["mn0", "c", "b", "d"]


def test_addresses_are_ordered_by_their_numbers():
    ordered = [
        "9.0.0.1",
        "10.0.0.2",
        "10.0.0.10",
        "fe80::2",
        "fe80::10",
        "10node",
        "node2",
        "node2b",
        "node10",
    ]
    shuffled = random.Random(2).sample(ordered, len(ordered))
    assert sorted(shuffled, key=natural) == ordered


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (wish("mn9", 1), ["mn9 (10.0.0.9)", "mn1 (10.0.0.2)", "both have node rank 1"]),
        (wish("mn9", 0), ["mn9 (10.0.0.9)", "mn0 (10.0.0.1)", "both have node rank 0"]),
        (wish("mn9", 3), ["mn9 (10.0.0.9)", "node rank 3", "3 nodes"]),
        (wish("mn9", run_id="other"), ["mn9 (10.0.0.9)", "'other'", "'run'"]),
        (wish("mn9", version="2.0"), ["mn9 (10.0.0.9)", "2.0", "1.0"]),
    ],
)
def test_a_node_that_cannot_take_part_hears_why_in_one_sentence(join, words):
    gathering = Gathering(OWN, WantedNodes(3))
    assert gathering.add(wish("mn1", 1), "10.0.0.2") is None
    why = gathering.add(join, "10.0.0.9")
    assert [word for word in words if word not in why] == []
    assert "\n" not in why
    assert len(gathering.roster().nodes) == 2


@pytest.mark.parametrize(
    ("size", "wanted", "why"),
    [
        (AskedSize(0, 0, 3), WantedNodes(2), "for 3 nodes, node 0 for 2"),
        (AskedSize(0, 2, 4), WantedNodes(2, least=1), "for 2:4 nodes, node 0 for 1:2"),
        (AskedSize(0, 0, 2), WantedNodes(2, least=1), "for 2 nodes, node 0 for 1:2"),
        (AskedSize(8, 0, 2), WantedNodes(2, 4), "for 8 workers, node 0 for 4"),
        (AskedSize(0, 0, 2), WantedNodes(2), ""),
        (AskedSize(4, 0, 9), WantedNodes(2, 4), ""),
        (AskedSize(4, 0, 9), WantedNodes(2), ""),  # one line counts workers, the other one nodes
        (AskedSize(0, 0, 9), WantedNodes(2, 4), ""),
        (None, WantedNodes(2), ""),
    ],
)
def test_nodes_whose_lines_disagree_on_the_size_do_not_begin(size, wanted, why):
    """The job would begin, and train with whatever node 0 takes for right."""
    join = wish("mn1")._replace(size=size)
    said = Gathering(OWN, wanted).add(join, "10.0.0.2")
    told = f"mn1 (10.0.0.2) was started {why}: give all the same number"
    assert said == (told if why else None)
    assert Gathering(OWN, wanted).add(join._replace(is_spare=True), "10.0.0.2") is None


def test_a_node_that_is_to_resume_takes_no_part_in_a_job_that_begins_anew():
    """It trained from the beginning, without a word."""
    resumes = wish("mn1", 1)._replace(resumes=True)
    why = Gathering(OWN, WantedNodes(2)).add(resumes, "10.0.0.2")
    assert why == ("mn1 (10.0.0.2) is to resume, but node 0 begins anew: give it --resume, too")
    assert Gathering(OWN._replace(resumes=True), WantedNodes(2)).add(resumes, "10.0.0.2") is None
    assert Gathering(OWN, WantedNodes(2)).add(resumes._replace(is_spare=True), "10.0.0.2") is None
    survived = SurvivedStep("own", 1, "/saved", 7, (), "", 2)
    assert (
        Gathering(OWN, WantedNodes(2)).add(resumes._replace(survived=survived), "10.0.0.2") is None
    )


def test_of_nodes_that_lost_their_steps_the_newest_checkpoint_and_the_newest_step_are_told():
    gathering = Gathering(OWN, WantedNodes(3))
    assert gathering.past() is None
    nothing = SurvivedStep("job", 1, "", 0, (), "", reached=6)
    gathering.add(wish("mn1")._replace(survived=nothing), "10.0.0.2")
    assert gathering.past() == nothing
    older = SurvivedStep("job", 2, "/saved", 0, ("job",), "", reached=5)
    gathering.add(wish("mn2")._replace(survived=older), "10.0.0.3")
    assert gathering.past() == older._replace(reached=6)


def test_a_node_too_many_is_refused():
    gathering = Gathering(OWN, WantedNodes(2))
    gathering.add(wish("mn1"), "10.0.0.2")
    assert "one too many: the job has 2 nodes" in gathering.add(wish("mn2"), "10.0.0.3")
    assert gathering.is_complete


def test_the_seat_of_a_node_that_left_is_free():
    gathering = Gathering(OWN, WantedNodes(2))
    first = wish("mn1", 1), "10.0.0.2"
    gathering.add(*first)
    assert gathering.is_complete
    gathering.remove(key_of(*first))
    assert not gathering.is_complete
    assert gathering.add(wish("mn7", 1), "10.0.0.7") is None
    assert hosts(gathering) == ["mn0", "mn7"]


def test_a_process_that_connects_again_takes_its_own_seat():
    gathering = Gathering(OWN, WantedNodes(3))
    assert gathering.add(wish("mn1", 1), "10.0.0.2") is None
    assert gathering.add(wish("mn1", 1, nproc=3), "10.0.0.2") is None
    assert "both have" in gathering.add(wish("mn1", 1, record="another"), "10.0.0.2")
    assert gathering.roster().world_size == 5


def test_with_a_number_of_workers_nodes_come_until_it_is_reached():
    gathering = Gathering(OWN, WantedNodes(1, world=7))
    assert not gathering.is_complete
    assert gathering.add(wish("mn2", 2, nproc=1), "10.0.0.3") is None
    assert "10 workers" not in gathering.missing()
    why = gathering.add(wish("mn1", 1, nproc=7), "10.0.0.2")
    assert "there are 10 workers, but the job has 7" in why
    assert gathering.add(wish("mn1", 1, nproc=4), "10.0.0.2") is None
    assert gathering.is_complete
    assert [node.nproc for node in gathering.roster().nodes] == [2, 4, 1]


def test_with_a_number_of_workers_a_gap_in_the_ranks_is_refused():
    gathering = Gathering(OWN, WantedNodes(1, world=4))
    assert "without a gap" in gathering.add(wish("mn2", 2, nproc=2), "10.0.0.3")
    assert gathering.add(wish("mn1", 1, nproc=2), "10.0.0.2") is None


def test_a_gap_is_none_where_only_the_order_of_the_ranks_counts():
    gathering = Gathering(OWN, WantedNodes(3, world=7, has_sparse_ranks=True))
    assert gathering.add(wish("mn2", 6, nproc=1), "10.0.0.3") is None
    assert gathering.add(wish("mn1", 2, nproc=4), "10.0.0.2") is None
    assert gathering.is_complete
    assert [node.nproc for node in gathering.roster().nodes] == [2, 4, 1]


@pytest.mark.parametrize(
    ("wanted", "joins", "text"),
    [
        (
            WantedNodes(3),
            [wish("mn2", 2)],
            "2 of 3 nodes are here (mn0, mn2); node rank 1 is missing",
        ),
        (WantedNodes(3), [], "1 of 3 nodes is here (mn0); node ranks 1, 2 are missing"),
        (WantedNodes(3), [wish("mn2")], "2 of 3 nodes are here (mn0, mn2)"),
        (WantedNodes(1, 8), [wish("mn2")], "4 of 8 workers are here, on 2 nodes (mn0, mn2)"),
        (WantedNodes(1, 8), [], "2 of 8 workers are here, on 1 node (mn0)"),
    ],
)
def test_people_hear_who_is_missing(wanted, joins, text):
    gathering = Gathering(OWN, wanted)
    for join in joins:
        gathering.add(join, "10.0.0.3")
    assert gathering.missing() == text


def test_a_long_list_of_those_missing_is_cut():
    assert (
        Gathering(OWN, WantedNodes(500))
        .missing()
        .endswith("ranks 1, 2, 3, 4, 5, 6, 7, 8, ... are missing")
    )


def test_the_own_address_is_what_was_reached_if_nobody_gave_one():
    gathering = Gathering(OWN._replace(address=""), WantedNodes(2))
    gathering.add(wish(), "10.0.0.2")
    assert [node.address for node in gathering.roster("10.0.0.1").nodes] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    "odd",
    [
        {"nproc": 0},
        {"nproc": 1 << 20},
        {"pid": 0},
        {"rank": -2},
        {"host": "a\x1b[31m"},
        {"host": ""},
        {"run_id": "x" * 300},
        {"host": "\udc80"},
    ],
    ids=str,
)
def test_nonsense_is_no_node(odd):
    assert is_plausible(wish())
    assert not is_plausible(wish(**odd))


@pytest.mark.parametrize("door", [-1, 1 << 16])
def test_what_is_no_port_is_no_door(door):
    assert is_plausible(wish()._replace(door=65535))
    assert not is_plausible(wish()._replace(door=door))


# --- workers that are started by hand -------------------------------------------------------------

SCHEDULER = OWN._replace(node_rank=0, nproc=0, host="sched")


def worker(name, pid=7, host="mn1"):
    return wish(host, nproc=1, pid=pid)._replace(name=name)


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        (("worker_10", "worker_2", "worker_9"), ["worker_2", "worker_9", "worker_10"]),
        (("2", "10", "0", "9"), ["0", "2", "9", "10"]),
        (("", "worker_1", ""), ["worker_1", "", ""]),
    ],
)
def test_workers_get_their_ranks_in_the_order_of_their_names(names, ordered):
    for shuffled in itertools.permutations(enumerate(names)):
        gathering = Gathering(SCHEDULER, WantedNodes(len(names), len(names)))
        for pid, name in shuffled:
            assert not gathering.is_complete
            assert gathering.add(worker(name, pid=pid + 1), f"10.0.0.{9 - pid}") is None
        assert gathering.is_complete
        roster = gathering.roster()
        assert [node.name for node in roster.nodes] == ["", *ordered]
        assert [node.nproc for node in roster.nodes] == [0] + [1] * len(names)
        assert (roster.world_size, roster.first_rank(1)) == (len(names), 0)


def test_two_workers_of_one_name_are_told():
    gathering = Gathering(SCHEDULER, WantedNodes(3, 3))
    gathering.add(worker("3"), "10.0.0.2")
    assert gathering.add(worker("3", pid=8, host="mn2"), "10.0.0.3") == (
        "mn2 (10.0.0.3) and mn1 (10.0.0.2) both have a worker that is named '3': "
        "give each its own MS_NODE_ID"
    )
    assert gathering.missing() == "1 of 3 workers are here (3)"


def test_a_scheduler_alone_says_that_no_worker_is_here():
    gathering = Gathering(SCHEDULER, WantedNodes(3, 3))
    assert gathering.missing() == "0 of 3 workers are here (none)"


def living(name, rank, attempt=2, job="lost", program="train.py", world=3, local=0):
    told = LivingRanks(job, rank, attempt, "", "", 0, (), program, world, local)
    return worker(name, pid=rank)._replace(node_rank=rank, living=told)


def test_workers_that_train_keep_their_places_and_begin_together():
    gathering = Gathering(SCHEDULER._replace(program="train.py"), WantedNodes(3, 3))
    names = ("late", "b", "a")  # by their names they would get others
    for rank in (3, 1, 2):
        assert not gathering.is_complete
        assert gathering.add(living(names[rank - 1], rank), "10.0.0.2") is None
    assert gathering.is_complete
    assert [node.name for node in gathering.roster().nodes] == ["", *names]
    assert gathering.past()._replace(node_rank=0) == LivingRanks(
        "lost", 0, 2, "", "", 0, (), "train.py", 3, 0
    )


@pytest.mark.parametrize(
    "other", [worker("c", pid=9), living("c", 3, attempt=3), living("c", 3, job="another")]
)
def test_workers_that_do_not_train_together_do_not_begin(other):
    gathering = Gathering(SCHEDULER._replace(program="train.py"), WantedNodes(3, 3))
    for join in (living("a", 1), living("b", 2), other):
        assert not gathering.is_mixed
        assert gathering.add(join, "10.0.0.2") is None
    assert not gathering.is_complete
    assert gathering.is_mixed


def test_workers_of_another_script_are_refused_by_a_scheduler():
    gathering = Gathering(SCHEDULER._replace(program="other.py"), WantedNodes(3, 3))
    why = gathering.add(living("a", 1), "10.0.0.2")
    assert "runs another script or has other arguments" in why


def test_a_scheduler_of_a_smaller_job_takes_no_part_of_another():
    gathering = Gathering(SCHEDULER._replace(program="train.py"), WantedNodes(2, 2))
    why = gathering.add(living("a", 1), "10.0.0.2")
    assert why == "mn1 (10.0.0.2) takes part in a job of 3 workers, this one has 2"


def test_each_worker_of_a_machine_has_a_local_rank_of_its_own():
    gathering = Gathering(SCHEDULER, WantedNodes(4, 4))
    places = (("mn1", "10.0.0.2"), ("mn2", "10.0.0.3"), ("mn1", "10.0.0.2"), ("mn1", "10.0.0.2"))
    for number, (host, address) in enumerate(places):
        gathering.add(worker(f"worker_{number}", pid=number + 1, host=host), address)
    nodes = gathering.roster().nodes
    assert [node.local_first for node in nodes] == [0, 0, 0, 1, 2]
    # one that comes in the place of worker 0 gets the device that is free there
    new = nodes[1]._replace(pid=99)
    assert local_rank((*nodes[:1], *nodes[2:]), new) == 0
    assert local_rank((*nodes[:3], *nodes[4:]), new) == 1
    assert local_rank(nodes, new._replace(host="mn9")) == 0
    assert local_rank(nodes, new) == 3


def test_workers_that_train_keep_their_devices():
    gathering = Gathering(SCHEDULER._replace(program="train.py"), WantedNodes(3, 3))
    for rank, local in ((1, 2), (2, 0), (3, 1)):  # as they came in the places of others
        gathering.add(living(str(rank), rank, local=local), "10.0.0.2")
    assert [node.local_first for node in gathering.roster().nodes[1:]] == [2, 0, 1]


def test_where_a_restart_resumes_is_known_by_those_that_were_there_at_its_begin():
    gathering = Gathering(SCHEDULER._replace(program="train.py"), WantedNodes(2, 2))
    for number, path in enumerate(("", "/saved/step_5")):
        join = living(str(number), number + 1, world=2)
        told = join.living._replace(attempt_resume=path)
        assert gathering.add(join._replace(living=told), "10.0.0.2") is None
    assert gathering.past().attempt_resume == "/saved/step_5"
