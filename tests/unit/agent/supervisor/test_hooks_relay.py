"""What ranks say on a node without the controller: it is handed on, with the page it speaks of."""

import os
from pathlib import Path
from time import monotonic_ns

import pytest
from support.jobs import poll
from support.relayed_node import RANKS, RelayedNode
from support.status_pages import ENTRIES, make, write

from agent.controller import actions as do
from agent.dump.node_copies import UNKNOWN
from agent.hooks import node_clearance
from agent.hooks.status_pages import StatusPages
from agent.machine.process_use import ProcessNews
from agent.nodes.run_messages import (
    Beats,
    CopyWritten,
    FromRank,
    PageNews,
    PageSeen,
    PagesKept,
    PagesTold,
    RankUnlinked,
    ToRank,
    ToRanks,
    UpdatesCleared,
    UpdatesReady,
    WordKept,
    WriteCopy,
    pack_said,
    unpack_said,
)
from agent.supervisor import hooks_relay as module
from msrun.top.status_pages import OpenPages
from worker_hooks.contract import protocol, wire
from worker_hooks.contract import status_page as page_module
from worker_hooks.contract.clearance_board import ClearanceBoard
from worker_hooks.contract.packed_page import packed
from worker_hooks.contract.status_page import Page, Phase
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, Shard
from worker_hooks.storage.private_records import record


@pytest.fixture
def node():
    node = RelayedNode()
    yield node
    node.close()


def in_memory(rank):
    """The manifest of a copy, of which it is not said where it is."""
    about = {"step": 7, "epoch": 0, "batch": 7, "world_size": 6, "attempt": 0}
    shards = [Shard("elsewhere", rank, PRIVATE, 5, "")]
    return manifests.Manifest(
        MEMORY_KIND, **about, record_id="r", reason="why", shards=tuple(shards), digest="d"
    ).completed()


def mirrored(said):
    """The pages that travelled, as the controller's node keeps them."""
    pages = StatusPages()
    for each in said:
        match each:
            case PageSeen():
                pages.keep_copy(*each.read())
            case PageNews():
                pages.mirror_news(*each.read())
    return pages


def test_a_greeting_is_handed_on_after_the_start_and_its_exit_file_is_watched_here(node):
    node.rank(5, "/j/exit.json")
    (told,) = node.said
    assert isinstance(told, FromRank)
    assert unpack_said(told.message).rank == 5
    assert node.order == ["announce", "/j/exit.json", "FromRank"]


def test_a_registration_takes_the_page_along(node):
    _, page = node.registered()
    *_, seen, told = node.said
    assert [type(each) for each in node.said] == [FromRank, PageSeen, FromRank]
    assert unpack_said(told.message) == protocol.Registered(4, 0, 6)
    assert mirrored([seen]).newest_step(4) == 6
    del page


def test_a_run_that_is_over_holds_no_page(node):
    """`msrun top` finds pages by the descriptors of msrun, which may go on with another run."""
    _, page = node.registered()
    del page
    assert OpenPages(os.getpid()).look().keys() == {4}
    node.relay.forget_pages()
    assert OpenPages(os.getpid()).look() == {}


def test_an_answer_takes_the_page_along_as_it_is_now(node):
    client, page = node.registered()
    write(page, 7, 7)
    page.beat(7, 2, 70, Phase.BACKWARD)
    frozen = protocol.Frozen(4, 0, 1, 7, is_whole=True, why="")
    node.say(client, frozen)
    news, told = node.said[-2:]
    assert unpack_said(told.message) == frozen
    assert len(str(news)) < 2000  # not all of it
    there = mirrored(node.said)
    assert there.newest_step(4) == 7
    assert record(there.all()[4], 7) == record(page, 7)
    assert there.beats([4])[4][:3] == page.heartbeat()[:3]
    count = len(node.said)
    node.say(client, protocol.Raised(4, 0, "ValueError: bad"))
    assert len(node.said) == count + 1
    del page, there


