"""What msrun promises, tried on versions of torch and Python; the answer is a table.

``matrix.py [TORCH:PYTHON ...]``; by default every torch with the oldest Python, and the newest with
every Python. Each pair has an environment of its own in ``$XDG_CACHE_HOME/msrun-matrix``, several
GB large where pip finds no build of torch for the CPU alone. A version holds, or it lacks what
msrun needs and a run says so in its first line; any other is a failure, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]
TORCHES = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
PYTHONS = ("3.11", "3.12", "3.13")
EXACT = "tests/torch/test_drill_exactness.py::"
REPLACED = "tests/torch/test_replacements.py"
TRIALS = {  # the quick tests, a test of each way to survive a death, and a drill
    "quick": ("scripts/test", "quick"),
    "DDP order": ("scripts/test", "tests/torch/test_ddp_bucket_order.py"),
    "replaced": ("scripts/test", REPLACED, "-k", "nothing_is_lost or replaced_alone"),
    "restarted": (
        "scripts/test",
        f"{EXACT}test_a_death_in_every_phase_and_of_every_rank_loses_nothing",
    ),
    "msrun killed": ("scripts/test", f"{EXACT}test_the_death_of_msrun_itself_loses_nothing"),
    "graceful exit": (
        "scripts/test",
        f"{EXACT}test_a_graceful_exit_loses_nothing_and_neither_does_a_preemption",
    ),
    "drill": ("scripts/drill", "--random=4", "--seed=1"),
}
HOLDS, SAYS = "holds", "says that it promises nothing: "
ASK = (
    "import platform, torch; from worker_hooks.training.torch_names import *; "
    "print(torch.__version__, platform.python_version(), why_nothing_is_promised(), sep='\\n')"
)


class Pair(NamedTuple):
    """Versions to try."""

    torch: str
    python: str

    @property
    def venv(self) -> Path:
        """Its environment."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache, "msrun-matrix", f"torch-{self.torch}-python-{self.python}")

    @property
    def log(self) -> Path:
        """What its trials printed."""
        return self.venv.with_name(f"{self.venv.name}.log")


class Row(NamedTuple):
    """What came of a pair."""

    torch: str
    python: str
    trials: tuple[str, ...]  # what each said, in the order of TRIALS
    verdict: str

    @property
    def is_good(self) -> bool:
        """Whether nothing can be wrong without a word."""
        return self.verdict == HOLDS or self.verdict.startswith(SAYS)

    def __str__(self) -> str:
        return line(self.torch, self.python, *self.trials, self.verdict)


def pairs_of(words: Sequence[str]) -> list[Pair]:
    """The pairs to try.

    Raises:
        SystemExit: a word is none.
    """
    if not words:
        every = [Pair(torch, PYTHONS[0]) for torch in TORCHES]
        return every + [Pair(TORCHES[-1], python) for python in PYTHONS[1:]]
    split = [word.split(":") for word in words]
    if any(len(parts) != 2 or not all(parts) for parts in split):  # noqa: PLR2004  of a pair
        sys.exit("scripts/test matrix: a pair is TORCH:PYTHON, as in 2.14.1:3.13")
    return [Pair(*parts) for parts in split]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head() -> Iterator[str]:
    names = ("torch", "Python", *TRIALS, "")
    yield line(*names)
    yield line(*("---" for _ in names))


def interpreter(version: str) -> str:
    """A Python of this version, from the path or from pyenv; empty: there is none."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{version}"), *root.glob(f"versions/{version}*/bin/python")]
    return next((str(one) for one in found if one and is_of(str(one), version)), "")


def is_of(python: str, version: str) -> bool:
    """Whether it runs at all: a shim of pyenv may not."""
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{done.stdout.strip()}.".startswith(f"{version}.")


def tried(pair: Pair) -> Row:
    """Try a pair; a failure ends nothing."""
    nothing = ("-",) * len(TRIALS)
    python = interpreter(pair.python)
    if not python:
        return Row(*pair, nothing, "this Python is not on the machine")
    pair.venv.parent.mkdir(parents=True, exist_ok=True)
    pair.log.write_text("")
    told = {"MSRUN_VENV": str(pair.venv), "MSRUN_TORCH": pair.torch, "PYTHON": python}
    environ = os.environ | told
    if not runs(pair, ["scripts/install"], environ):
        return Row(*pair, nothing, f"cannot be installed: {last_line(pair.log)}")
    words = [str(pair.venv / "bin/python"), "-c", ASK]
    asked = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
    if asked.returncode:
        return Row(*pair, nothing, f"cannot be imported: {asked.stderr.splitlines()[-1]}")
    torch, version, why = asked.stdout.split("\n")[:3]
    if why:
        return Row(torch, version, nothing, SAYS + why)
    outcomes = {name: runs(pair, words, environ) for name, words in TRIALS.items()}
    return Row(torch, version, tuple(map(word, outcomes.values())), verdict(outcomes))


def word(is_good: bool) -> str:
    return "ok" if is_good else "FAILED"


def verdict(outcomes: dict[str, bool]) -> str:
    failed = [name for name, is_good in outcomes.items() if not is_good]
    return f"fails: {', '.join(failed)}" if failed else HOLDS


def runs(pair: Pair, words: Iterable[str], environ: dict[str, str]) -> bool:
    """Run a script of the repository, its output in the pair's log."""
    with pair.log.open("a") as log:
        log.write(f"\n$ {' '.join(words)}\n")
        log.flush()
        done = subprocess.run([*words], cwd=REPO, env=environ, stdout=log, stderr=log, check=False)
    return done.returncode == 0


def last_line(log: Path) -> str:
    lines = [each for each in log.read_text().splitlines() if each.startswith("ERROR")]
    return lines[-1].removeprefix("ERROR: ") if lines else f"see {log}"


def main() -> None:
    rows = []
    for text in head():
        print(text, flush=True)
    for pair in pairs_of(sys.argv[1:]):
        rows.append(tried(pair))
        print(rows[-1], flush=True)
    print(f"logs and environments are in {pair.venv.parent}")
    sys.exit(not all(row.is_good for row in rows))


if __name__ == "__main__":
    main()
