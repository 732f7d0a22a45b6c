"""A checkpoint comes to a node that has it not, whole and under its path, and replaces nobody's."""

import os
import queue
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support import checkpoints
from support.jobs import poll

from agent.launch.past import from_newer
from agent.nodes import checkpoint_copy
from agent.nodes.checkpoint_copy import (
    CheckpointFetcher,
    CheckpointOffers,
    CheckpointPlace,
    CheckpointServer,
    NewerHere,
    have_checkpoint,
)
from agent.nodes.gather import KeptNewer
from agent.nodes.messages import Newer, SeekNewer
from agent.nodes.tls import PLAIN
from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind, UsageError
from worker_hooks.contract.layout import REPLACED
from worker_hooks.storage import manifest

HOST = os.uname().nodename


@pytest.fixture
def saved(tmp_path):
    return checkpoints.saved(tmp_path / "node0")


@pytest.fixture
def server(saved):
    made = CheckpointServer(saved)
    yield made
    made.close()


@pytest.fixture
def there(server, saved, tmp_path):
    """As another node knows it, whose disk is another one."""
    return server.place._replace(path=tmp_path / "node1" / saved.name)


def had(place, patience_s=0.0, keep=0):
    said = []
    have_checkpoint(place, "127.0.0.1", PLAIN, said.append, patience_s, keep)
    return said


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_all_of_it_comes_and_is_what_it_was(there, saved):
    (said,) = had(there)
    assert said.startswith(f"{there.path} is not on this node (")
    assert manifest.verify(there.path, manifest.read(there.path)) == []
    assert files(saved).items() <= files(there.path).items()
    assert there.is_here()
    assert had(there) == []  # once is enough
    assert list(there.path.parent.iterdir()) == [there.path]


@pytest.mark.parametrize(
    ("keep", "left"), [(0, {1, 2, 3, 5, 7, 9}), (1, {3, 7, 9}), (3, {2, 3, 5, 7, 9})]
)
def test_old_ones_of_the_same_training_are_deleted_once_one_was_copied(there, keep, left):
    """Not another training's, nor what it saved of later steps: somebody has gone back."""
    for step in (1, 2, 5, 9):
        checkpoints.saved(there.path.parent, step=step)
    checkpoints.saved(there.path.parent, step=3, run="another")
    had(there, keep=keep)
    found = [manifest.read(path).step for path in there.path.parent.iterdir()]
    assert sorted(found) == sorted(left)
    for step in (1, 2):
        checkpoints.saved(there.path.parent, step=step)
    assert had(there, keep=1) == []  # what is here already was not copied
    assert len(list(there.path.parent.iterdir())) >= 5


def test_old_ones_that_cannot_be_deleted_are_a_sentence(there, monkeypatch):
    for step in (1, 2):
        checkpoints.saved(there.path.parent, step=step)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_copy.retention, "remove", refuse)
    said = had(there, keep=1)
    oldest = there.path.with_name(f"{checkpoints.NAME}1")
    assert said[1:] == [f"an old checkpoint cannot be deleted: Permission denied: {oldest}"]
    assert there.is_here()


def test_a_later_attempt_fetches_it_while_an_earlier_one_still_does(there, monkeypatch):
    meet, took, make = (
        threading.Barrier(2),
        checkpoint_copy._take,
        checkpoint_copy.commit.make_folder,
    )

    def make_folder(layout):
        make(layout)
        meet.wait(30)  # both have begun

    def take(folder, *others):
        took(folder, *others)
        meet.wait(30)  # both have all of it

    monkeypatch.setattr(checkpoint_copy.commit, "make_folder", make_folder)
    monkeypatch.setattr(checkpoint_copy, "_take", take)
    with ThreadPoolExecutor(2) as threads:
        for fetched in [threads.submit(had, there) for _ in range(2)]:
            fetched.result()
    assert manifest.verify(there.path, manifest.read(there.path)) == []
    assert list(there.path.parent.iterdir()) == [there.path]


def test_what_is_here_already_is_not_copied(server):
    assert had(server.place) == []


def test_what_appears_by_itself_is_not_copied(there, saved, monkeypatch):
    looks = []

    def look(_seconds):
        looks.append(1)
        shutil.copytree(saved, there.path)

    monkeypatch.setattr(checkpoint_copy.time, "sleep", look)
    assert had(there, 60.0) == []
    assert looks == [1]


