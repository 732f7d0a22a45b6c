"""kill -9 of msrun itself: the ranks save by themselves and leave, and nothing of the job stays."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher, poll
from support.warm_python import WarmPython

from worker_hooks.storage import manifest as manifests

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT, SHARDED = WORKERS / "train_small.py", WORKERS / "train_sharded.py"
RANKS = 4
LONG_S = 60.0


SMALL = ("--epochs=3", "--digest")  # 24 steps


def trained_for(msrun: Launcher, steps: int, ckpt: Path | str, *args: str) -> Job:
    """A job whose ranks have all committed so many steps."""
    job = msrun.start(
        f"--nproc-per-node={RANKS}",
        SCRIPT,
        "--pause=0.02",
        f"--ckpt={ckpt}",
        "--say",
        *(args or ("--epochs=99",)),
    )
    job.await_lines(f"step {steps}\n", RANKS, LONG_S)
    return job


def digests(job: Job) -> dict[str, str]:
    """By log: what a rank held at the end."""
    found = {
        name: re.findall(r"^digest (\w+)", log, re.MULTILINE) for name, log in job.logs().items()
    }
    return {name: each[-1] for name, each in found.items() if each}


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> dict[str, str]:
    """What the ranks hold at the end of the same training without a fault."""
    job = launcher.start(f"--nproc-per-node={RANKS}", SCRIPT, *SMALL)
    assert job.wait().code == 0
    found = digests(job)
    assert len(set(found.values())) == RANKS
    return found


def resumed(msrun: Launcher) -> Job:
    job = msrun.start("--resume", log_dir=msrun.tmp / "resumed")
    ended = job.wait()
    assert ended.code == 0, ended.err
    return job


def dump_of(folder: Path) -> tuple[Path, manifests.Manifest]:
    """The one dump in a folder, verified."""
    (dump,) = folder.glob("tft_saved_checkpoints-step_*[0-9]")
    manifest = manifests.read(dump)
    assert manifests.verify(dump, manifest) == []
    return dump, manifest


def kill(job: Job, msrun: Launcher, *ranks: int) -> None:
    pids = job.pids()
    job.signal(signal.SIGSTOP)  # it must not order anything in between
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    kill_msrun(job, msrun)


def kill_msrun(job: Job, msrun: Launcher) -> None:
    job.signal(signal.SIGKILL)
    job.process.wait()
    poll(lambda: not msrun.marked())


def test_ranks_whose_msrun_is_killed_save_the_same_step_and_leave(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun)
    dump, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.odd) == ((), ())
    assert manifest.step >= 5
    assert list((tmp_path / "ckpt").iterdir()) == [dump]  # no notes stay behind
    for rank in range(RANKS):
        assert f"msrun is gone; saved: {dump}" in job.logs()[f"worker_{rank}.log"]


def test_a_rank_killed_at_the_same_moment_is_done_without(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun, 1)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    assert manifest.step >= 5


def test_what_is_saved_without_a_folder_of_the_scripts_is_resumed(msrun, undisturbed):
    """The line to type that each rank says works: msrun knows its own folder, too."""
    job = trained_for(msrun, 5, "", *SMALL)
    kill(job, msrun, 1)
    assert "resume with: msrun --resume" in job.logs()["worker_0.log"]
    assert digests(resumed(msrun)) == undisturbed


def test_a_resume_waits_for_ranks_that_still_save(msrun, tmp_path, undisturbed):
    """A loop around `msrun --resume` comes sooner than a large state is on the disk."""
    job = trained_for(msrun, 5, tmp_path / "ckpt", *SMALL)
    pids = job.pids()
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    job.process.wait()
    again = msrun.start("--resume", log_dir=msrun.tmp / "resumed")
    said = iter(again.process.stderr.readline, b"")
    assert any(b"has lost its msrun: waiting for ranks 0-3 to save and end" in x for x in said)
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)
    ended = again.wait()
    assert ended.code == 0, ended.err
    assert "resuming step" in ended.err
    assert digests(again) == undisturbed


OWN_STATE = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from msrun import TrainState, run
own = nn.Linear(1, 1)  # of each rank alone
net = nn.Linear(2, 2)
opt = torch.optim.SGD([*net.parameters(), *own.parameters()], lr=0.1)
state = TrainState(model=nn.ModuleList([net, own]), optimizer=opt, ckpt_save_path=sys.argv[1])
dist.init_process_group("gloo")

def train(state):
    for _ in state.batches(range(10**6)):
        time.sleep(0.02)
        (net(torch.ones(2)).sum() + int(os.environ["RANK"]) * own(torch.ones(1)).sum()).backward()
        for each in net.parameters():
            dist.all_reduce(each.grad)
        opt.step()
        opt.zero_grad()
        print(f"step {state.step}", flush=True)

run(train, state)
"""


