"""Nodes that find each other over real sockets: in any order, past strangers, deaths and mistakes."""

import asyncio
import os
import socket
import threading
from signal import SIGTERM

import pytest
from support.jobs import poll
from support.meeting_nodes import (
    LONG_S,
    STRANGERS,
    TOKEN,
    Clock,
    heard,
    is_closed,
    is_closed_after,
    joined_by_hand,
    met_by_hand,
    node,
    wish,
)

from agent.nodes import gather as gathering
from agent.nodes import guest
from agent.nodes import join as joining
from agent.nodes.frames import PREAMBLE, FrameReader, message_of
from agent.nodes.gather import KeptNewer, MissingNodesError, Resuming
from agent.nodes.join import NeverBegunError, RefusedError
from agent.nodes.line import bytes_of
from agent.nodes.link import NodeLink
from agent.nodes.messages import (
    Admitted,
    Begin,
    Challenge,
    Newer,
    SeekNewer,
    StopGathering,
)
from agent.nodes.roster import Gathering
from agent.nodes.run_messages import NodeFacts, Order, ShownStatus
from agent.nodes.token import Proofs, Side
from agent.spec.job_spec import StoppedEarlyError, UsageError


@pytest.fixture
def talkative(monkeypatch):
    """People hear everything at once."""
    for module in (gathering, joining):
        monkeypatch.setattr(module, "FIRST_WORD_S", 0.0)
        monkeypatch.setattr(module, "NEXT_WORD_S", 0.01)


@pytest.mark.parametrize("token", [b"", TOKEN])
@pytest.mark.parametrize("order", ["gather first", "join first"])
@pytest.mark.usefixtures("talkative")
def test_nodes_meet_whoever_starts_first(job, order, token):
    if order == "gather first":
        controller = job.gather(token=token)
        job.until("1 of 3 nodes is here (mn0); node ranks 1, 2 are missing")
    nodes = [job.join(node("mn2", 2, nproc=3), token), job.join(node("mn1", 1), token)]
    if order == "join first":
        job.until(f"waiting to begin: 127.0.0.1:{job.port} does not answer (Connection refused)")
        controller = job.gather(token=token)
    second, first = (each.result(LONG_S) for each in nodes)
    whole = controller.result(LONG_S)
    facts = [
        (each.rank, each.host, each.address, each.nproc, each.pid) for each in whole.roster.nodes
    ]
    assert facts == [
        (0, "mn0", "127.0.0.1", 2, 100), (1, "mn1", "127.0.0.1", 2, 101), (2, "mn2", "127.0.0.1", 3, 102),
    ]  # fmt: skip
    assert first.roster.nodes == second.roster.nodes == whole.roster.nodes
    assert (whole.node_rank, first.node_rank, second.node_rank) == (0, 1, 2)
    assert first.settings == {"port": 1}
    assert sorted(whole.lines) == [1, 2]
    for one, two in ((whole.lines[1], first.line), (whole.lines[2], second.line)):
        assert one.connection.getsockname() == two.connection.getpeername()


def test_a_job_of_one_node_begins_at_once(job):
    whole = job.gather(nnodes=1).result(LONG_S)
    assert (whole.roster.world_size, whole.node_rank, whole.lines) == (2, 0, {})


@pytest.mark.usefixtures("talkative")
def test_enough_nodes_wait_for_more_only_for_a_while(job):
    controller = job.gather(nnodes=4, least=2, last_call_s=0.3)
    job.until("1 of 2 to 4 nodes is here (mn0)")
    others = [job.join(node("mn1"))]
    job.until("2 of 2 to 4 nodes are here (mn0, mn1); the job begins without others in 0")
    whole = controller.result(LONG_S)
    assert [each.host for each in whole.roster.nodes] == ["mn0", "mn1"]
    assert [each.result(LONG_S).node_rank for each in others] == [1]


def test_all_that_can_come_are_not_waited_for(job):
    controller = job.gather(nnodes=2, least=1, last_call_s=LONG_S * 10)
    other = job.join(node("mn1"))
    assert len(controller.result(LONG_S).roster.nodes) == 2
    other.result(LONG_S)


