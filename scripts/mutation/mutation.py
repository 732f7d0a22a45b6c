"""Runs the unit tests of a file against mutants of it, to find mistakes that nobody would notice.

Never in the working tree: each of the processes has a copy of it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from queue import SimpleQueue

from mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # for the tests without a mutant
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MEMORY = 8 << 30  # bytes of a process: a loop without an end is to fail soon

Runs = tuple[tuple[str, ...], ...]  # arguments of Python; a later one if all before end well

PYTEST = ("-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow")
SCHEDULES = ("-c", "from support.simulator.node import census; census(0, 3_000)")
HOOKS = "tests/unit/worker_hooks"
TESTS: dict[str, Runs] = {
    "agent/controller": ((*PYTEST, "tests/unit/agent/controller"), SCHEDULES),
    "agent/dump/draft.py": ((*PYTEST, "tests/unit/agent/dump"),),
    "worker_hooks/guard/gate.py": ((*PYTEST, f"{HOOKS}/guard"),),
    "worker_hooks/state/committed_state.py": (
        (*PYTEST, *(f"{HOOKS}/{each}" for each in ("training", "guard", "state", "recovery"))),
    ),
    "worker_hooks/storage/retention.py": (
        (*PYTEST, f"{HOOKS}/storage/test_retention.py"),
        (*PYTEST, f"{HOOKS}/checkpoint", "tests/unit/msrun/checkpoints"),
    ),
}
Job = tuple[str, Mutant]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help="default: all that have tests in the table TESTS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="mutants, dealt out over the files")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    options = parser.parse_args()
    jobs = chosen(options.files or all_files(), options.seed, options.count)
    if options.list:
        print("\n".join(described(*job) for job in jobs))
        return 0
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory(prefix="msrun-mutants-") as folder:
        return report(list(run_all(jobs, Path(folder))))


def all_files() -> list[str]:
    found = chain.from_iterable(
        [path] if (path := ROOT / each).is_file() else sorted(path.glob("*.py")) for each in TESTS
    )
    return [str(path.relative_to(ROOT)) for path in found]


def chosen(files: list[str], seed: int, count: int) -> list[Job]:
    """So many mutants, of each file in turn one, without those known to be equivalent."""
    known = {(one["file"], one["was"], one["becomes"]) for one in equivalent()}
    dealt = []
    for file in files:
        found = mutants((ROOT / file).read_text())
        for gone in known - {(file, one.was, one.becomes) for one in found}:
            if gone[0] == file:
                print("in equivalent.toml, but no mutant any more:", *gone)
        left = [(file, one) for one in found if (file, one.was, one.becomes) not in known]
        random.Random(f"{seed} {file}").shuffle(left)
        dealt.append(left)
    jobs = chain.from_iterable(zip_longest(*dealt))
    return [job for job in jobs if job is not None][:count]


def equivalent() -> list[dict[str, str]]:
    """Mutants that behave like the code, and why."""
    found: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return found


def run_all(jobs: list[Job], folder: Path) -> Iterator[tuple[Job, bool]]:
    """Two at a time; yields whether each survived."""
    originals = {file: (ROOT / file).read_text() for file, _ in jobs}
    all_runs = {runs_of(file) for file in originals}
    copies: SimpleQueue[Path] = SimpleQueue()
    limits_s: dict[Runs, float] = {}

    def prepare(copy: Path) -> None:
        _copy_tree(copy)
        for runs in all_runs:
            began_s = time.monotonic()
            if not passes(copy, runs, LIMIT_S, {}):
                raise SystemExit(f"without a mutant these fail: {runs}")
            limits_s[runs] = 30 + 4 * (time.monotonic() - began_s)
        copies.put(copy)

    def survives(job: Job) -> bool:
        file, mutant = job
        copy, runs = copies.get(), runs_of(file)
        try:
            (copy / file).write_text(mutant.text)
            # no bytecode: a file that is changed twice in a second may look the same
            return passes(copy, runs, limits_s[runs], {"PYTHONDONTWRITEBYTECODE": "1"})
        finally:
            (copy / file).write_text(originals[file])
            copies.put(copy)

    pool = ThreadPoolExecutor(2)
    try:
        list(pool.map(prepare, [folder / "one", folder / "other"]))
        for job, survived in zip(jobs, pool.map(survives, jobs), strict=True):
            print("SURVIVED" if survived else "killed  ", described(*job), flush=True)
            yield job, survived
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C


def _copy_tree(copy: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def runs_of(file: str) -> Runs:
    return next(runs for path, runs in TESTS.items() if file == path or file.startswith(f"{path}/"))


def passes(copy: Path, runs: Runs, within_s: float, environ: dict[str, str]) -> bool:
    """Whether all tests pass in this copy. A hang is noticed by people: it counts as a failure."""
    deadline = time.monotonic() + within_s
    path = os.pathsep.join((str(copy), str(copy / "tests")))
    for arguments in runs:
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path, **environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if code != 0:
            return False
    return True


def described(file: str, mutant: Mutant) -> str:
    return f"{file}:{mutant.line}\n    - {mutant.was}\n    + {mutant.becomes}"


def report(results: list[tuple[Job, bool]]) -> int:
    made, killed = Counter(), Counter()
    for (file, _), survived in results:
        made[file] += 1
        killed[file] += not survived
    print()
    for file in made:
        print(f"{killed[file]:4} of {made[file]:3} killed  {file}")
    share = killed.total() / max(made.total(), 1)
    print(f"{killed.total():4} of {made.total():3} killed: {share:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