def test_nobody_saves_state_of_its_own_as_that_of_a_dead_rank(msrun, tmp_path):
    """What differs by rank was said at the first steps; msrun and one rank die together."""
    script = tmp_path / "own.py"
    script.write_text(OWN_STATE)
    job = msrun.start("--protect-memory=copy", "--nproc-per-node=2", script, tmp_path / "ckpt")
    job.await_lines("step 6\n", 2, LONG_S)
    kill(job, msrun, 1)
    assert not list((tmp_path / "ckpt").glob("*[0-9]"))
    log = job.logs()["worker_0.log"]
    assert "nothing is saved (rank 0: nobody saves the state of rank 1: " in log


def test_each_group_of_replicas_saves_its_part_where_ranks_differ(msrun, tmp_path):
    """Ranks 0 and 1 are replicas, rank 2 has weights of its own: rank 0 writes, and rank 2."""
    script = tmp_path / "own.py"
    text = OWN_STATE.replace('int(os.environ["RANK"])', 'int(os.environ["RANK"] == "2")')
    script.write_text(text.replace("own = ", "torch.manual_seed(1)\nown = ", 1))
    job = msrun.start("--nproc-per-node=3", script, tmp_path / "ckpt")
    job.await_lines("step 6\n", 3, LONG_S)
    kill_msrun(job, msrun)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert manifest.holders == ((0, 1), (2,))
    assert [each.rank for each in manifest.shards if each.kind == "replicated"] == [0, 2]
    assert (manifest.without_private, manifest.stale_private) == ((), ())


@pytest.mark.parametrize(
    ("style", "killed"),
    [("hsdp", [1]), ("fsdp", []), ("moe", []), ("fsdp", [1, 3])],
    ids=[
        "a replica dies too",
        "no replicas",
        "each tensor with other replicas",
        "ranks without replicas die too",
    ],
)
def test_a_sharded_state_is_saved_without_msrun(
    msrun: Launcher, warm_python: WarmPython, tmp_path: Path, style: str, killed: list[int]
) -> None:
    warm_python.train(tmp_path / "alone", RANKS, SHARDED, style, 12)
    job = msrun.start(f"--nproc-per-node={RANKS}", SHARDED, style, 12, "--pause=0.2", cwd=tmp_path)
    job.await_lines("step 5\n", RANKS, LONG_S)  # all vote by then
    kill(job, msrun, *killed)
    _, manifest = dump_of(tmp_path / "dumps")
    assert manifest.step >= 5 - (len(killed) > 1)  # dead ranks may have left the one before
    assert sorted(rank for part in manifest.holders for rank in part) == list(range(RANKS))
    again = msrun.start("--resume", log_dir=msrun.tmp / "resumed", cwd=tmp_path)
    assert (ended := again.wait()).code == 0, ended.err
    found = (tmp_path / f"{style}.sha").read_text()
    assert found == (tmp_path / "alone" / f"{style}.sha").read_text()


@pytest.mark.parametrize("killed", [[1], [0, 3]], ids=["one", "all of whose parts others hold"])
def test_what_others_hold_of_a_dead_rank_between_them_is_saved_without_msrun(
    msrun: Launcher, warm_python: WarmPython, tmp_path: Path, killed: list[int]
) -> None:
    """Each tensor has another holder, but no rank is a replica; nothing is read in memory."""
    warm_python.train(tmp_path / "alone", RANKS, SHARDED, "moe", 12)
    words = f"--nproc-per-node={RANKS}", "--protect-memory=off", SHARDED, "moe", 12, "--pause=0.2"
    job = msrun.start(*words, cwd=tmp_path)
    job.await_lines("step 5\n", RANKS, LONG_S)
    kill(job, msrun, *killed)
    _, manifest = dump_of(tmp_path / "dumps")
    assert manifest.step >= 5
    assert manifest.holders == ((0, 1), (0, 2), (1, 3), (2, 3))
    again = msrun.start("--resume", log_dir=msrun.tmp / "resumed", cwd=tmp_path)
    assert (ended := again.wait()).code == 0, ended.err
    assert (tmp_path / "moe.sha").read_text() == (tmp_path / "alone" / "moe.sha").read_text()


def test_the_lowest_rank_killed_with_msrun_leads_nobody(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun, 0, 2)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    assert [shard.rank for shard in manifest.shards if shard.kind == "replicated"] == [1]