@pytest.mark.usefixtures("talkative")
def test_one_more_than_can_take_part_is_not_sent_away(job, monkeypatch):
    """It asks again: once the job has begun it may wait for a place there."""
    monkeypatch.setattr(Gathering, "is_complete", property(lambda _: is_let.is_set()))
    is_let = threading.Event()
    controller = job.gather(nnodes=2, least=1, last_call_s=LONG_S * 10)
    joined_by_hand(job, node("mn1"))
    job.until("2 of 1 to 2 nodes are here")
    connection, reader = joined_by_hand(job, node("mn2"))
    with pytest.raises(AssertionError, match="closed"):
        heard(connection, reader)
    is_let.set()
    job.connect()  # wakes it
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn1"]


@pytest.mark.usefixtures("talkative")
def test_a_node_that_goes_begins_the_wait_anew(job):
    controller = job.gather(nnodes=3, least=2, last_call_s=0.5, timeout_s=LONG_S)
    first, _ = joined_by_hand(job, node("mn1"))
    job.until("the job begins without others")
    first.close()
    job.until("1 of 2 to 3 nodes is here (mn0)")
    other = job.join(node("mn2"))
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn2"]
    other.result(LONG_S)


@pytest.mark.parametrize("comes", [True, False])
def test_no_last_call_is_longer_than_the_time_to_start(job, comes):
    controller = job.gather(nnodes=3, least=2, last_call_s=LONG_S * 10, timeout_s=1.0)
    other = job.join(node("mn1")) if comes else None
    if not comes:
        with pytest.raises(MissingNodesError, match="1 of 2 to 3 nodes is here"):
            controller.result(LONG_S)
        return
    assert len(controller.result(LONG_S).roster.nodes) == 2
    other.result(LONG_S)


def test_the_node_that_gathers_may_have_any_rank(job):
    other = job.join(node("mn1", 0))
    assert job.gather(nnodes=2, own=node("mn0", 1)).result(LONG_S).node_rank == 1
    assert other.result(LONG_S).node_rank == 0


def test_nodes_tell_the_numbers_that_an_engine_has_given_them(job):
    controller = job.gather()
    others = [job.join(node("mn1", place=2)), job.join(node("mn2", place=1))]
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn2", "mn1"]
    assert [each.result(LONG_S).node_rank for each in others] == [2, 1]


def test_nodes_come_until_there_are_enough_workers(job):
    controller = job.gather(nnodes=9, world=7)
    others = [job.join(node("mn1", nproc=1)), job.join(node("mn2", nproc=4))]
    assert controller.result(LONG_S).roster.world_size == 7
    assert [each.result(LONG_S).roster.world_size for each in others] == [7, 7]


@pytest.mark.parametrize(
    ("wrong", "token", "words"),
    [
        (node("mn9", 1), b"other", "the token of mn9 (127.0.0.1) is not that of the job"),
        (node("mn9", 1), b"", "this job needs a token: give MSRUN_TOKEN or --token-file"),
        (node("mn9", 1, run_id="other"), TOKEN, "belongs to the job 'other'"),
        (node("mn9", 1, version="2.0"), TOKEN, "install the same version on all nodes"),
        (node("mn9", 0), TOKEN, "mn9 (127.0.0.1) and mn0 both have node rank 0"),
        (node("mn9", 2), TOKEN, "mn9 (127.0.0.1) has node rank 2, but the job has 2 nodes"),
    ],
)
def test_a_node_with_a_mistake_is_refused_and_the_others_go_on(job, wrong, token, words):
    controller = job.gather(nnodes=2, token=TOKEN)
    refused = job.join(wrong, token).exception(LONG_S)
    assert isinstance(refused, RefusedError)
    assert words in refused.why
    assert refused.exit_code == 2
    good = job.join(node("mn1", 1), TOKEN)
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn1"]
    assert good.result(LONG_S).node_rank == 1


