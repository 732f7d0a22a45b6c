"""What ranks of another node resume from is on its disk before they hear of it."""

import asyncio
from types import SimpleNamespace

import pytest
from support import checkpoints
from support.controlled_node import FakeLogs
from support.jobs import poll
from support.node_cluster import FakeLink, travelled

from agent.controller import actions as do
from agent.controller import events as ev
from agent.nodes.checkpoint_copy import CheckpointPlace
from agent.nodes.codec import unpack_event
from agent.nodes.run_messages import Fact, JobKnown, ToRank, pack_said, unpack_said
from agent.supervisor import remote_controller as module
from agent.supervisor.job_view import Holders, JobView
from agent.supervisor.remote_controller import RemoteController
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest


def turn_until(loop, said):
    """Threads hand their results to the loop."""
    poll(lambda: said() or loop.run_until_complete(asyncio.sleep(0)))


@pytest.fixture
def saved(tmp_path):
    return checkpoints.saved(tmp_path / "node0")


def welcomed(cluster, rank, path):
    """What is sent to node 1, where a rank begins again."""
    link = cluster.links[0]
    cluster.hooks.send(rank, protocol.Welcome(str(path)))
    turn_until(cluster.loop, lambda: link.said)
    return link.said.pop()


def test_a_rank_elsewhere_hears_of_a_checkpoint_with_its_place(cluster, saved):
    cluster.start(2, 3, 4)
    sent = welcomed(cluster, 3, saved)
    assert (sent.rank, sent.attempt, sent.patience_s > 0) == (3, 0, True)
    assert unpack_said(sent.message) == protocol.Welcome(str(saved))
    assert CheckpointPlace.read(sent.place).is_here()
    cluster.all.decided(JobView(), Holders(apart="/data is not one folder"))
    assert welcomed(cluster, 4, saved).patience_s == 0.0  # it cannot appear by itself
    cluster.all.finish()


def test_it_is_for_the_rank_to_say_that_there_is_none(cluster, saved):
    cluster.start(2, 3, 4)
    sent = welcomed(cluster, 3, saved / "none")
    assert sent == ToRank(3, pack_said(protocol.Welcome(str(saved / "none"))))
    cluster.hooks.send(2, protocol.Welcome(""))  # it begins at step 0
    assert isinstance(cluster.links[0].said.pop(), ToRank)


def test_the_next_attempt_may_find_another_checkpoint_under_that_path(cluster, saved):
    cluster.start(2, 3, 4)
    first = welcomed(cluster, 3, saved)
    cluster.hooks.send(4, protocol.Welcome(str(saved)))
    cluster.links[0].said.clear()
    cluster.hooks.send(3, protocol.Welcome(str(saved / "none")))  # its answer comes too late
    cluster.all.act(do.StartAttempt(1, "again"))
    cluster.links[0].said.clear()
    manifest.write(saved, manifest.read(saved)._replace(reason="saved once more"))
    again = welcomed(cluster, 3, saved)
    assert (first.attempt, again.attempt) == (0, 1)
    assert first.place["sha256"] != again.place["sha256"]
    assert cluster.links[0].said == []
    cluster.all.finish()


# --- on the other node ----------------------------------------------------------------------------


@pytest.fixture
def node():
    """Another node, in attempt 4."""
    loop, link, told, said = asyncio.new_event_loop(), FakeLink(), [], []
    hooks = SimpleNamespace(
        tell=lambda *about: told.append(about),
        tell_beats=lambda: None,
        watch=lambda _: None,
        ranks=(2, 3),
        writes=SimpleNamespace(here=None),
    )
    here = SimpleNamespace(decided=lambda *_: None)
    controller = RemoteController(
        link,
        hooks,
        FakeLogs(),
        evidence=lambda _: [],
        show_status=lambda _: None,
        say=said.append,
        grace_s=1.0,
        host="127.0.0.1",
        lost=lambda *_: False,
    )
    controller.attach(loop, here)
    controller.begin()
    link.hear(JobKnown("running", 4, True))
    yield SimpleNamespace(loop=loop, link=link, told=told, said=said)
    loop.close()


def order(cluster, saved, there=None, attempt=4):
    """As it comes from node 0; ``there``: the checkpoint's path on this node."""
    sent = welcomed(cluster, 3, saved)
    place = {**sent.place, "path": str(there or saved)}
    return travelled(sent._replace(attempt=attempt, place=place, patience_s=0.0))


def test_the_rank_hears_of_it_once_it_is_here(cluster, node, saved, tmp_path):
    cluster.start(2, 3, 4)
    there = tmp_path / "node1" / saved.name
    node.link.hear(order(cluster, saved, there))
    assert node.told == []
    turn_until(node.loop, lambda: node.told)
    assert node.told == [(3, protocol.Welcome(str(saved)))]
    assert (there / "manifest.json").exists()
    assert len(node.said) == 1
    cluster.all.finish()


def refusals(node):
    events = [unpack_event(each.event) for each in node.link.said if isinstance(each, Fact)]
    return [each for each in events if isinstance(each, ev.StartRefused)]


def test_a_job_that_cannot_have_it_there_does_not_train(cluster, node, saved, tmp_path):
    cluster.start(2, 3, 4)
    other = checkpoints.saved(tmp_path / "node1", run="r2")
    node.link.hear(order(cluster, saved, other))
    turn_until(node.loop, lambda: refusals(node))
    (refused,) = refusals(node)
    assert (refused.attempt, refused.ranks, node.told) == (4, (3,), [])
    assert "is not the checkpoint of node 0, another run has saved it" in refused.why
    cluster.all.finish()


def test_nobody_waits_for_ever(cluster, node, saved, monkeypatch):
    cluster.start(2, 3, 4)
    monkeypatch.setattr(module, "BRING_S", 0.01)
    monkeypatch.setattr(module.CheckpointFetcher, "have", lambda *_: None)
    node.link.hear(order(cluster, saved))
    turn_until(node.loop, lambda: refusals(node))
    assert "has not come to this node within" in refusals(node)[0].why
    cluster.all.finish()


def test_what_comes_for_an_attempt_that_is_over_is_of_no_use(cluster, node, saved):
    cluster.start(2, 3, 4)
    node.link.hear(order(cluster, saved, attempt=3))
    node.link.hear(order(cluster, saved))
    turn_until(node.loop, lambda: node.told)
    assert (len(node.told), refusals(node)) == (1, [])
    cluster.all.finish()
