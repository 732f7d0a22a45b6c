"""Jobs that run the many kinds of scripts in `train_kinds.py`, and what came of them bit by bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from msrun.drill.fault_options import read_words
from support.jobs import WORKERS, Ended, Launcher
from worker_hooks.drill.plan import DrillPlan

SCRIPT = WORKERS / "train_kinds.py"
RANKS = 3


class Run(NamedTuple):
    """A job that ended, and the folder it worked in."""

    ended: Ended
    folder: Path

    def results(self, kind: str, ranks: int = RANKS, out: str = "out") -> list[dict]:
        """Of each rank all losses, and digests of all that it held at the end."""
        return [
            {**noted(self.folder / out / f"{kind}.{rank}.jsonl"), **json.loads(path.read_bytes())}
            for rank in range(ranks)
            for path in [self.folder / out / f"{kind}.{rank}.json"]
        ]

    def kinds(self) -> list[str]:
        """All that came to an end."""
        return sorted(
            path.name.removesuffix(".0.json") for path in self.folder.glob("out/*.0.json")
        )


def all_kinds() -> list[str]:
    """Their names, as the scripts declare them: without an import of torch."""
    found = []
    for file in sorted(WORKERS.glob("kinds_of_*.py")):
        text = file.read_text().partition("\nKINDS = {")[2]
        lines = [line.strip() for line in text.splitlines()]
        found += [line.rstrip(",") for line in lines if line.rstrip(",").isidentifier()]
        found += [
            line.partition('"')[2].partition('"')[0] for line in lines if line.startswith('"')
        ]
    return found


def noted(path: Path) -> dict:
    """Losses by the place they came about at; a step that was repeated says them twice."""
    found = {}
    for line in path.read_text().splitlines():
        found |= json.loads(line)
    return found


def run(launcher: Launcher, folder: Path, *words: object, **environ: str) -> Run:
    """A program, to its end."""
    folder.mkdir()
    with open(folder / "console", "w+b") as console:
        done = subprocess.run(
            [*map(str, words)],
            env=launcher.env(**{"XDG_STATE_HOME": str(folder / "state"), **environ}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            timeout=200,
            check=False,
        )
    return Run(Ended(done.returncode, (folder / "console").read_text(), ""), folder)


def msrun_of(launcher: Launcher, *words: object) -> tuple[object, ...]:
    return (*launcher.python, "-m", "msrun", "--log_dir=logs", *words)


def killed(
    launcher: Launcher, kind: str, fault: str, *options: str, name: str = "", **environ: str
) -> Run:
    """A job with these faults, that may replace one rank and restart once."""
    folder = launcher.tmp / (name or kind)
    faults = read_words(fault, "kill").faults if fault else ()
    plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), faults)
    told = (f"--worker_num={RANKS}", "--max-restarts=1", "--max_replacements=1")
    words = msrun_of(launcher, *told, *options, SCRIPT, "out", f"--kind={kind}")
    prelude = 'mkdir traces ckpt && exec "$@"'
    environ = {"MSRUN_DRILL": plan.encode(), **environ}
    return run(launcher, folder, "sh", "-c", prelude, "sh", *words, **environ)