def test_a_token_that_a_file_server_shows_late_is_waited_for(job):
    """Refused is the one that this node saw, not the node."""
    seen = iter([b"", b"of an earlier job"])
    controller = job.gather(nnodes=2, token=TOKEN)
    joined = job.join(node("mn1", 1), lambda: next(seen, TOKEN), late_s=LONG_S)
    assert joined.result(LONG_S).node_rank == 1
    assert controller.result(LONG_S).roster.nodes[1].host == "mn1"
    assert "this job needs a token" in job.until("refused")


def test_a_token_that_stays_another_one_is_refused_in_the_end(job, monkeypatch):
    monkeypatch.setattr(joining, "time", clock := Clock())
    seen = []

    def read():
        clock.late_s = 31.0 * len(seen)
        seen.append(b"other")
        return b"other"

    job.gather(nnodes=2, token=TOKEN)
    refused = job.join(node("mn9", 1), read, timeout_s=100.0, late_s=30.0).exception(LONG_S)
    assert isinstance(refused, RefusedError)
    assert refused.exit_code == 2
    assert len(seen) == 2
    job.join(node("mn1", 1), TOKEN).result(LONG_S)


def test_a_node_with_another_version_is_refused_by_the_controller_too(job):
    controller = job.gather(nnodes=2)
    connection, reader = joined_by_hand(job, node("mn9", 1), version="2.0")
    assert "runs msrun '2.0'" in heard(connection, reader).why
    assert is_closed(connection)
    job.join(node("mn1", 1))
    controller.result(LONG_S)
    assert "a node was refused: a node at 127.0.0.1 runs msrun '2.0'" in job.until("refused")


def test_a_node_with_a_token_does_not_join_a_job_without(job):
    controller = job.gather(nnodes=2)
    refused = job.join(node("mn9", 1), TOKEN).exception(LONG_S)
    assert "mn9 (127.0.0.1) has a token, the job has none" in str(refused)
    job.join(node("mn1", 1))
    controller.result(LONG_S)


@pytest.mark.parametrize("proof", ["", "wrong", Proofs("run", "c", "n").proof(TOKEN, Side.NODE)])
def test_a_node_obeys_no_controller_that_does_not_know_its_token(job, proof):
    joiner = job.join(node("mn1", 1), TOKEN)
    connection, _ = met_by_hand(job)
    connection.sendall(bytes_of(Admitted(1, proof)))
    assert f"127.0.0.1:{job.port} does not know the token" in str(joiner.exception(LONG_S))


@pytest.mark.usefixtures("talkative")
def test_missing_nodes_are_named_to_everybody(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gathering, "time", clock)
    controller = job.gather()
    here = job.join(node("mn2", 2))
    job.until("2 of 3 nodes are here")
    clock.late_s = LONG_S
    error = controller.exception(LONG_S)
    assert isinstance(error, MissingNodesError)
    assert str(error).startswith("not all nodes came within ")
    assert str(error).endswith("2 of 3 nodes are here (mn0, mn2); node rank 1 is missing")
    assert (here.exception(LONG_S).why, here.exception().exit_code) == (str(error), 1)


@pytest.mark.usefixtures("talkative")
def test_who_waits_hears_that_the_controller_was_interrupted(job):
    def interrupt(text):
        if "2 of 3 nodes" in text:
            raise KeyboardInterrupt

    controller, here = job.gather(say=interrupt), job.join(node("mn2", 2))
    assert "msrun on mn0 ended before all nodes were here" in str(here.exception(LONG_S))
    assert isinstance(controller.exception(LONG_S), KeyboardInterrupt)


@pytest.mark.usefixtures("talkative")
def test_the_seat_of_a_node_that_dies_while_others_are_awaited_is_free(job):
    controller = job.gather()
    connection, _ = joined_by_hand(job, node("mn8", 1))
    job.until("2 of 3 nodes are here (mn0, mn8)")
    connection.close()
    job.until("1 of 3 nodes is here (mn0)")
    others = [job.join(node("mn1", 1)), job.join(node("mn2", 2))]
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn1", "mn2"]
    assert [each.result(LONG_S).node_rank for each in others] == [1, 2]


