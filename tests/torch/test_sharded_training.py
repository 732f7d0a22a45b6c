"""Weights that are cut over ranks: after a death, or an exit, they are bitwise those of an undisturbed training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.jobs import Ended, Job, Launcher
from support.sharded_trainings import SCRIPT, Undisturbed, undisturbed_digests
from support.warm_python import WarmPython

from msrun import restore_group_info_list

pytestmark = [pytest.mark.torch, pytest.mark.warm]
STEPS, DEATH = 30, 20  # by then the ranks vote on each update
STYLES = ["hsdp", "tpdp", "fsdp", "moe"]
NOT_ALONE = "--max_replacements=0"


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, warm_python: WarmPython) -> Undisturbed:
    return undisturbed_digests(launcher.tmp, warm_python, STEPS)


def started(launcher: Launcher, name: str, *words: object) -> tuple[Job, Path]:
    folder = launcher.tmp / name
    folder.mkdir(exist_ok=True)
    environ = {"XDG_STATE_HOME": str(folder / "state"), "GROUP_INFO_FILE": "info.pb"}
    return launcher.start(*words, log_dir=folder / "logs", cwd=folder, **environ), folder


def killed(
    launcher: Launcher,
    style: str,
    where: str,
    *more: str,
    option: str = NOT_ALONE,
    ranks: str = "1",
) -> tuple[Ended, Path]:
    words = "--worker_num=4", "--max-restarts=1", option, SCRIPT, style, STEPS, *more
    name = "".join([style, where, *more, option, ranks])
    job, folder = started(launcher, name, *words, "--die", ranks, DEATH, where)
    ended = job.wait()
    assert ended.code == 0, ended
    return ended, folder


@pytest.mark.parametrize(("where", "saved"), [("backward", DEATH - 1), ("update", DEATH)])
@pytest.mark.parametrize("style", ["hsdp", "tpdp"])
def test_where_each_part_is_held_twice_a_death_costs_no_step(
    launcher: Launcher, undisturbed: Undisturbed, style: str, where: str, saved: int
) -> None:
    ended, folder = killed(launcher, style, where)
    said = ended.err
    promise = said.index(f"partly protected: replacing is off ({NOT_ALONE}); a death means save")
    assert promise < said.index("rank 1 was killed by SIGKILL"), said
    assert f"step {saved} saved by ranks " in said
    assert "1 restart, 0 steps and " in said
    assert (folder / f"{style}.sha").read_text() == undisturbed(style)


@pytest.mark.parametrize("where", ["backward", "update"])
@pytest.mark.parametrize("style", ["hsdp", "tpdp"])
def test_where_each_part_is_held_twice_the_dead_rank_alone_is_replaced(
    launcher: Launcher, undisturbed: Undisturbed, style: str, where: str
) -> None:
    ended, folder = killed(launcher, style, where, option="--max_replacements=1")
    said = ended.err
    promise = said.index("protected: a rank that dies is replaced, no step is lost")
    assert promise < said.index("rank 1 was killed by SIGKILL"), said
    assert "replacing it, ranks 0,2-3 keep running" in said
    assert "1 rank replaced, 0 steps and " in said
    assert (folder / f"{style}.sha").read_text() == undisturbed(style)


@pytest.mark.parametrize(
    ("ranks", "where", "option", "says"),
    [
        ("1+2", "backward", "--max_replacements=2", "2 ranks replaced, 0 steps and "),
        ("0+3", "update", "--max_replacements=2", "2 ranks replaced, 0 steps and "),
        ("2", "update", "--max_replacements=2", "1 rank replaced, 0 steps and "),
        ("1+2", "backward", NOT_ALONE, "1 restart, 0 steps and "),
    ],
)
def test_where_each_tensor_is_held_twice_though_no_rank_is_a_death_costs_no_step(
    launcher: Launcher, undisturbed: Undisturbed, ranks: str, where: str, option: str, says: str
) -> None:
    ended, folder = killed(launcher, "moe", where, option=option, ranks=ranks)
    said = ended.err
    assert said.index("rotected: ") < said.index(" killed by SIGKILL"), said
    assert says in said
    assert (folder / "moe.sha").read_text() == undisturbed("moe")


@pytest.mark.parametrize(
    ("style", "where", "saved", "more"),
    [
        ("hsdp", "backward", DEATH - 1, ()),
        ("hsdp", "backward", DEATH - 1, ("--foreach",)),
        ("hsdp", "update", DEATH, ("--foreach",)),
        ("tpdp", "backward", DEATH - 1, ("--foreach",)),
    ],
)
def test_weights_that_change_outside_of_updates_are_saved_as_of_the_commit(
    launcher: Launcher,
    warm_python: WarmPython,
    style: str,
    where: str,
    saved: int,
    more: tuple[str, ...],
) -> None:
    more = f"--shrink={DEATH - 3}", *more
    undisturbed = launcher.tmp / f"{style}{where}-shrunk"
    warm_python.train(undisturbed, 4, SCRIPT, style, STEPS, *more)
    ended, folder = killed(launcher, style, where, *more)
    assert f"step {saved} saved by ranks " in ended.err
    assert (folder / f"{style}.sha").read_text() == (undisturbed / f"{style}.sha").read_text()


def test_where_each_part_is_held_once_a_death_costs_what_was_said_before(
    launcher: Launcher, undisturbed: Undisturbed
) -> None:
    ended, folder = killed(launcher, "fsdp", "backward", option="--protect-memory=off")
    said = ended.err
    warning = said.index("not protected: ")
    assert warning < said.index(" is cut over ranks 0, 1, 2, 3") < said.index("SIGKILL"), said
    assert said.index("if a rank dies, training resumes from the newest") < said.index("SIGKILL")
    assert f"step {DEATH - 1} is not saved: " in said
    assert (folder / "fsdp.sha").read_text() == undisturbed("fsdp")


@pytest.mark.parametrize("style", STYLES)
def test_a_graceful_exit_is_resumed_bitwise(
    launcher: Launcher, undisturbed: Undisturbed, style: str
) -> None:
    words = "--worker_num=4", SCRIPT, style, STEPS, "--pause=0.05"
    job, folder = started(launcher, f"{style}-left", *words)
    job.await_lines("step 2\n", 4)
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    assert " saved by ranks " in ended.err
    is_lone = style in {"fsdp", "moe"}  # each rank holds what no other one does
    groups = [[0], [1], [2], [3]] if is_lone else [[0, 2], [1, 3], [0, 2], [1, 3]]
    told = [restore_group_info_list(str(folder / f"rank_{rank}/info.pb")) for rank in range(4)]
    assert told == groups
    ended = started(launcher, f"{style}-left", "--resume")[0].wait()
    assert ended.code == 0, ended
    assert (folder / f"{style}.sha").read_text() == undisturbed(style)
