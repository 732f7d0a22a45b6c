"""Memory of real processes that were killed with SIGKILL: what of it is whole, and what is refused."""

import hashlib
import json
import os
import random
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.jobs import poll
from support.kept_process import killed, process

from agent.kept import kept_ranks
from agent.kept.kept_rank import KeptRank
from agent.kept.kept_ranks import KeptRanks
from worker_hooks.contract import status_page
from worker_hooks.contract.process_stat import name_of, read_stat
from worker_hooks.contract.status_page import Page
from worker_hooks.kept.keeper import start_keeper
from worker_hooks.machine import kept_memory
from worker_hooks.recovery.left_state import left_steps, write_left

WALL = 0x40000000  # __WALL: children whose end signals nothing, too


def left(memory):
    """Step, file and digest of what is whole, the newest first."""
    found = []
    for state in memory.states():
        content, taken = hashlib.sha256(), []
        digest = memory.checksum(state, taken.append)
        assert taken.pop(0) == state.head
        for piece in taken:
            content.update(piece)
        assert state.nbytes == len(state.head) + sum(map(len, taken))
        found.append([state.step, [content.hexdigest(), json.loads(state.head[8:]), digest]])
    return found


@pytest.mark.parametrize("name", ["nothing", "meter"])
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_left_is_the_file_that_the_rank_would_have_written(warm_python, name, copies):
    with killed(warm_python, name, copies=copies) as rank:
        assert left(rank.memory)[0] == rank.told


def test_copies_of_the_commit_before_are_whole_as_well(warm_python):
    with killed(warm_python, "train_on", copies=True) as rank:
        assert [step for step, _ in left(rank.memory)] == [4, 3]
        assert left(rank.memory)[1] == rank.told


KEPT_THROUGH = [
    "fork_and_write",
    "load_in_processes",
    "drop_moments",
    "add_parameter",
    "train_more",
    "grow_and_train",
    "use_large_pages",
    "share_weights",
    "limit",
]


@pytest.mark.parametrize("name", KEPT_THROUGH)
def test_what_a_script_does_beside_leaves_the_commit_as_it_was(warm_python, name):
    with killed(warm_python, name) as rank:
        assert left(rank.memory)[0] == rank.told


CHANGES = [
    "tear",
    "exchange_weights",
    "replace_memory",
    "change_optimizer",
    "update",
    "free_weights",
    "grow",
]


@pytest.mark.parametrize("change", CHANGES)
def test_live_memory_that_is_not_as_of_the_commit_is_refused_and_copies_are(warm_python, change):
    with killed(warm_python, change) as rank:
        assert left(rank.memory) == []
    with killed(warm_python, change, copies=True) as rank:
        assert left(rank.memory)[0] == rank.told


@pytest.mark.parametrize("name", ["distrust", "give_up", "free", "go_back"])
def test_what_nobody_may_save_or_has_any_more_is_not_read(warm_python, name):
    for copies in (False, True):
        with killed(warm_python, name, copies=copies) as rank:
            assert left(rank.memory) == []


def test_copies_are_read_where_live_memory_must_not_be(warm_python):
    with killed(warm_python, "hold_only") as rank:
        assert left(rank.memory) == []
    with killed(warm_python, "hold_only", copies=True) as rank:
        assert [step for step, _ in left(rank.memory)] == [5, 4]


def test_elements_in_another_order_are_not_read_and_that_is_said_once(warm_python):
    with killed(warm_python, "turn_weights") as rank:
        assert left(rank.memory) == []
        (said,) = rank.told
        assert "model.0.weight is not in the order of its elements" in said


def test_copies_that_are_being_overwritten_count_for_nothing(warm_python):
    with killed(warm_python, "overwrite", copies=True) as rank:
        assert [step for step, _ in left(rank.memory)] == [3]


def test_there_is_no_moment_in_which_what_a_page_says_is_not_to_be_found(warm_python):
    """Where the state is not copied, a step is whole or was never committed."""
    with killed(warm_python, "commit_by_lines", copies=True) as rank:
        assert rank.told == [[3, 3], [3, 3, 2], [4, 4, 3]]
    with killed(warm_python, "commit_by_lines") as rank:
        assert rank.told == [[3], [4, 4]]


def test_what_notes_cost_is_told_behind_the_first_steps(warm_python):
    with killed(warm_python, "measure") as rank:
        ((cost_s, step_s),) = rank.told
        assert 0 < cost_s < step_s


@pytest.mark.parametrize("copies", [False, True])
def test_who_is_to_note_no_more_ends_its_keeper(warm_python, copies):
    with process(warm_python, "note_no_more", copies=copies) as (_, (_, keeper, _, told)):
        assert told == "nothing is left"
        assert not Path(f"/proc/{keeper}").exists()