@pytest.mark.usefixtures("talkative")
def test_a_node_that_lost_its_connection_takes_its_own_seat_again(job):
    controller = job.gather(nnodes=3)
    old, _ = joined_by_hand(job, node("mn1", 1))  # as if the network had forgotten this connection
    job.until("2 of 3 nodes are here")
    again = job.join(node("mn1", 1))
    while not is_closed(old):  # it was told who is missing
        pass
    job.join(node("mn2", 2))
    controller.result(LONG_S)
    assert again.result(LONG_S).node_rank == 1


@pytest.mark.usefixtures("talkative")
def test_every_node_knows_who_is_missing(job):
    shown = []
    controller = job.gather(nnodes=3, shows=shown.append)
    theirs = []
    other = job.join(node("mn1", 1), shows=theirs.append)
    here = "waiting for nodes: 2 of 3 nodes are here (mn0, mn1); node rank 2 is missing"
    poll(lambda: here in shown and here in theirs)
    job.join(node("mn2", 2))
    controller.result(LONG_S)
    assert other.result(LONG_S).node_rank == 1


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_node_that_is_asked_to_end_the_job_ends_the_wait_of_all(job, is_spare):
    """Not one that waits beside it."""
    controller = job.gather(nnodes=3 if is_spare else 4)
    own = node("mn3", is_spare=True) if is_spare else node("mn1", 1)
    connection, _ = joined_by_hand(job, own, is_spare=is_spare)
    other = job.join(node("mn2", 2))
    job.until("2 of 3 nodes are here" if is_spare else "3 of 4 nodes are here")
    connection.sendall(bytes_of(StopGathering("stopped by SIGTERM on mn1", SIGTERM)))
    if is_spare:
        assert is_closed(connection)
        job.join(node("mn1", 1))
        controller.result(LONG_S)
        return
    with pytest.raises(StoppedEarlyError, match="stopped by SIGTERM on mn1") as stopped:
        controller.result(LONG_S)
    assert stopped.value.exit_code == 128 + SIGTERM
    with pytest.raises(RefusedError, match="stopped by SIGTERM on mn1") as refused:
        other.result(LONG_S)
    assert refused.value.exit_code == 128 + SIGTERM


ASKS = SeekNewer("/ckpt", "r", 5)


def test_all_are_asked_for_newer_checkpoints_and_the_job_begins_then(job):
    found, asked = [], []

    def seek(question):
        asked.append(question)
        return Newer(8, "/ckpt/step_8")

    controller = job.gather(nnodes=3, resuming=Resuming(ASKS, found.append))
    others = [job.join(node("mn1", 1), seek=seek), job.join(node("mn2", 2))]
    controller.result(LONG_S)
    assert [each.result(LONG_S).node_rank for each in others] == [1, 2]
    assert asked == [ASKS]
    assert found == [[KeptNewer("mn1", "127.0.0.1", Newer(8, "/ckpt/step_8"))]]


def test_where_nobody_has_a_newer_one_nothing_is_found(job):
    found = []
    controller = job.gather(nnodes=2, resuming=Resuming(ASKS, found.append))
    other = job.join(node("mn1", 1), seek=lambda _: Newer(5, "/ckpt/step_5"))
    controller.result(LONG_S)
    other.result(LONG_S)
    assert found == []


def test_what_is_newer_and_not_to_be_had_ends_the_wait_of_all(job):
    def found(_):
        raise UsageError("mn1 has saved step 8")

    controller = job.gather(nnodes=2, resuming=Resuming(ASKS, found))
    other = job.join(node("mn1", 1), seek=lambda _: Newer(8, "/ckpt/step_8"))
    with pytest.raises(UsageError, match="mn1 has saved step 8"):
        controller.result(LONG_S)
    with pytest.raises(RefusedError, match="mn1 has saved step 8") as refused:
        other.result(LONG_S)
    assert refused.value.exit_code == 2


