"""Copies of the state on two nodes: each agent keeps those of its ranks, and writes them to the folder that both see."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.dump_desk import QueuedFileThread

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.dump import node_copies as module
from agent.dump.copies import MemoryCopies
from agent.dump.copy_files import CopyFiles
from agent.dump.flush import MemoryFlush
from agent.dump.folder import FolderTarget
from agent.dump.node_copies import UNKNOWN, CopyGatherer, NodeCopies
from agent.dump.target import LostStateError, SavedDump
from agent.nodes.run_messages import CopyWritten, WriteCopy
from agent.spec.job_spec import CopyMode, JobSpec, Program, ProgramKind
from worker_hooks.contract import protocol
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import manifest as manifests

ALIKE = ((0, 1, 2, 3),)


def content(name, rank):
    """A safetensors file without tensors."""
    head = f'{{"__metadata__":{{"who":"{name} {rank}"}}}}'.encode()
    return len(head).to_bytes(8, "little") + head


class Nodes:
    """Ranks 0 and 1 are on the controller's node, 2 and 3 on the other one."""

    def __init__(self, folder):
        program = Program("x", (), ProgramKind.SCRIPT, "python")
        spec = JobSpec(program, 2, "run", "rec", nodes=(2, 2))
        spec = spec._replace(dump=spec.dump._replace(copies=CopyMode.COPY, copy_every=3))
        self.sent, self.posted, self.dropped, self.later = {}, [], [], []
        links = SimpleNamespace(send=self._send, drop=lambda *about: self.dropped.append(about))
        services = SimpleNamespace(
            loop=SimpleNamespace(call_later=lambda *call: self.later.append(call)),
            post=self.posted.append,
            journal=SimpleNamespace(event=lambda *_, **__: None),
        )
        self.step = 5
        pages = SimpleNamespace(
            newest_commits=lambda ranks: [(self.step, time.monotonic_ns()) for _ in ranks],
            paces=lambda ranks: {rank: [SimpleNamespace(step_ns=10**8)] for rank in ranks},
        )
        self.copies = MemoryCopies(spec, links, pages, services)
        self.other = NodeCopies((2, 3))
        self.files, self.other_files = QueuedFileThread(), QueuedFileThread()
        self.gatherer, self.told = CopyGatherer(), []
        self.layout = DumpLayout.of_step(folder / "ckpt", 7, "rec")

    def _send(self, rank, order):
        if rank in (2, 3):
            assert (order.state, order.private) == ("", "")  # those of another process
            order = self.other.placed(rank, 0, order)
        self.sent[rank] = order

    def copy(self, *ranks):
        """These ranks copy as they were ordered."""
        for rank in ranks:
            order = self.sent[rank]
            state, private = content("state", rank), content("own", rank)
            Path(order.state).write_bytes(state)
            Path(order.private).write_bytes(private)
            sizes = {"nbytes": len(state), "private_nbytes": len(private), "files": order.files}
            answer = protocol.Copied(rank, 0, order.step, digest="d", epoch=1, batch=7, **sizes)
            assert self.other.why_unsound(answer) == ""
            self.copies.hear(answer)

    def wake(self):
        """The next copy is due."""
        self.copies.decided(JobState.RUNNING, ALIKE)
        for _, what, *args in [self.later.pop(0) for _ in [*self.later]]:
            what(*args)

    def taken(self):
        """A complete copy."""
        self.copies.decided(JobState.RUNNING, ALIKE)
        self.copy(0, 1, 2, 3)
        (said,) = self.posted
        assert said.variants == ALIKE
        return said.step

    def elsewhere(self, files, manifest, done):
        self.gatherer.begin(1, str(self.layout.folder), [1], done)
        self.order = WriteCopy(
            1, files, manifests.encode(manifest).decode(), str(self.layout.folder)
        )

    def flush(self, step):
        """What comes of it, once the thread of this node has done its part."""
        kept = self.copies.newest(step, "why")
        flush = MemoryFlush(
            kept.manifest,
            FolderTarget(self.layout),
            lambda done: self.elsewhere(kept.files, kept.elsewhere, done),
        )
        found = []
        flush.start(self.files.do, lambda _: None, found.append)
        self.files.work()
        return found

    def write(self):
        """The other node does its part."""
        self.other.write(self.order, self.other_files, self.told.append)
        self.other_files.work()
        return self.told[-1]