def test_nothing_is_kept_once_it_was_given_up_until_all_ranks_are_gone():
    agent = subprocess.Popen(["sleep", "60"])
    first, second = start_keeper(agent.pid), start_keeper(agent.pid)
    ranks = KeptRanks()
    ranks.keep(0, first, 4096)
    assert (ranks.keepers, ranks.why_over) == ({first}, "")
    ranks.give_up("it is too dear")
    assert (ranks.keepers, ranks.why_over, ranks.steps(0)) == (set(), "it is too dear", ())
    assert os.waitpid(first, WALL)[1] == signal.SIGKILL
    ranks.close()
    assert ranks.why_over == ""
    agent.kill()
    agent.wait()
    assert os.waitpid(second, WALL) == (second, 0)


@pytest.fixture
def two_keepers():
    """Keepers of two ranks of an agent, and who knows them."""
    agent, ranks = subprocess.Popen(["sleep", "60"]), KeptRanks()
    keepers = [start_keeper(agent.pid) for _ in range(2)]
    for rank, keeper in enumerate(keepers):
        ranks.keep(rank, keeper, 4096)
    yield ranks, *keepers
    ranks.close()
    agent.kill()
    agent.wait()
    for keeper in keepers:
        with suppress(ChildProcessError):  # the test has waited for it
            os.waitpid(keeper, WALL)


def is_there(keeper):
    """Whether nobody has killed it; who is killed is waited for."""
    return keeper not in {pid for pid, _ in [os.waitpid(keeper, WALL | os.WNOHANG)]}


def killed_by_now(keeper):
    return os.waitpid(keeper, WALL) == (keeper, signal.SIGKILL)


@pytest.mark.parametrize("ends", ["they train", "another dies", "all are gone"])
def test_what_a_replaced_rank_left_is_freed_behind_its_replacement(two_keepers, monkeypatch, ends):
    ranks, first, second = two_keepers
    monkeypatch.setattr(kept_ranks, "free_bytes", lambda: 1 << 60)
    assert ranks.steps(0) == ()
    ranks.replace([0, 7])
    assert ranks.held_nbytes() == 0
    assert is_there(first)
    assert ranks.keepers == {first, second}  # all of them end with the attempt
    another = start_keeper(os.getpid())
    ranks.keep(0, another, 4096)  # the new rank's; that of the dead one is not mistaken for it
    assert is_there(first)
    {"they train": ranks.free_replaced, "another dies": lambda: ranks.steps(1)}.get(
        ends, ranks.close
    )()
    assert killed_by_now(first)
    assert ranks.keepers == (set() if ends == "all are gone" else {another, second})
    ranks.close()
    assert killed_by_now(second)
    assert killed_by_now(another)


@pytest.mark.parametrize("free", [None, 0, 7_999])
def test_it_is_freed_at_once_where_memory_is_short(two_keepers, monkeypatch, free):
    ranks, first, second = two_keepers
    monkeypatch.setattr(kept_ranks, "free_bytes", lambda: free)
    monkeypatch.setattr(KeptRank, "nbytes", lambda _: 4_000)
    ranks.steps(0)
    ranks.replace([0])
    assert ranks.keepers == {second}
    assert killed_by_now(first)


def test_a_state_that_moves_to_an_accelerator_is_not_read(warm_python):
    with killed(warm_python, "use_accelerator", copies=True) as rank:
        assert [step for step, _ in left(rank.memory)] == [2]


def test_a_core_dump_of_a_rank_leaves_no_keeper(warm_python, tmp_path):
    """Who crashes is not read. Some kernels end its keeper themselves, as it dumps their memory."""
    with process(warm_python, "crash", folder=tmp_path) as (running, (pid, keeper, board, _)):
        memory, files = KeptRank(keeper, board), [os.pidfd_open(each) for each in (pid, keeper)]
        running.stdin.write("\n")
        running.stdin.flush()
        assert select.select(files[:1], [], [], 60)[0]
        memory.close()
        assert select.select(files[1:], [], [], 60)[0]
    for file in files:
        os.close(file)


def test_what_a_dead_rank_takes_is_known_until_it_is_freed(warm_python):
    with killed(warm_python, "use_large_pages") as rank:
        assert 4 << 20 < rank.memory.nbytes() < 4 << 30
    assert select.select([rank.memory._process], [], [], 20)[0]
    assert rank.memory.nbytes() == 0


def test_once_the_keeper_is_killed_there_is_nothing(warm_python):
    with killed(warm_python, "nothing", copies=True) as rank:
        watched = os.pidfd_open(rank.keeper)
        os.kill(rank.keeper, signal.SIGKILL)
        assert select.select([watched], [], [], 20)[0]
        os.close(watched)
        assert rank.memory.states() == []