def test_one_that_is_gone_as_it_is_asked_is_awaited_once_more(job):
    controller = job.gather(nnodes=2, resuming=Resuming(ASKS, print))
    connection, reader = joined_by_hand(job, node("mn1", 1))
    while not isinstance(heard(connection, reader), SeekNewer):
        pass
    connection.close()
    other = job.join(node("mn1", 1))
    controller.result(LONG_S)
    assert other.result(LONG_S).node_rank == 1


def test_one_that_does_not_answer_is_named_and_keeps_nobody_for_ever(job, monkeypatch):
    monkeypatch.setattr(gathering, "SEEK_S", 0.2)
    controller = job.gather(nnodes=2, resuming=Resuming(ASKS, print))
    joined_by_hand(job, node("mn1", 1))
    job.until("mn1 (127.0.0.1) has not said within ")
    controller.result(LONG_S)


def test_a_node_that_speaks_before_the_job_begins_is_none(job):
    controller = job.gather(nnodes=3)
    connection, _ = joined_by_hand(job, node("mn8", 1))
    connection.sendall(bytes_of(ShownStatus({})))
    assert is_closed(connection)
    job.join(node("mn1", 1))
    job.join(node("mn2", 2))
    assert controller.result(LONG_S).roster.nodes[1].host == "mn1"


@pytest.mark.parametrize("patience_s", [0.0, 0.02])
def test_strangers_are_closed_without_a_word_and_make_nobody_wait(job, monkeypatch, patience_s):
    monkeypatch.setattr(gathering, "MOST_UNKNOWN", 8)
    monkeypatch.setattr(gathering, "PATIENCE_S", patience_s)
    monkeypatch.setattr(gathering, "ANSWER_S", LONG_S)
    controller = job.gather(nnodes=2)
    for data in STRANGERS[:3]:
        assert is_closed(job.connect(data))
    for data in STRANGERS[3:]:
        connection, reader = job.connect(data), FrameReader(message_of)
        assert isinstance(heard(connection, reader), Challenge)
        assert is_closed(connection)
    silent = [job.connect() for _ in range(40)]
    assert is_closed(silent[0])  # there is no room for so many
    other = job.join(node("mn1", 1))
    whole = controller.result(LONG_S)
    assert whole.strangers >= len(STRANGERS)
    assert other.result(LONG_S).roster.world_size == 4
    assert all(map(is_closed, silent))
    assert job.lines.empty()


def test_who_says_nothing_is_closed_in_time(job, monkeypatch):
    monkeypatch.setattr(gathering, "ANSWER_S", 0.05)
    controller = job.gather(nnodes=2)
    assert is_closed(job.connect())
    assert is_closed(job.connect(PREAMBLE[:2]))
    monkeypatch.setattr(gathering, "ANSWER_S", 60.0)
    job.join(node("mn1", 1))
    assert controller.result(LONG_S).strangers == 2


def test_who_fills_the_room_has_a_moment_to_say_who_it_is(job, monkeypatch):
    monkeypatch.setattr(gathering, "MOST_UNKNOWN", 1)
    monkeypatch.setattr(gathering, "PATIENCE_S", LONG_S)
    controller = job.gather(nnodes=2)
    slow, reader = job.connect(PREAMBLE), FrameReader(message_of)
    challenge = heard(slow, reader)
    for _ in range(5):
        job.connect()
    slow.sendall(bytes_of(wish(node("mn1", 1), challenge)))
    assert isinstance(heard(slow, reader), Admitted)
    controller.result(LONG_S)


def test_a_node_dials_again_if_the_controller_dies_before_the_job_begins(job):
    joiner = job.join(node("mn1", 1))
    connection, wish = met_by_hand(job)
    assert (wish.host, wish.node_rank, wish.proof) == ("mn1", 1, "")
    connection.close()
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes_of(ShownStatus({})),
        bytes_of(Challenge("c", "1.0")) + bytes_of(ShownStatus({})),
        bytes_of(Challenge("c", "1.0")) + bytes_of(Admitted(5, "")) + bytes_of(Begin((), {})),
        b"",
    ],
)
def test_a_node_dials_again_if_something_else_answers(job, answer):
    joiner = job.join(node("mn1", 1))
    connection = job.accept()
    connection.sendall(answer)
    connection.shutdown(socket.SHUT_WR)
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


