"""Random kills of six scripts; each job must end bit for bit as the plain script that nobody disturbs.

``framework_torture.py KILLS [SEED]`` goes round the samples with adapters, and plain DDP, Hugging
Face's Trainer and Lightning with shadows, until each had so many kills. No test: it takes an hour.
A job has many kills: at any moment, of all ranks at once, of rank 0, while ranks come back, and where
a rank finds the order for one: as it forks, begins or ends a validation, or ends an epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.framework_jobs import SAMPLES, TORCHRUN
from support.jobs import ROOT, WORKERS, Job

RANKS = 2
MOST_S = 420.0  # for a job
DDP = (WORKERS / "train_unhooked.py", "--workers=2", "--epochs=12", "--pause=0.05")
ADAPTED, COPIED = "--max-restarts=50", "--protect=shadow"
SCRIPTS: dict[str, tuple[tuple[object, ...], tuple[object, ...], str, str]] = {
    # the plain one, the other, its option, what is preloaded
    "hf adapter": (
        (SAMPLES / "hugging_face/plain.py", "--epochs=12"),
        (SAMPLES / "hugging_face/protected.py", "--epochs=12"),
        *(ADAPTED, "transformers.trainer"),
    ),
    "lightning adapter": (
        (SAMPLES / "lightning/plain.py", "--epochs=60"),
        (SAMPLES / "lightning/protected.py", "--epochs=60"),
        *(ADAPTED, "lightning.pytorch"),
    ),
    "accelerate adapter": (
        (SAMPLES / "accelerate/plain.py", "--epochs=60"),
        (SAMPLES / "accelerate/protected.py", "--epochs=60"),
        *(ADAPTED, "accelerate"),
    ),
    "ddp shadows": (DDP, DDP, COPIED, "torch"),
    "hf shadows": (
        *(((SAMPLES / "hugging_face/plain.py", "--epochs=12"),) * 2),
        *(COPIED, "transformers.trainer"),
    ),
    "lightning shadows": (
        *(((SAMPLES / "lightning/plain.py", "--epochs=60"),) * 2),
        *(COPIED, "lightning.pytorch"),
    ),
}


def result(out: str) -> list[str]:
    """What the ranks print at their end; a rank that dies behind that prints it again."""
    return sorted(set(re.findall(r"(?:weights and history|result of rank) .*", out)))


def environ(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN")}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    state = {"XDG_STATE_HOME": str(folder / "state"), "KILL_ORDERS": str(folder / "orders")}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **state}


def expected(name: str, folder: Path) -> list[str]:
    folder.mkdir()
    words = [str(word) for word in SCRIPTS[name][0]]
    command = [str(TORCHRUN), "--standalone", f"--nproc-per-node={RANKS}", *words]
    done = subprocess.run(
        command, cwd=folder, env=environ(folder), capture_output=True, text=True, check=True
    )
    return result(done.stdout)


def kill(job: Job, ranks: list[int]) -> int:
    """Kill these ranks' present processes; how many there were."""
    pids, count = job.pids(), 0
    for rank in ranks:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(pids[rank], 9)
            count += 1
    return count


def ordered(job: Job, folder: Path, moment: str, rank: int, after_s: float) -> int:
    """Have a rank kill itself at a moment; whether it came to one."""
    order = folder / "orders" / f"{moment}.{rank}"
    Path(f"{order}.new").write_text(str(after_s))
    Path(f"{order}.new").rename(order)
    until = time.monotonic() + 12
    while order.exists() and job.process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    left = order.exists()
    order.unlink(missing_ok=True)
    return 0 if left else 1


def disturb(job: Job, folder: Path, lots: random.Random, moment: str) -> int:
    """One disturbance; how many kills it was."""
    rank = lots.randrange(RANKS)
    if moment == "any":
        return kill(job, [rank])
    if moment == "first":
        return kill(job, [0])
    if moment == "all":
        return kill(job, [*range(RANKS)])
    if moment == "coming back":
        before, count = len(job.seen("WorkerStarted")), kill(job, [rank])
        until = time.monotonic() + 10
        while len(job.seen("WorkerStarted")) == before and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(lots.uniform(0, 0.25))
        return count + kill(job, [job.seen("WorkerStarted")[-1]["rank"]])
    return ordered(job, folder, moment, rank, lots.choice([0.0, lots.uniform(0.0002, 0.02)]))


def may_disturb(job: Job, is_copied: bool, newest: int) -> int:
    """A step above ``newest`` if the job has moved on since the last disturbance; else 0."""
    status = job.status()
    if status["state"] != "running" or len(job.pids()) < RANKS:
        return 0
    if is_copied:
        told = [
            each for each in job.events() if each["event"] in {"ShadowsWoken", "ShadowsChanged"}
        ]
        return newest + 1 if told and told[-1]["event"] == "ShadowsChanged" else 0
    step = min(int(each.get("step") or 0) for each in status["workers"])
    return step if step > newest else 0


def run(name: str, seed: int, folder: Path) -> tuple[int, list[str]]:
    """One job; how many kills, and what it printed."""
    _, words, option, preload = SCRIPTS[name]
    lots = random.Random(seed)
    (folder / "orders").mkdir(parents=True)
    is_copied = option == COPIED
    options = [option, f"--preload={preload},support.kill_orders", f"--log-dir={folder / 'logs'}"]
    if is_copied and (every := lots.choice([0, 0, 5, 20])):
        options.append(f"--protect-every={every}")
    moments = ["any", "any", "first", "all", "coming back", "eval", "end"]
    moments += ["fork", "forked"] if is_copied else []
    command = [sys.executable, "-m", "msrun", f"--worker-num={RANKS}", *options, *map(str, words)]
    began, kills, newest = time.monotonic(), 0, 0
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ(folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        job = Job(process, folder / "logs", "")
        while process.poll() is None and time.monotonic() < began + MOST_S:
            time.sleep(lots.uniform(0.6, 2.2))
            if step := may_disturb(job, is_copied, newest):
                newest = step
                kills += disturb(job, folder, lots, lots.choice(moments))
        if process.poll() is None:
            process.kill()
        process.wait()
    return kills, result((folder / "out").read_text()) if not process.returncode else []


def main(wanted: int, seed: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    right = {name: expected(name, folder / name) for name in SCRIPTS}
    total, wrong = dict.fromkeys(SCRIPTS, 0), 0
    while todo := [name for name in SCRIPTS if total[name] < wanted]:
        for name in todo:
            here = folder / f"{name} {seed}"
            kills, found = run(name, seed, here)
            total[name] += max(kills, 1)
            is_right = found == right[name]
            wrong += not is_right
            said = "" if is_right else f": ends otherwise, see {here}"
            print(json.dumps({"script": name, "seed": seed, "kills": kills}) + said, flush=True)
        seed += 1
    print(total, f"{wrong} ended otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
