"""Scripts that know nothing of msrun end as if no rank had died, by shadows of their processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
from support.jobs import WORKERS, Ended, Launcher, poll

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_unhooked.py"
PROTECTED = "protected: each rank has a shadow"


def run(launcher: Launcher, name: str, *words: object, ranks: int = 3) -> Ended:
    folder = launcher.tmp / name
    folder.mkdir()
    options = [word for word in words if str(word).startswith("--protect")]
    rest = [word for word in words if word not in options]
    told = (f"--worker-num={ranks}", *options, SCRIPT, *rest)
    return launcher.run(*told, log_dir=folder / "logs", cwd=folder)


def results(ended: Ended) -> list[str]:
    assert ended.code == 0, ended
    found = sorted(re.findall(r"result of rank .*", ended.out))
    assert found, ended
    return found


@pytest.fixture(scope="module")
def expected(launcher: Launcher) -> list[str]:
    return results(run(launcher, "undisturbed"))


def test_ranks_die_in_all_parts_of_a_step_and_all_go_on_from_a_common_one(launcher, expected):
    deaths = ("1:2:stepped", "0:5:forward", "2:5:backward", "0:7:validated", "1:9:data")
    words = ("--protect=shadow", "--protect-every=2", "--shadowed", "--die", *deaths)
    ended = run(launcher, "killed", *words)
    assert results(ended) == expected
    assert len([*(launcher.tmp / "killed").glob("died-*")]) == len(deaths)
    assert ended.err.count("go on from their shadows") == len(deaths), ended.err
    assert ended.err.splitlines()[0].startswith(f"msrun: {PROTECTED}"), ended.err


def test_threads_of_openmp_and_a_lock_that_the_dead_rank_held(launcher):
    words = ("--threads=2", "--odd=lock")
    plain = run(launcher, "threads", *words, ranks=2)
    deaths = ("0:3:forward", "1:6:forward")
    told = ("--protect=auto", *words, "--shadowed", "--die", *deaths)  # as often as is cheap
    ended = run(launcher, "locked", *told, ranks=2)
    assert results(ended) == results(plain)
    assert ended.err.count("go on from their shadows") == len(deaths), ended.err


@pytest.mark.parametrize("words", [("--workers=2", "--persistent"), ("--workers=1",)])
def test_workers_of_a_loader_are_started_anew_and_make_the_same_batches(launcher, words):
    plain = run(launcher, f"{len(words)} plain", *words, ranks=2)
    deaths = ("1:5:backward", "0:10:validated", "1:12:data", "0:17:stepped")
    told = ("--protect=shadow", "--protect-every=3", *words, "--shadowed", "--die", *deaths)
    ended = run(launcher, f"{len(words)} killed", *told, ranks=2)
    assert results(ended) == results(plain)
    assert ended.err.count("go on from their shadows") == len(deaths), ended.err
    assert "no newer shadows" not in ended.err


def test_a_script_that_changes_a_data_set_of_workers_has_shadows_from_before(launcher):
    told = ("--protect=shadow", "--protect-every=3", "--workers=1", "--odd=told")
    ended = run(launcher, "told", *told, ranks=2)
    assert ended.code == 0, ended
    assert "was changed since its workers began (dataset.calls)" in ended.err
    assert "all that came behind optimizer step 1" in ended.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--odd=thread",), "a copy of the process would lack its threads: writer"),
        (("--workers=1", "--odd=iterable"), "a DataLoader has workers for an IterableDataset"),
        (("--workers=1", "--odd=unordered"), "a DataLoader has in_order=False"),
        (
            ("--workers=1", "--odd=counts"),
            "changes itself in a worker of a DataLoader (dataset.calls)",
        ),
        (("--odd=native",), "a library has threads that a copy of the process would lack: python"),
        (("--odd=shared",), "memory that other processes share"),
        (("--odd=cuda",), "the script uses cuda, which no copy of a process can use"),
        (("--odd=sharded",), "parameters are sharded (FSDP, DTensor), which was not tested"),
        (("--odd=child",), "the script has 1 child process beside workers of torch's DataLoader"),
        (("--odd=send",), "sends from rank to rank"),
        (("--odd=uneven",), "have not begun the same number of collectives"),
    ],
)
def test_what_cannot_be_copied_is_said(launcher, words, reason):
    ended = run(launcher, reason.split()[-1], "--protect=shadow", *words)
    assert ended.code == 0, ended
    (line,) = [line for line in ended.err.splitlines() if "protected" in line]
    assert line.startswith("msrun: not protected: no shadows: ")
    assert reason in line


def test_that_no_newer_copies_are_made_is_said_and_all_go_on_from_the_old_ones(launcher, expected):
    """A thread of the script, from step 6 on, is in no copy: that of step 6 is the last."""
    words = ("--protect=shadow", "--protect-every=5", "--odd=late", "--die", "1:12:backward")
    ended = run(launcher, "shadow", *words)
    assert ended.code == 0, ended
    assert "msrun: partly protected: no newer shadows are made: " in ended.err
    assert "its threads: writer; a death repeats all that came behind optimizer step 6" in ended.err
    assert "from their shadows of optimizer step 6" in ended.err
    assert results(ended) == expected


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("auto", "msrun: protected: a rank that dies is replaced"),
        ("off", "msrun: not protected: --protect=off: if a rank dies, the job ends"),
    ],
)
def test_a_script_with_train_state_has_no_shadows(launcher, mode, said):
    logs = launcher.tmp / mode / "logs"
    told = ("--worker-num=2", f"--protect={mode}", WORKERS / "train_small.py", "--steps=4")
    ended = launcher.run(*told, log_dir=logs)
    assert ended.code == 0, ended
    (line,) = [line for line in ended.err.splitlines() if "protected" in line]
    assert line.startswith(said)
    assert "ShadowsChanged" not in (logs / "events.jsonl").read_text()


def test_a_drill_kills_an_unchanged_script_and_compares_its_ends(launcher):
    kills = ("1:5:forward", "0:8:update", "1:9:backward", "0:11:data")
    words = [f"rank={r},step={s},phase={p}" for r, s, p in (each.split(":") for each in kills)]
    told = (f"--kill={'+'.join([*words, 'rank=1,step=14,delay=0.7'])}", "--json", "--")
    job = ("--worker-num=2", "--protect=shadow", "--protect-every=3", SCRIPT)
    done = launcher.drill(*told, *job)
    content = json.loads(done.out)
    assert content["reference"] | {"took_s": 0} == {
        "steps": 20,
        "took_s": 0,
        "trouble": "",
        "not_deterministic": "",
    }
    (outcome,) = content["drills"]
    assert (outcome["verdict"], outcome["woken"], outcome["restarted"]) == ("nothing lost", 5, 0)


def test_a_death_without_shadows_is_no_success(launcher):
    words = ("--protect=shadow", "--odd=thread", "--die", "1:3:stepped")
    ended = run(launcher, "lost", *words)
    assert ended.code == 1, ended
    assert "go on from their shadows" not in ended.err


def test_shadows_end_with_msrun_and_are_made_at_steps_that_are_measured(launcher):
    folder = launcher.tmp / "orphans"
    folder.mkdir()
    words = ("--worker-num=2", "--protect=shadow", SCRIPT, "--epochs=100", "--pause=0.05")
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder)
    poll(lambda: any(each["every"] > 1 for each in job.seen("ShadowsChanged")))
    scores = {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in shadows(launcher)}
    assert scores == {"1000\n"}  # the kernel takes them first, and no rank
    job.signal(signal.SIGKILL)
    job.wait()
    poll(lambda: not launcher.marked())


def test_shadows_outlive_the_forkserver_and_no_job(launcher, expected):
    folder = launcher.tmp / "forkserver"
    folder.mkdir()
    words = ("--worker-num=3", "--protect=shadow", SCRIPT, "--pause=0.2")
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder)
    job.await_seen("ShadowsChanged")
    os.kill(job.forkserver(), signal.SIGKILL)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert results(ended) == expected
    assert ended.err.count("go on from their shadows") == 1, ended.err
    poll(lambda: not launcher.marked())


@pytest.fixture
def temporary():
    """A folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("who", ["worker", "msrun", "forkserver and msrun"])
