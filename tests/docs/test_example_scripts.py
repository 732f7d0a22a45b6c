"""The complete scripts of README and of the manual, run as their readers would run them."""

from __future__ import annotations

import os
import re
import signal

import pytest
from support.documents import blocks, marked, patched
from support.jobs import Ended, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPTS = [block for block in blocks("python") if block.marker.startswith("script ")]
GUIDE = [block for block in SCRIPTS if block.page != "README.md"]
EPOCHS = 10  # the kill is behind the second: so many are left for it to arrive in


def of(marker: str) -> list:
    """The guide's scripts that are marked so, as parameters."""
    found = [block for block in GUIDE if block.marker.partition(", ")[2] == marker]
    assert found
    return [pytest.param(block.text, id=block.name) for block in found]


def ran(
    msrun: Launcher, text: str, name: str, ranks: int = 2, *options: str, killed: bool = False
) -> Ended:
    """A job of this script; ``killed``: rank 1 is, once rank 0 has printed some figures."""
    (msrun.tmp / "train.py").write_text(text)
    arguments = (f"--epochs={EPOCHS}",) if "--epochs" in text else ()
    words = (f"--worker_num={ranks}", *options, "train.py", *arguments)
    job = msrun.start(*words, log_dir=msrun.tmp / name)
    if killed:
        job.await_lines("epoch 2 " if arguments else "step 200 ")
        os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait(200)
    assert ended.code == 0, ended
    return ended


def figures(ended: Ended) -> list[str]:
    """What rank 0 printed; what is printed twice, after a replacement, counts once."""
    printed = re.findall(r"^\[rank 0\]: ((?:epoch|step) .*)$", ended.out, re.MULTILINE)
    return list(dict.fromkeys(printed))


def test_readmes_script_survives_a_kill_and_ends_like_the_unchanged_one(msrun):
    script, diff = marked("script", "train.py").text, marked("diff", "train.py").text
    undisturbed = figures(ran(msrun, script, "unchanged", 4))
    assert len({line.split(" loss ")[0] for line in undisturbed}) == EPOCHS
    killed = ran(msrun, patched(script, diff), "killed", 4, killed=True)
    assert figures(killed) == undisturbed
    for line in marked("output", "kill").text.splitlines():
        promised = re.sub(r"step\\ \d+", "step [0-9]+", re.escape(line))
        promised = re.sub(r"\d+\\\.\d+\\ s", "[0-9.]+ s", promised)
        assert re.search(promised, killed.err), (promised, killed.err)
    assert "lost its connection" not in killed.out
    assert "RuntimeError" not in killed.out  # what a peer raises because of the death


@pytest.mark.parametrize("text", of(""))
def test_a_script_runs(msrun, text):
    ran(msrun, text, "logs")


@pytest.mark.parametrize("text", of("killed"))
def test_a_protected_script_ends_as_if_no_rank_had_been_killed(msrun, text):
    undisturbed = figures(ran(msrun, text, "undisturbed"))
    killed = ran(msrun, text, "killed", killed=True)
    assert "replacing it, rank 0 keeps running" in killed.err
    assert figures(killed) == undisturbed


@pytest.mark.parametrize("text", of("restarted"))
def test_a_script_whose_ranks_are_restarted_ends_as_if_none_had_been_killed(msrun, text):
    undisturbed = figures(ran(msrun, text, "undisturbed"))
    killed = ran(msrun, text, "killed", 2, "--max-restarts=1", killed=True)
    assert "restart 1 of 1" in killed.err
    assert figures(killed) == undisturbed


@pytest.mark.parametrize("text", of("stopped"))
def test_a_script_that_is_stopped_saves_its_step(msrun, text):
    (msrun.tmp / "train.py").write_text(text)
    job = msrun.start("--worker_num=2", "train.py")
    job.await_lines("loss ")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    (saved,) = (msrun.tmp / "checkpoints").glob("tft_saved_checkpoints-step_*")
    assert str(saved) in ended.err