@pytest.mark.parametrize("ranks", [(), RANKS, (5,)])
def test_what_is_for_all_ranks_of_the_node_names_none(node, ranks):
    clients = dict(zip(RANKS, map(node.rank, RANKS), strict=True))
    node.relay.hear(ToRanks(ranks, pack_said(protocol.GoOn(0))))
    for rank, client in clients.items():
        node.relay.hear(ToRank(rank, pack_said(protocol.Release("go"))))
        first, _ = wire.receive(client)
        assert isinstance(first, protocol.GoOn if rank in (ranks or RANKS) else protocol.Release)


def test_a_rank_that_reads_the_state_gets_the_answer_of_this_node(node):
    """The controller's hears nothing of it."""
    client, count, waiting = node.rank(), len(node.said), []
    node.relay.bring_memory = lambda *about: waiting.append(about)
    node.say(client, protocol.BringMemory(4, 0, 77, [2]))
    ((inode, variants, done),) = waiting
    assert variants == [2]
    done("no room", (1, 2))
    node.turn()
    assert wire.receive(client)[0] == protocol.MemoryBrought(inode, "no room", [1, 2])
    assert len(node.said) == count
    node.say(client, protocol.BringMemory(4, 0, 77))
    node.relay.renew(do.ReplaceRanks(1, (5,), (4,), "/proc/7/fd/8", 6, "why"), 0)
    new = node.rank(attempt=1)
    waiting[-1][-1]("", ())  # to the one that has died meanwhile
    node.relay.tell(4, protocol.Welcome(""))
    assert isinstance(wire.receive(new)[0], protocol.Welcome)


def test_a_copy_goes_to_files_here_and_what_cannot_be_true_of_it_ends_the_line(node):
    client, page = node.registered()
    order = protocol.Copy(7, "", "", 0, 2, files=3)
    node.relay.hear(ToRank(4, pack_said(order)))
    node.turn()
    told, _ = wire.receive(client)
    assert told._replace(state="", private="") == order
    Path(told.state).write_bytes(b"state")
    answer = protocol.Copied(4, 0, 7, 5, 0, "d", files=3)
    node.say(client, answer)
    assert unpack_said(node.said[-1].message) == answer
    node.say(client, answer._replace(nbytes=6))
    assert node.said[-1] == RankUnlinked(4, 0)
    assert node.journal[-1][1]["why"] == "it copied 5 bytes and says 6"
    del page


def test_a_node_that_has_no_such_copy_says_so(node):
    text = manifests.encode(in_memory(4)).decode()
    node.relay.hear(WriteCopy(9, 3, text, "/nowhere"))
    assert node.said == [CopyWritten(9, "/nowhere", why_not=UNKNOWN)]


def test_a_registration_without_its_page_is_none(node):
    client = node.rank()
    node.say(client, protocol.Registered(4, 0, 6))
    assert node.said[1:] == [RankUnlinked(4, 0)]
    assert node.journal[0][0] == "LinkRefused"


def test_the_page_of_a_dead_rank_is_shown_after_its_last_words(node):
    client, page = node.registered()
    write(page, 7, 7)
    wire.send(client, protocol.Raised(4, 0, "ValueError: bad"))
    assert node.relay.hear_out(4) is None  # what it committed is read from the page, elsewhere
    words, seen = node.said[-2:]
    assert unpack_said(words.message).error == "ValueError: bad"
    assert (type(seen), *seen.read()[:2]) == (PageNews, 4, 0)
    assert mirrored(node.said).newest_step(4) == 7
    del page


def test_before_a_freeze_the_controllers_node_sees_how_far_the_rank_is(node):
    client, page = node.registered()
    write(page, 7, 7)
    count = len(node.said)
    node.relay.tell(4, protocol.Freeze(1, 1.0))
    assert [type(each) for each in node.said[count:]] == [PageNews]
    assert mirrored(node.said).newest_step(4) == 7
    assert wire.receive(client)[0] == protocol.Freeze(1, 1.0)
    node.relay.tell(4, protocol.Release("go"))
    assert len(node.said) == count + 1
    del page