@pytest.fixture
def nodes(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    made = Nodes(tmp_path)
    yield made
    made.copies.forget()
    made.other.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_copy_is_complete_once_the_ranks_of_all_nodes_have_answered(nodes):
    nodes.copies.decided(JobState.RUNNING, ALIKE)
    assert {rank: (one.part, one.parts) for rank, one in nodes.sent.items()} == {
        rank: (rank, 4) for rank in range(4)
    }
    nodes.copy(0, 1, 3)
    assert nodes.posted == []
    nodes.copy(2)
    (said,) = nodes.posted
    assert isinstance(said, ev.StateCopied)
    assert len({one.state for one in nodes.sent.values()}) == 4


def test_it_is_saved_by_each_node_and_completed_by_the_controllers(nodes):
    found = nodes.flush(nodes.taken())
    assert found == []  # the other node writes
    assert not nodes.layout.folder.exists()
    answer = nodes.write()
    assert not answer.why_not
    nodes.gatherer.hear(1, answer)
    nodes.files.work()
    (saved,) = found
    assert saved.path == str(nodes.layout.folder)
    about = manifests.read(nodes.layout.folder)
    assert manifests.verify(nodes.layout.folder, about) == []
    assert (about.world_size, about.without_private, about.reason) == (4, (), "why")
    assert {
        (one.kind, one.rank): (nodes.layout.folder / one.file).read_bytes() for one in about.shards
    } == {
        (kind, rank): content(name, rank)
        for rank in range(4)
        for kind, name in ((manifests.PRIVATE, "own"), (manifests.REPLICATED, "state"))
    }


def test_the_other_node_may_be_quicker(nodes):
    step, found = nodes.taken(), []
    kept = nodes.copies.newest(step, "why")
    flush = MemoryFlush(
        kept.manifest,
        FolderTarget(nodes.layout),
        lambda done: nodes.elsewhere(kept.files, kept.elsewhere, done),
    )
    flush.start(nodes.files.do, lambda _: None, found.append)
    nodes.files.work(1)  # the folder is there
    nodes.gatherer.hear(1, nodes.write())
    nodes.files.work()
    assert isinstance(found[0], SavedDump)


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (CopyWritten(1, "", why_not="No space left", is_place=True), OSError, "No space left"),
        (CopyWritten(1, "", why_not=UNKNOWN), LostStateError, "this node has no such copy"),
        (CopyWritten(1, "", manifest="{"), LostStateError, "what node 1 has written is not known"),
        (None, LostStateError, "node 1 is gone, and with it what its ranks had copied"),
    ],
    ids=["no room", "no copy", "nonsense", "gone"],
)
def test_what_one_node_cannot_write_is_not_complete(nodes, answer, kind, why):
    found = nodes.flush(nodes.taken())
    if answer is None:
        nodes.gatherer.lose(1, "node 1 is gone")
    else:
        nodes.gatherer.hear(1, answer)  # of another folder, which could not be written to
        assert found == []
        nodes.gatherer.hear(1, answer._replace(folder=nodes.order.folder))
    (error,) = found
    assert isinstance(error, kind)
    assert str(error).startswith(why)
    nodes.gatherer.hear(1, nodes.write())  # too late
    nodes.files.work()
    assert len(found) == 1
    assert not nodes.layout.folder.exists()


def test_what_is_not_to_be_seen_here_is_not_believed(nodes):
    """The folder is another one on that node."""
    found = nodes.flush(nodes.taken())
    answer = nodes.write()
    for path in nodes.layout.unfinished.glob("rank_3/*"):
        path.unlink()
    nodes.gatherer.hear(1, answer)
    nodes.files.work()
    (error,) = found
    assert isinstance(error, FileNotFoundError)
    assert not nodes.layout.folder.exists()


def test_a_node_without_the_folder_says_so(nodes, tmp_path):
    nodes.flush(nodes.taken())
    nodes.order = nodes.order._replace(folder=str(tmp_path / "elsewhere/x"))
    answer = nodes.write()
    assert "No such file" in answer.why_not
    assert answer.is_place


def test_a_node_that_has_come_later_has_no_copy(nodes):
    nodes.flush(nodes.taken())
    nodes.other.close()
    assert nodes.write() == CopyWritten(1, nodes.order.folder, why_not=UNKNOWN)


def test_what_is_written_goes_on_as_the_ranks_end(nodes):
    nodes.flush(nodes.taken())
    nodes.other.write(nodes.order, nodes.other_files, nodes.told.append)
    nodes.other.close()
    nodes.other_files.work()
    assert not nodes.told[-1].why_not


def test_the_newest_stays_while_the_next_is_copied_and_older_ones_go(nodes):
    count = len(os.listdir("/proc/self/fd"))
    kept = []
    for at in range(4):
        nodes.step = 5 + 10 * at
        nodes.wake()
        nodes.copy(0, 1, 2, 3)
        kept.append(len(os.listdir("/proc/self/fd")) - count)
    assert kept == [8, 16, 16, 16]
    nodes.copies.begin(1)  # what is ordered now is given up
    nodes.step += 10
    nodes.wake()
    assert len(os.listdir("/proc/self/fd")) - count == 16
    assert nodes.copies.newest(nodes.posted[-1].step, "") is not None


def test_a_controller_without_ranks_has_no_files():
    assert CopyFiles(()).found(1, ()) == ()


def test_no_descriptor_is_left_on_the_other_node(nodes, monkeypatch):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    order = protocol.Copy(7, "", "", 0, 1, 1)
    monkeypatch.setattr(os, "memfd_create", refuse)
    answer = nodes.other.placed(2, 5, order)
    assert (answer.rank, answer.attempt, answer.step, answer.is_final) == (2, 5, 7, True)
    assert "has no descriptor left" in answer.why_not


def test_what_a_rank_of_the_other_node_cannot_have_written_is_noticed_there(nodes):
    nodes.copies.decided(JobState.RUNNING, ALIKE)
    files = nodes.sent[2].files
    said = protocol.Copied(2, 0, nodes.sent[2].step, nbytes=7, digest="d", files=files)
    assert nodes.other.why_unsound(said) == "it copied 0 bytes and says 7"
    assert nodes.other.why_unsound(said._replace(files=files + 9)) == ""  # of a copy that is over


def test_progress_is_told_while_a_large_part_is_written(nodes, monkeypatch):
    monkeypatch.setattr(module, "ThrottledProgress", lambda tell: tell)
    nodes.flush(nodes.taken())
    nodes.write()
    assert [type(one).__name__ for one in nodes.told] == ["CopyProgressed"] * 4 + ["CopyWritten"]