def test_another_run_s_checkpoint_of_the_same_name_is_neither_taken_nor_touched(there):
    other = checkpoints.saved(there.path.parent, run="another")
    before = files(other)
    with pytest.raises(
        UsageError, match=r"is not the checkpoint of node 0, another run .* move it"
    ):
        had(there)
    assert files(other) == before
    assert list(there.path.parent.iterdir()) == [other]


def test_an_earlier_one_of_the_same_run_is_set_aside(there):
    other = checkpoints.saved(there.path.parent)
    before = files(other)
    had(there)
    assert there.is_here()
    assert files(other.with_name(f"{other.name}{REPLACED}1")) == before


@pytest.mark.parametrize("what", ["damaged", "cut short", "gone", "another"])
def test_what_does_not_come_whole_leaves_nothing(there, saved, what):
    match what:
        case "damaged":
            checkpoints.flipped(saved / checkpoints.SHARD)
        case "cut short":
            (saved / checkpoints.SHARD).write_bytes(b"x" * 100)
        case "gone":
            (saved / checkpoints.OTHER).unlink()
        case "another":
            (saved / "manifest.json").write_bytes(b" " * there.nbytes)
    with pytest.raises(UsageError, match="cannot be copied to"):
        had(there)
    assert list(there.path.parent.glob("*")) == []


def test_a_name_outside_of_the_folder_is_refused(tmp_path):
    folder = checkpoints.saved(tmp_path / "node0")
    bad = manifest.read(folder)
    bad = bad._replace(shards=(bad.shards[0]._replace(file="../../escaped"), *bad.shards[1:]))
    shutil.copy(folder / checkpoints.SHARD, tmp_path / "escaped")
    manifest.write(folder, bad)
    server = CheckpointServer(folder)
    try:
        with pytest.raises(UsageError, match="outside of the checkpoint"):
            had(server.place._replace(path=tmp_path / "a" / "b" / "c" / folder.name))
    finally:
        server.close()
    assert not [path for path in (tmp_path / "a").rglob("*") if path.is_file()]


def test_a_server_that_is_closed_gives_nothing(there, server):
    server.close()
    with pytest.raises(UsageError, match="cannot be copied to"):
        had(there)
    poll(lambda: not list(there.path.parent.glob("*")))


def test_it_is_told_and_read_alike(server):
    assert CheckpointPlace.read(server.place.told()) == server.place
    assert CheckpointPlace.read(None) is None


# --- amid a job -----------------------------------------------------------------------------------


class Turns:
    """A loop that does what threads hand to it when the test says so."""

    def __init__(self):
        self.due = queue.Queue()

    def call_soon(self, method, *about):
        self.due.put((method, about))

    def turn(self, count=1):
        for _ in range(count):
            method, about = self.due.get(timeout=60)
            method(*about)


def test_a_checkpoint_is_read_once_for_all_ranks_and_anew_in_the_next_attempt(saved):
    turns, told = Turns(), []
    offers = CheckpointOffers(turns.call_soon, PLAIN)
    for _ in range(2):
        offers.place(str(saved), told.append)
    assert told == []
    turns.turn()
    offers.place(str(saved), told.append)
    first, *same = told
    assert same == [first, first]
    assert had(first) == []

    offers.begin()
    other = manifest.read(saved)._replace(reason="saved once more")
    manifest.write(saved, other)
    offers.place(str(saved), told.append)
    turns.turn()
    assert told[-1].sha256 != first.sha256
    offers.close()


def test_what_was_read_for_an_attempt_that_is_over_is_told_to_nobody(saved):
    turns, told = Turns(), []
    offers = CheckpointOffers(turns.call_soon, PLAIN)
    offers.place(str(saved), told.append)
    offers.begin()
    turns.turn()
    assert told == []
    offers.place(str(saved), told.append)
    offers.close()
    turns.turn()
    assert told == []


def test_what_cannot_be_read_has_no_place(tmp_path):
    turns, told = Turns(), []
    offers = CheckpointOffers(turns.call_soon, PLAIN)
    offers.place(str(tmp_path / "none"), told.append)
    turns.turn()
    assert told == [None]


def test_ranks_that_wait_for_one_checkpoint_have_it_brought_once(there):
    turns, said, done = Turns(), [], []
    fetcher = CheckpointFetcher(turns.call_soon, PLAIN, said.append, 0)
    for _ in range(2):
        fetcher.have(there, "127.0.0.1", 0.0, done.append)
    turns.turn(2)  # the sentence, and the end
    assert done == ["", ""]
    assert len(said) == 1
    assert there.is_here()
    fetcher.have(there, "127.0.0.1", 0.0, done.append)
    turns.turn()
    assert (done, len(said)) == ([""] * 3, 1)


