"""What proves msrun on accelerators is itself proved on gloo, as nobody here has any."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.jobs import DEADLINE_S, ROOT, Launcher

pytestmark = pytest.mark.torch
CHECK = ROOT / "scripts/devices/check.py"


def checked(launcher: Launcher, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHECK, *words],
        cwd=launcher.tmp,
        env=launcher.env(),
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )


def test_a_row_is_a_drill_with_its_verdict(msrun: Launcher) -> None:
    words = ("--device=cpu", "--ranks=2", "--only=average of weights", "--json=table.json")
    done = checked(msrun, *words)
    assert done.returncode == 0, done
    (row,) = json.loads((msrun.tmp / "table.json").read_text())["rows"]
    assert row["is_good"], row
    assert "1 replaced, trains again after " in row["more"]
    assert "| kill, average of weights |" in done.stdout


def test_without_an_accelerator_it_says_so(msrun: Launcher) -> None:
    done = checked(msrun)
    assert done.returncode == 2
    assert "torch finds no accelerator here; --device cpu rehearses" in done.stderr