def test_who_is_asked_where_it_stands_is_looked_at_before_it_answers(node):
    client, page = node.registered()
    node.said.clear()
    for inspection in (1, 1, 2):
        node.relay.tell(4, protocol.Inspect(inspection))
    told = [each for each in node.said if isinstance(each, Beats)]
    assert len(told) == 2
    assert sorted(told[0].read()[2]) == [4, 5]
    assert [each.read()[3] for each in told] == [1, 2]
    assert wire.receive(client)[0] == protocol.Inspect(1)
    del page


def test_a_page_that_a_device_writes_is_shown_as_a_whole(node):
    client = node.rank()
    fd = page_module.create(4, 0, ENTRIES, device_bytes=8)
    page = Page(fd)
    node.say(client, protocol.Registered(4, 0, 0), [fd])
    os.close(fd)
    node.relay.tell_beats()
    page.write_device(7, 1, b"12345678", is_commit=True)  # the rank itself does not move
    node.relay.tell_beats()
    assert isinstance(node.said[-2], PageSeen)
    assert mirrored(node.said).all()[4].device_part(7, is_commit=True) == b"12345678"
    page.close()


def test_a_page_that_fits_no_frame_is_not_shown(node, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHOWN", 100)
    _, page = node.registered()
    said, registered = node.said[1:]  # once
    assert unpack_said(said.message).text.startswith("what rank 4 alone holds")
    assert unpack_said(registered.message) == protocol.Registered(4, 0, 6)
    node.said.clear()
    node.relay.tell_beats()
    page.beat(9, 1, 4, Phase.DATA)
    node.relay.tell_beats()
    assert {type(each) for each in node.said} == {Beats}
    del page


def test_beats_that_changed_are_told_with_their_pages_and_what_each_process_does(node):
    pages = [node.registered(rank)[1] for rank in RANKS]
    node.workers[5].exit_code = 0
    node.said.clear()
    node.relay.tell_beats()
    *seen, told = node.said
    assert [type(each) for each in seen] == [PageNews, PageNews]
    now_ns, beats, processes, _ = told.read()
    assert sorted(beats) == [4, 5]
    assert list(processes) == [4]
    assert ProcessNews.unpacked(processes[4]).state in "RS"
    assert 0 <= monotonic_ns() - now_ns < 10**10
    pages[1].enter(Phase.BACKWARD)
    node.said.clear()
    node.relay.tell_beats()
    assert [list(each.read()[1]) for each in node.said if isinstance(each, Beats)] == [[5]]
    assert len(node.said) == 2  # and the page
    assert node.relay.is_needed
    node.relay.end_attempt()
    node.workers.clear()
    node.said.clear()
    node.relay.tell_beats()
    assert (node.said, node.relay.is_needed) == ([], False)
    del pages


@pytest.mark.parametrize(("code", "told"), [(None, [RankUnlinked(4, 0)]), (1, [])])
def test_a_rank_that_closes_its_link_is_unlinked_unless_it_is_dead(node, code, told):
    client = node.rank()
    node.workers[4].exit_code = code
    node.said.clear()
    client.close()
    node.turn()
    assert node.said == told
    assert "settle" in node.order


def test_without_the_controller_ranks_that_train_save_and_no_other_one_waits(node):
    trains, page = node.registered(4)
    starts = node.rank(5)
    assert node.relay.forsake("node 0 is gone", is_proven=True, memory="/proc/7/fd/8") == (4,)
    assert wire.receive(trains)[0] == protocol.SaveAlone("node 0 is gone", True, "/proc/7/fd/8")
    assert wire.receive(starts)[0] == protocol.Release("node 0 is gone")
    del page


def test_without_the_controller_nobody_saves_where_that_is_switched_off(node):
    trains, page = node.registered(4)
    node.relay._may_save = False
    assert node.relay.forsake("node 0 is gone", is_proven=False) == ()
    assert wire.receive(trains)[0] == protocol.Release("node 0 is gone")
    del page


# --- without a scheduler --------------------------------------------------------------------------


def test_another_controller_hears_what_ranks_have_said_that_is_true(node):
    client, page = node.registered()
    node.relay.hear(ToRank(4, pack_said(protocol.Welcome(""))))
    first = protocol.Fingerprinted(4, 0, 1, {"a": "b"})
    node.say(client, first)
    node.say(client, protocol.Progress(4, 0, 1, 10))
    fd, page = make(4)  # it registers once more, as its state has got another structure
    write(page, 8, 8)
    node.say(client, protocol.Registered(4, 0, 8), [fd])
    os.close(fd)
    node.relay.be_alone(lambda _: None)
    second = protocol.Fingerprinted(4, 0, 9, {"a": "c"}, is_late=True)
    node.say(client, second)
    write(page, 9, 9)
    node.said.clear()
    node.relay.be_alone(None)
    node.relay.say_again()
    told = [each for each in node.said if isinstance(each, FromRank)]
    hello, one, registered, two = [unpack_said(each.message) for each in told]
    assert (hello.rank, hello.wants_resume) == (4, False)
    assert (one, two) == (first, second)
    assert registered.step == 8
    assert record(mirrored(node.said).all()[4], 9).step == 9
    got, _ = wire.receive(client)
    assert isinstance(got, protocol.Welcome)
    node.relay.hear(ToRank(4, pack_said(protocol.Welcome(""))))  # the answer to that Hello
    node.relay.hear(ToRank(4, pack_said(protocol.Release("go"))))
    assert wire.receive(client)[0] == protocol.Release("go")


def test_another_node_is_about_to_decide(node):
    """Who has raised waits for it; what it says before it knows all counts for nothing."""
    client, _ = node.registered()
    disturbed, lost = [], protocol.Hello(0, 0, 9, "/c", wants_resume=False)
    node.relay.hear(WordKept(pack_said(lost)))
    node.relay.be_alone(disturbed.append, briefly=True)
    node.say(client, raised := protocol.Raised(4, 0, "connection reset by peer"))
    node.relay.be_alone(None)
    node.said.clear()
    node.relay.say_again()
    told = [unpack_said(each.message) for each in node.said if isinstance(each, FromRank)]
    assert (disturbed, told[0], told[-1]) == ([], lost, raised)
    node.relay.hear(ToRank(4, pack_said(protocol.Replicated("nobody knows what they share"))))
    node.relay.meets_at = "10.0.0.2"
    node.relay.hear(ToRank(4, pack_said(protocol.Rejoin(1, "/m", "rank 0", 4712))))
    assert wire.receive(client)[0] == protocol.Rejoin(1, "/m", "rank 0", 4712, "10.0.0.2")


@pytest.mark.parametrize(
    ("message", "disturbs", "answer"),
    [
        (protocol.Hello(4, 0, 7, "", False), True, None),
        (protocol.Raised(4, 0, "broken"), True, None),
        (protocol.ExitRequested(4, 0, "SIGTERM"), True, None),
        (protocol.Leaving(4, 0), False, protocol.Release("the script has ended")),
        (protocol.Progress(4, 0, 1, 10), False, None),
    ],
)
def test_what_ranks_say_while_no_controller_is_there(node, message, disturbs, answer):
    client, _ = node.registered()
    heard = []
    node.relay.be_alone(heard.append)
    node.said.clear()
    node.say(client, message)
    assert heard == [message] * disturbs
    assert [each for each in node.said if isinstance(each, FromRank)] == []
    if answer is not None:
        assert wire.receive(client)[0] == answer


def test_ranks_that_wait_for_an_order_are_known(node):
    node.registered()
    assert not node.relay.are_calm  # its Hello is not answered yet
    node.relay.hear(ToRank(4, pack_said(protocol.Welcome(""))))
    assert node.relay.are_calm
    for order, release in (
        (protocol.Freeze(1, 1.0), protocol.GoOn(1)),
        (protocol.Hold(1), protocol.Proceed(1, 5)),
        (protocol.Rejoin(0, "", "", 0), protocol.GoOn(1)),
    ):
        node.relay.hear(ToRank(4, pack_said(order)))
        assert not node.relay.are_calm
        node.relay.hear(ToRank(4, pack_said(release)))
        assert node.relay.are_calm


def test_what_a_dead_rank_alone_had_is_left_to_others(node, tmp_path):
    client = node.rank()
    node.say(client, protocol.Hello(4, 0, os.getpid(), str(tmp_path), False))
    fd, page = make(4)
    write(page, 6, 6)
    node.say(client, protocol.Registered(4, 0, 6), [fd])
    os.close(fd)
    (folder,) = node.relay.notes_folders()
    node.relay.leave_pages((4, 5))  # rank 5 has none
    poll(lambda: node.turn() or (folder / "page_4").exists())
    assert (folder / "page_4").read_bytes() == page.content()
    assert [path.name for path in folder.iterdir()] == ["page_4"]


@pytest.mark.parametrize("is_last", [False, True])
def test_what_ranks_of_node_0_alone_had_is_left_by_a_node_without_ranks(node, tmp_path, is_last):
    """Ranks of this node would; these of node 0 may live, so their copies are told apart."""
    node.say(node.rank(), protocol.Hello(4, 0, os.getpid(), str(tmp_path), False))
    fd, page = make(0)
    write(page, 6, 6)
    node.relay.hear(PageSeen.of(0, 0, packed(page)))
    os.close(fd)
    (folder,) = node.relay.notes_folders()
    node.relay.leave_pages((), is_last=is_last)
    node.relay._files.close(5.0)
    assert [*folder.glob("*")] == [folder / "copy_0"] * is_last


@pytest.mark.parametrize("is_there", [False, True])
def test_others_may_not_know_yet_that_a_rank_is_replaced(node, tmp_path, is_there):
    node.say(client := node.rank(), protocol.Hello(4, 0, os.getpid(), str(tmp_path), False))
    fd, page = make(4)
    write(page, 6, 6)
    node.say(client, protocol.Registered(4, 0, 6), [fd])
    os.close(fd)
    client.close()
    node.turn()
    node.relay.renew(do.ReplaceRanks(1, (5,), (4,), "/proc/7/fd/8", 6, "why"), 0)
    if is_there:
        fd, _ = make(4, 1)
        client = node.rank(4, attempt=1)
        node.say(client, protocol.Registered(4, 1, 6), [fd])
        os.close(fd)
    node.relay.leave_pages(())
    node.relay._files.close(5.0)
    (folder,) = node.relay.notes_folders()
    assert folder.exists() is not is_there
    assert is_there or (folder / "page_4").read_bytes() == page.content()


def test_a_late_page_is_left_where_ranks_still_look(node, tmp_path):
    node.say(client := node.rank(), protocol.Hello(4, 0, os.getpid(), str(tmp_path), False))
    fd, page = make(4)
    node.say(client, protocol.Registered(4, 0, 6), [fd])
    os.close(fd)
    (folder,) = node.relay.notes_folders()
    node.relay.leave_pages((4,), is_late=True)
    node.relay._files.close(5.0)
    assert not folder.exists()
    folder.mkdir()
    node.relay.leave_pages((4,), is_late=True)
    node.relay._files.close(5.0)
    assert (folder / "page_4").read_bytes() == page.content()


@pytest.mark.parametrize(
    ("message", "is_calm"),
    [
        (protocol.Raised(4, 0, "broken"), False),
        (protocol.ExitRequested(4, 0, "SIGTERM"), False),
        (protocol.Leaving(4, 0), True),
    ],
)
def test_what_waited_for_the_controller_as_it_ended(node, message, is_calm):
    client, _ = node.registered()
    node.relay.hear(ToRank(4, pack_said(protocol.Welcome(""))))
    assert isinstance(wire.receive(client)[0], protocol.Welcome)
    assert node.relay.are_in_script
    node.say(client, message)
    assert node.relay.are_calm is is_calm
    assert node.relay.are_in_script is not is_calm
    node.relay.be_alone(lambda _: None)
    assert wire.receive(client)[0] == protocol.Release("the script has ended")


def test_whether_a_rank_is_in_a_step_is_seen_on_its_page(node):
    _, page = node.registered()
    page.beat(6, 1, 4, Phase.IDLE)
    assert not node.relay.are_in_a_step
    page.beat(6, 1, 4, Phase.FORWARD)
    assert node.relay.are_in_a_step


def test_what_an_attempt_has_resumed_from_is_known(node):
    node.relay.begin(1, "/saved/step_5")
    assert node.relay.resume == "/saved/step_5"
    node.rank()
    for path in ("/saved/step_9", "/proc/7/fd/5"):  # found as the script asked; of a replacement
        node.relay.hear(ToRank(4, pack_said(protocol.Welcome(path))))
        assert node.relay.resume == "/saved/step_9"
        node.relay._greeted.clear()


def test_a_node_is_ready_for_an_update_behind_the_pages_of_all_its_ranks(node):
    """What they alone hold is on the controller's node by then."""
    (one, page), (two, other) = node.registered(4), node.registered(5)
    node.said.clear()
    write(page, 7, 7)
    write(other, 7, 7)
    node.say(one, protocol.PageWritten(4, 0, ready=7))
    node.say(two, protocol.PageWritten(5, 0))  # it accumulates gradients
    assert [type(each) for each in node.said] == [PageNews, PageNews]
    node.say(two, protocol.PageWritten(5, 0, ready=7))
    assert node.said[-1] == UpdatesReady(0, 7)
    del page, other


def test_a_node_whose_ranks_wait_asks_and_doubts_its_line(node, monkeypatch):
    monkeypatch.setattr(node_clearance, "LOOK_S", 0.0)
    node.relay.watch(lambda: True)
    (client, page), two = node.registered(4), node.rank(5)
    order = protocol.OpenVote(is_over_nodes=True, is_cut=False)
    node.relay.hear(ToRank(4, pack_said(order)))
    _, fds = wire.receive(client)
    board = ClearanceBoard(*fds)
    os.close(*fds)
    node.relay.hear(UpdatesCleared(0, 9, 0, 8))
    board.wait_for(9)
    for each, rank in ((client, 4), (two, 5)):
        node.say(each, protocol.PageWritten(rank, 0, ready=9))
    node.turn()
    assert board.doubt_s == 13 * 10  # times --node-timeout
    assert node.said[-2:] == [UpdatesReady(0, 9)] * 2
    node.relay.hear(UpdatesCleared(0, 9, 0, 9))
    node.turn()
    node.said.clear()
    node.turn()
    assert (node.said, board.doubt_s) == ([], 0)
    board.close()
    del page


def test_ranks_wait_for_what_the_controllers_node_clears(node):
    client, page = node.registered()
    order = protocol.OpenVote(is_over_nodes=True, is_cut=False)
    node.relay.hear(ToRank(4, pack_said(order)))
    got, fds = wire.receive(client)
    assert got == order
    board = ClearanceBoard(*fds)
    os.close(*fds)
    node.relay.hear(UpdatesCleared(0, 9, 0, 8))
    assert (board.is_needed(9), board.is_cleared(8), board.is_cleared(9)) == (True, True, False)
    node.relay.hear(UpdatesCleared(1, 9, 0, 9))  # of an attempt that is over, or begins
    assert not board.is_cleared(9)
    node.relay.be_alone(lambda _: None)
    assert not board.is_needed(9)
    board.close()
    del page


def test_a_board_waits_until_the_kernel_takes_its_descriptor(node, monkeypatch):
    client, page = node.registered()
    monkeypatch.setattr(module, "RESEND_S", 0.0)
    send, tries = node.relay._links.send, []
    monkeypatch.setattr(
        node.relay._links,
        "send",
        lambda rank, message, fds=(): (
            tries.append(0) or (len(tries) > 2 and send(rank, message, fds))
        ),
    )
    node.relay.hear(ToRank(4, pack_said(protocol.OpenVote(is_over_nodes=True))))
    node.turn(8)
    got, fds = wire.receive(client)
    os.close(*fds)
    assert (type(got), len(tries)) == (protocol.OpenVote, 3)
    del page


def test_copies_are_confirmed(node):
    node.relay.hear(PagesTold(3, 41))
    assert node.said == [PagesKept(3, 41)]
