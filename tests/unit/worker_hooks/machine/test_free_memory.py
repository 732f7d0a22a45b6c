"""Nothing is kept in memory that has no room there: the kernel would kill ranks for it."""

import os
from types import SimpleNamespace

import pytest
import torch
from support.dump_desk import STEP, Desk

from agent.controller import actions as do
from agent.dump import memory
from agent.dump.room import SPARE, needed, shortage
from agent.hooks.status_pages import StatusPages
from agent.text.wording import sized
from worker_hooks.contract import protocol
from worker_hooks.machine.free_memory import free_bytes, free_in_group
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of

GB = 10**9
MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\nHugePages_Total: 0\n"}
V2 = {"proc/self/cgroup": "0::/pod/job\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/pod/job\n0::/\n"}


def group(folder, limit="max", used=1000, idle=0, busy=0, **more):
    """A control group of version 2."""
    stat = f"anon 7\nfile 900\ninactive_file {idle}\nactive_file {busy}\n"
    told = {"max": limit, "current": used, "stat": stat, **more}
    return {f"sys/fs/cgroup/{folder}memory.{name}": f"{text}\n" for name, text in told.items()}


def old(folder, limit, used, idle=0, busy=0):
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {idle}\ntotal_active_file {busy}\n"
    told = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": str(text) for name, text in told.items()}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MACHINE, 5_120_000),
        (MACHINE | V2 | group("pod/job/"), 5_120_000),
        (MACHINE | V2 | group("pod/job/", 3000), 2000),
        (V2 | group("pod/job/", 3000, high=2500), 1500),
        (V2 | group("pod/job/", 3000, high="max"), 2000),
        (V2 | group("pod/job/", 3000, 2990, idle=500, busy=300), 660),
        (V2 | group("pod/job/", 3000, 5000), 0),
        (V2 | group("pod/job/") | group("pod/", 4000, 3900), 100),
        (V2 | group("pod/job/", 3000) | group("", 1500), 500),
        (V2 | group("pod/job/", 10**7, 0) | MACHINE, 5_120_000),
        ({"proc/self/cgroup": "0::/the/hosts/path\n"} | group("", 3000), 2000),
        ({"proc/self/cgroup": "0::/../../up\n"} | group("", 3000) | group("../", 1200), 2000),
        (V2 | group("unified/pod/job/", 3000), 2000),
        (V1 | MACHINE | old("pod/job/", 9223372036854771712, 1000), 5_120_000),
        (V1 | old("pod/job/", 3000, 1000, idle=100, busy=50), 2125),
        (V1 | old("pod/job/", 3000, 1000) | old("", 3000, 2900), 100),
        (V1 | group("pod/job/", 3000), None),
        (V2 | group("pod/job/", 3000, "?"), None),
        (V2 | group("pod/job/", "\u00b2", 1), None),
        (V2 | group("pod/job/", "9" * 10_000, 1), None),
        (V2 | {"sys/fs/cgroup/pod/job/memory.max": "5", "proc/meminfo": "MemAvailable:\n\n"}, None),
        ({"proc/self/cgroup": "nonsense\n\n::\n", "proc/meminfo": "MemAvailable: many kB"}, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, free):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_bytes(tmp_path / "root") == free


def test_this_machine_tells():
    free, most = free_bytes(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free is not None
    assert 0 < free < most


def test_files_that_nobody_uses_are_given_up_first():
    assert free_in_group([None, None], 5, 0, 0) is None
    assert free_in_group([100], None, 0, 0) is None
    assert free_in_group([None, 100], 90, 30, 20) == 50
    assert free_in_group([100], 10, 30, 20) == 100  # counters are not read at one moment
    assert free_in_group([100, 80], 90, 0, 0) == 0


def test_what_is_needed():
    assert needed(GB, GB, 500, 0) == GB + SPARE + 500
    assert needed(GB, GB, 500, 2) == 3 * (GB + SPARE) + 500
    assert needed(GB, 0, 500, 2) == GB + 3 * SPARE + 500
    assert needed(-5, -5, 0, 0) == SPARE
    # what a dead rank has left is freed for its replacement, but not for the checkpoint
    assert needed(GB, GB, 500, 2, held=GB) == 2 * GB + 3 * SPARE + 500
    assert needed(GB, GB, 500, 1, held=5 * GB) == GB + SPARE + 500
    assert shortage(needed(10**5000, 0, 0, 1), GB).startswith("there is no room")


def test_the_sentence():
    assert shortage(1_250_000_000, None) == ""
    assert shortage(1_250_000_000, 1_250_000_000) == ""
    told = shortage(1_250_000_000, 900_000_000)
    assert told == "there is no room for the state: 1.25 GB needed, 900 MB free"
    assert sized(999) == "999 bytes"


# --- where a dump begins ------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Of three ranks; the last one is dead."""
    desk = Desk(StatusPages(), tmp_path)
    desk.free = None
    monkeypatch.setattr(memory, "free_bytes", lambda: desk.free)
    for rank, nbytes in ((0, GB - 1), (1, GB)):
        desk.saving.hear(protocol.Frozen(rank, 0, 1, STEP, True, "", nbytes, nbytes))
    desk.posted.clear()
    yield desk
    desk.saving.abandon()
    desk.saving.forget()
    desk.files.jobs.clear()


def test_without_room_no_rank_is_told_to_write_and_the_place_is_to_blame(desk):
    desk.free = 2 * (GB + SPARE) - 1
    told = desk.save()
    why = "there is no room for the state: 2.13 GB needed, 2.13 GB free"
    assert desk.posted == [protocol.SaveFailed(0, 0, 1, why, True, 0)]
    assert told.keys() == {1}  # it compares
    desk.free = None
    assert desk.save(number=1).keys() == {0, 1}  # there is room by now
    desk.save(place=0, number=2)
    assert len(desk.files.jobs) == 1


@pytest.mark.parametrize("free", [None, 2 * (GB + SPARE)])
def test_with_room_they_are_told(desk, free):
    desk.free = free
    assert desk.save()[0].folder.startswith("/proc/")
    assert desk.posted == []


def test_what_was_said_in_another_dump_is_forgotten(desk):
    desk.saving.freeze(do.FreezeRanks((0, 1), 2, "rank 1 died, too"))
    desk.saving.hear(protocol.Frozen(0, 0, 2, STEP, True, "", 5))
    desk.saving.hear(protocol.Frozen(1, 0, 1, STEP, True, "", GB))  # late
    desk.free = 3 * (SPARE + 5)
    desk.saving.save(do.SaveRanks(2, STEP, (0,), (), do.MEMORY, "", 0))
    assert [type(event) for event in desk.posted[1:]] == []


def test_a_rank_knows_how_large_its_state_is():
    model = torch.nn.Linear(100, 3)
    optimizer = torch.optim.Adam(model.parameters())
    table = torch.zeros(50, dtype=torch.int16)
    ledger = CommittedState(
        pieces_of({"model": model, "optimizer": optimizer, "table": table}), dict
    )
    assert ledger.nbytes() == (303 * 4 + 100,) * 2
    model(torch.ones(100)).sum().backward()
    optimizer.step()
    ledger.commit(Position(0, 1))
    written = sum(each.nbytes for each in ledger.replica(1).tensors.values())
    assert ledger.nbytes() == (written,) * 2 == (3 * 303 * 4 + 2 * 4 + 100,) * 2
    ledger.pieces = (SimpleNamespace(optimizers=(), tensors=lambda: 1 / 0),)
    assert ledger.nbytes() == (0, 0)