def test_what_cannot_be_had_is_said_to_each(there, server):
    turns, said, done = Turns(), [], []
    server.close()
    fetcher = CheckpointFetcher(turns.call_soon, PLAIN, said.append, 0)
    fetcher.have(there, "127.0.0.1", 0.0, done.append)
    turns.turn(2)
    (why,) = done
    assert why.startswith(f"the checkpoint {there.path} cannot be copied to ")


# --- before the job begins: what a node has saved that node 0 has not ------------------------------


def asked(folder, step=5, run="r1"):
    return SeekNewer(str(folder), run, step)


def test_a_node_offers_the_newest_step_of_that_run_which_it_has_whole(tmp_path):
    for step in (4, 7, 9):
        checkpoints.saved(tmp_path / "node1", step=step)
    (tmp_path / "node1" / f"{checkpoints.NAME}9" / checkpoints.OTHER).unlink()
    checkpoints.saved(tmp_path / "node1", step=11, run="other")
    kept = NewerHere(PLAIN)
    newer = kept.answer(asked(tmp_path / "node1"))
    assert (newer.step, newer.path) == (7, f"{tmp_path}/node1/{checkpoints.NAME}7")
    place = CheckpointPlace.read(newer.place)
    there = place._replace(path=tmp_path / "node0" / place.path.name)
    assert had(there) == [f"{there.path} is not on this node ({HOST}): it is copied from node 0"]
    assert manifest.read(there.path).step == 7
    kept.close()


@pytest.mark.parametrize("step", [7, 8])
def test_where_nothing_is_newer_nothing_is_offered(tmp_path, step):
    checkpoints.saved(tmp_path, step=7)
    assert NewerHere(PLAIN).answer(asked(tmp_path, step)) == Newer()
    assert NewerHere(PLAIN).answer(asked(tmp_path / "absent")) == Newer()


def test_with_certificates_it_is_named_and_not_offered(tmp_path):
    """Only node 0 shows that of a server."""
    made = checkpoints.saved(tmp_path, step=7)
    kept = NewerHere(SimpleNamespace(is_both_ways=False))
    assert kept.answer(asked(tmp_path)) == Newer(7, str(made))


def resumed(folder):
    dump = DumpSpec(resume=folder / "old", resume_step=5, lineage=("r1", "r0"), keep=3)
    program = Program("train.py", (), ProgramKind.SCRIPT, "python")
    return JobSpec(program, 2, "r", "r", dump=dump)


def test_the_job_goes_on_from_what_another_node_has(tmp_path):
    saved = checkpoints.saved(tmp_path, step=7)
    saved.rename(away := tmp_path / "node1")
    server = CheckpointServer(away)
    newer = Newer(7, str(saved), server.place._replace(path=saved).told())
    kept = KeptNewer("node1", "127.0.0.1", newer)
    said = []
    spec = from_newer(resumed(tmp_path), [kept], PLAIN, said.append)
    server.close()
    dump = spec.dump
    assert (dump.resume, dump.resume_step, dump.lineage) == (saved, 7, ("r1", "r0"))
    assert said == [
        f"{saved} is not on this node ({HOST}): it is copied from node1",
        f"resuming step 7 of run r1 from {saved}: node1 has saved it on a disk of its own",
    ]


def test_what_this_node_has_looked_at_itself_is_not_taken_from_another(tmp_path):
    """It is damaged, say, and an older one was found better."""
    saved = checkpoints.saved(tmp_path, step=7)
    server = CheckpointServer(saved)
    kept = KeptNewer("node1", "127.0.0.1", Newer(7, str(saved), server.place.told()))
    spec = resumed(tmp_path)
    assert from_newer(spec, [kept], PLAIN, print) == spec
    server.close()


def test_what_is_not_to_be_had_is_named_and_nothing_older_is_taken(tmp_path):
    kept = KeptNewer("node1", "10.0.0.2", Newer(7, "/ckpt/step_7"))
    with pytest.raises(UsageError) as refused:
        from_newer(resumed(tmp_path), [kept], PLAIN, print)
    assert str(refused.value).startswith("node1 (10.0.0.2) has saved step 7 of this run on a disk")
    assert "--node-rank=0 --master-addr=10.0.0.2 --resume" in str(refused.value)