def test_where_nothing_can_be_written_the_fallback_is_taken(msrun, tmp_path):
    (tmp_path / "file").touch()  # no folder can be made in it, not even by root
    job = trained_for(msrun, 3, tmp_path / "file" / "ckpt")
    kill(job, msrun)
    dump_of(job.folder / "dumps")


@pytest.mark.parametrize("is_alone", [True, False], ids=["a rank", "all but the other ranks"])
def test_what_ranks_saved_that_outlived_msrun_and_a_peer_is_resumed_bit_by_bit(
    is_alone, msrun, tmp_path, undisturbed
):
    """The dead rank's randomness, buffers and place in the data are on its page, which its peers have."""
    job = trained_for(msrun, 5, tmp_path / "ckpt", *SMALL)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    others = set(map(int, children)) - set(job.pids().values())
    for pid in () if is_alone else others:  # the forkserver, the store
        os.kill(pid, signal.SIGKILL)
    kill(job, msrun, 1)
    dump_of(tmp_path / "ckpt")
    assert digests(resumed(msrun)) == undisturbed


@pytest.mark.parametrize("place", ["start", "state", "group", "model", "batch"])
def test_msrun_killed_while_a_rank_is_replaced_loses_nothing(place, msrun, tmp_path, undisturbed):
    job = trained_for(msrun, 5, tmp_path / "ckpt", *SMALL, f"--stay={place}")
    os.kill(job.pids()[1], signal.SIGKILL)
    job.await_lines(f"stays at {place}\n")
    survivors = RANKS - 1
    poll(lambda: [one["event"] for one in job.events()].count("Rejoining") == survivors)
    kill_msrun(job, msrun)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    assert manifest.step >= 5
    assert digests(resumed(msrun)) == undisturbed


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_wait_for_one_that_is_stopped_when_msrun_is_killed(
    rank, msrun, tmp_path, undisturbed
):
    job = trained_for(msrun, 5, tmp_path / "ckpt", *SMALL)
    pids = job.pids()
    os.kill(pids[rank], signal.SIGSTOP)
    kill_msrun(job, msrun)  # the stopped one does not stay, either
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    killed = [name for name, log in job.logs().items() if f"did not answer: rank {rank}" in log]
    assert killed
    assert digests(resumed(msrun)) == undisturbed


def test_ranks_do_not_wait_for_one_that_keeps_the_interpreter_when_msrun_is_killed(
    msrun, tmp_path, undisturbed
):
    job = trained_for(msrun, 5, tmp_path / "ckpt", *SMALL)
    os.kill(job.pids()[1], signal.SIGUSR1)
    job.signal(signal.SIGSTOP)  # it would replace that rank
    kill_msrun(job, msrun)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    assert digests(resumed(msrun)) == undisturbed


def settled(folder: Path) -> list[int]:
    """The ranks whose notes say that their state will not change any more."""
    found = []
    for path in folder.glob("*alone*/rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_bytes())["is_settled"]:
                found.append(int(path.stem[5:]))
    return found


def test_a_rank_that_stops_answering_after_its_note_does_not_stay(msrun, tmp_path):
    """Its main thread holds at a commit, where a signal makes it keep the interpreter."""
    job = trained_for(msrun, 2, tmp_path / "ckpt", "--epochs=3", "--fill=24")
    pids = job.pids()
    job.signal(signal.SIGKILL)
    job.process.wait()
    told = poll(lambda: [rank for rank in settled(tmp_path / "ckpt") if rank])
    os.kill(pids[told[0]], signal.SIGUSR1)
    poll(lambda: not msrun.marked())
    _, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.stale_private) == ((), ())


def leader(folder: Path) -> int | None:
    """The rank that writes, as it says in its note."""
    for path in folder.glob("*alone*/rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(path.read_bytes())
            if note["leads"] and Path(f"/proc/{note['pid']}/stat").exists():
                return int(path.stem[5:])
    return None


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_saves_without_msrun_may_die_or_stop_too(signum, msrun, tmp_path):
    job = trained_for(msrun, 2, tmp_path / "ckpt", "--epochs=3", "--fill=24")
    pids = job.pids()
    job.signal(signal.SIGKILL)
    job.process.wait()
    poll(lambda: leader(tmp_path / "ckpt") == 0)
    os.kill(pids[0], signum)
    poll(lambda: leader(tmp_path / "ckpt") == 1)
    os.kill(pids[2], signum)  # who only follows
    poll(lambda: not msrun.marked())
    dump, manifest = dump_of(tmp_path / "ckpt")
    assert [shard.rank for shard in manifest.shards if shard.kind == "replicated"] == [1]
    assert (manifest.without_private, manifest.stale_private) == ((), ())
    assert list((tmp_path / "ckpt").iterdir()) == [dump]