def test_of_workers_of_loaders_nothing_is_left_whoever_is_killed(launcher, temporary, who):
    """No process, no part of shared memory, none of the folders in which workers make sockets."""
    before = batches()
    folder = launcher.tmp / who
    folder.mkdir()
    told = ("--worker-num=3", "--protect=shadow", "--protect-every=2", SCRIPT, "--workers=2")
    job = launcher.start(
        *told, "--pause=0.1", log_dir=folder / "logs", cwd=folder, TMPDIR=str(temporary)
    )
    job.await_seen("ShadowsChanged", 2)
    poll(lambda: [*temporary.glob("pymp-*/*")])
    if who == "worker":
        os.kill(poll(lambda: workers(job.pids()[1]))[0], signal.SIGKILL)
        ended = job.wait()
        assert ended.code == 0, ended
        assert ended.err.count("go on from their shadows") == 1, ended.err
    else:
        if who != "msrun":
            os.kill(job.forkserver(), signal.SIGKILL)
        job.signal(signal.SIGKILL)
        job.wait()
    poll(lambda: not launcher.marked())
    assert "forkserver" in who or not [*temporary.glob("pymp-*")]
    assert batches() <= before


def batches() -> set[str]:
    """Names in shared memory that were made by processes that have ended."""
    found = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    return {name for name, by in found.items() if by and not Path(f"/proc/{by[1]}").exists()}


def workers(pid: int) -> list[int]:
    """Of a rank's loaders."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def shadows(launcher: Launcher) -> list[int]:
    names: dict[int, str] = {}
    for pid in launcher.marked():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names[pid] = Path(f"/proc/{pid}/comm").read_text()
    return [pid for pid, name in names.items() if name == "msrun-shadow\n"]
