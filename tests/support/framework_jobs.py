"""Jobs of the frameworks' samples: ``plain.py`` alone, ``protected.py`` under msrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.jobs import DEADLINE_S, ROOT, Ended, Launcher
from support.warm_python import train
from worker_hooks.drill.plan import DrillPlan, Fault

SAMPLES = ROOT / "scripts/samples"
TORCHRUN = Path(sys.executable).with_name("torchrun")


def result(ended: Ended) -> list[str]:
    """What the sample prints at its end, of each rank: digests of weights and of the history."""
    assert ended.code == 0, ended
    found = re.findall(r"(weights and history .*)", ended.out)
    assert found, ended
    return sorted(found)


def torchrun(launcher: Launcher, script: Path, *arguments: str) -> Ended:
    """The script in two ranks that torchrun starts."""
    folder = launcher.tmp / f"by-torchrun-{script.stem}"
    folder.mkdir()
    done = subprocess.run(
        [TORCHRUN, "--standalone", "--nproc-per-node=2", script, *arguments],
        cwd=folder,
        env=launcher.env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def alone(launcher: Launcher, script: Path) -> Ended:
    """The script in two ranks that nobody guards."""
    folder = launcher.tmp / f"alone-{script.stem}"
    return Ended(0, "".join(train(launcher.python, folder, 2, script)), "")


def struck(
    launcher: Launcher, script: Path, name: str, faults: Sequence[Fault], *options: str
) -> Ended:
    """The script in two ranks that msrun starts, with these faults; all of them strike."""
    folder = launcher.tmp / name
    (folder / "traces").mkdir(parents=True)
    plan = DrillPlan(str(folder / "traces"), "", tuple(faults))
    words = ("--worker_num=2", *options, script)
    ended = launcher.run(
        *words, log_dir=folder / "logs", cwd=folder, within_s=300, MSRUN_DRILL=plan.encode()
    )
    assert [n for n in range(len(faults)) if not plan.layout.struck(n).exists()] == [], ended
    return ended