def test_a_node_dials_again_if_who_answers_stays_silent(job, monkeypatch):
    monkeypatch.setattr(joining, "CHALLENGE_S", 0.2)
    joiner = job.join(node("mn1", 1))
    assert is_closed_after(job.accept(), PREAMBLE)
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.usefixtures("talkative")
def test_the_name_of_the_controller_may_be_known_late(job, monkeypatch):
    fails = iter([True, True])
    real = socket.getaddrinfo

    def late(*args, **more):
        if next(fails, False):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    joiner = job.join(node("mn1", 1))
    job.until("does not resolve (Name or service not known)")
    job.gather(nnodes=2).result(LONG_S)
    assert joiner.result(LONG_S).node_rank == 1


@pytest.mark.usefixtures("talkative")
def test_a_node_that_nobody_answers_ends_with_the_last_error(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    joiner = job.join(node("mn1", 1))
    job.until("Connection refused")
    clock.late_s = LONG_S
    error = joiner.exception(LONG_S)
    assert isinstance(error, NeverBegunError)
    assert str(error).startswith("the job did not begin within ")
    assert str(error).endswith(f": 127.0.0.1:{job.port} does not answer (Connection refused)")


@pytest.mark.usefixtures("talkative")
def test_a_node_whose_job_never_begins_says_what_it_waited_for(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    controller, joiner = job.gather(nnodes=3), job.join(node("mn1", 1))
    job.until("waiting to begin: 127.0.0.1:")
    job.until("waits for other nodes")
    clock.late_s = LONG_S
    assert str(joiner.exception(LONG_S)).endswith("waits for other nodes")
    clock.late_s = 0.0
    for name in ("mn1", "mn2"):
        job.join(node(name), timeout_s=None)
    controller.result(LONG_S)


def test_what_follows_begin_at_once_is_not_lost(job):
    joiner = job.join(node("mn1", 1))
    connection, _ = met_by_hand(job)
    nodes = tuple(NodeFacts(rank, f"mn{rank}", "127.0.0.1", 2, 1) for rank in range(2))
    more = bytes_of(Order({"kind": "Sweep", "reason": "why"}))
    begin = bytes_of(Admitted(1, "")) + bytes_of(Begin(nodes, {}))
    connection.sendall(begin + more + more[:7])
    line = joiner.result(LONG_S).line
    loop, orders = asyncio.new_event_loop(), []
    link = NodeLink(line)

    def hear(message):
        orders.append(message)
        if len(orders) == 2:
            loop.stop()

    link.attach(loop, hear, lambda _: loop.stop())
    connection.sendall(more[7:])
    loop.run_forever()
    loop.close()
    link.close()
    assert [each.action["kind"] for each in orders] == ["Sweep", "Sweep"]


def test_settings_that_no_socket_takes_at_once_arrive(job):
    settings = {"text": os.urandom(6 << 20).hex()}  # it cannot be compressed to less than half
    controller, other = job.gather(nnodes=2, settings=settings), job.join(node("mn1", 1))
    line = controller.result(LONG_S).lines[1]
    assert line.unsent  # so the test sees to what it is about
    loop = asyncio.new_event_loop()
    link = NodeLink(line)
    link.attach(loop, lambda _: None, lambda _: None)
    joined = loop.run_until_complete(asyncio.wrap_future(other, loop=loop))
    assert joined.settings == settings
    link.close()
    loop.close()


def test_a_guest_that_fills_memory_is_a_stranger(job):
    controller = job.gather(nnodes=2)
    connection = job.connect(PREAMBLE)
    size = guest.STRANGER_BYTES + 1
    connection.sendall(size.to_bytes(4, "big"))
    reader = FrameReader(message_of)
    assert isinstance(heard(connection, reader), Challenge)
    assert is_closed(connection)
    job.join(node("mn1", 1))
    controller.result(LONG_S)