def test_a_map_that_was_cut_short_counts_for_nothing(warm_python):
    """Whatever a dying process left there."""
    with killed(warm_python, "nothing", copies=True) as rank:
        memory, board_at = rank.memory._memory, rank.memory._board
        board = kept_memory.read_board(os.pread(memory, kept_memory.BOARD_BYTES, board_at))
        fronts = [os.pread(memory, kept_memory.FRONT_BYTES, at) for at in board.maps]
        behind = [at + kept_memory.FRONT_BYTES for at in board.maps]
        pairs = zip(behind, map(kept_memory.front, fronts), strict=True)
        maps = [(os.pread(memory, size, at), checksum) for at, (size, checksum) in pairs]
    dice = random.Random(7)
    for text, checksum in maps:
        assert kept_memory.decode(text).head
        for _ in range(300):
            cut = bytearray(text[: dice.randrange(len(text))] if dice.random() < 0.3 else text)
            for _ in range(dice.randrange(3) if cut else 0):
                cut[dice.randrange(len(cut))] = dice.randrange(256)
            assert bytes(cut) == text or not kept_memory.is_sound(bytes(cut), checksum)


def test_who_ends_by_itself_ends_its_keeper(warm_python):
    with process(warm_python, "end") as (running, (_, keeper, _, _)):
        watched = os.pidfd_open(keeper)
        running.stdin.write("\n")
        running.stdin.flush()
        assert select.select([watched], [], [], 60)[0]
        os.close(watched)


def test_a_keeper_holds_memory_and_its_agents_process_and_goes_by_no_signal(warm_python):
    with killed(warm_python, "wait_for_children") as rank:
        assert rank.told == "there are none"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(rank.keeper, number)
        folder = Path(f"/proc/{rank.keeper}")
        files = [os.readlink(each) for each in (folder / "fd").iterdir()]
        assert files == ["anon_inode:[pidfd]"]
        poll(lambda: (folder / "comm").read_text() == "msrun-keeper\n")
        assert os.getsid(rank.keeper) == rank.keeper
        assert read_stat(rank.keeper).state == "S"


@pytest.mark.parametrize("count", [1, 2])
def test_a_keeper_ends_with_its_agent_and_the_forkserver(count):
    """If all of msrun is killed together with a rank, nobody would free the memory."""
    readers = [subprocess.Popen(["sleep", "60"]) for _ in range(count)]
    keeper = start_keeper(*(each.pid for each in readers))
    watched = os.pidfd_open(keeper)
    for number, each in enumerate(readers, 1):
        each.kill()
        each.wait()
        if number < count:
            poll(lambda: read_stat(keeper).state == "S")
            assert not select.select([watched], [], [], 0.1)[0]
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)
    assert os.waitpid(keeper, WALL) == (keeper, 0)


@pytest.mark.parametrize("is_early", [True, False])
def test_the_forkserver_may_end_first(is_early):
    agent, forkserver = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    if is_early:
        forkserver.kill()
        forkserver.wait()
    keeper = start_keeper(agent.pid, forkserver.pid)
    watched = os.pidfd_open(keeper)
    if not is_early:
        forkserver.kill()
        forkserver.wait()
    assert not select.select([watched], [], [], 0.1)[0]
    agent.kill()
    agent.wait()
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)
    os.waitpid(keeper, WALL)


def test_peers_write_what_it_would_have_written(warm_python, tmp_path):
    """Those whose msrun is killed, too: they know its page, which says who keeps its memory."""
    with killed(warm_python, "nothing") as rank:
        step, (content, fields, digest) = rank.told
        fd = status_page.create(3, 0, ())
        page = Page(fd)
        os.close(fd)
        page.note_keeper(rank.keeper, rank.memory._board)
        poll(lambda: name_of(rank.keeper) == kept_memory.KEEPER)  # it may not have run yet
        assert left_steps({3: page}) == {3: (step,)}
        with pytest.raises(OSError, match="the memory of rank 3 does not hold step 77 any more"):
            write_left(page, 77, tmp_path, "rank_3/a", lambda _: None)
        note = write_left(page, step, tmp_path, "rank_3/a", lambda _: None)
        octets = (tmp_path / "rank_3/a").read_bytes()
        length = 8 + int.from_bytes(octets[:8], "little")
        assert hashlib.sha256(octets[length:]).hexdigest() == content
        assert json.loads(octets[8:length]) == fields
        assert (note.step, note.digest, note.written["rank"]) == (step, digest, 3)
        assert note.written["sha256"] == hashlib.sha256(octets).hexdigest()
    assert select.select([rank.memory._process], [], [], 20)[0]
    assert left_steps({3: page}) == {3: ()}
    page.note_keeper(os.getpid(), 1)  # the number is another process's by now
    assert left_steps({3: page}) == {3: ()}
