"""The benchmarks' own arithmetic, and what they say of a wrong command line."""

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3] / "scripts/benchmarks"
sys.path.insert(0, str(HERE))  # as for a script in that folder

import nodes  # noqa: E402
import peers_install  # noqa: E402
import peers_outcome  # noqa: E402
import replacement  # noqa: E402
import step_board  # noqa: E402
from peers_outcome import Outcome  # noqa: E402
from rows import Goal, Result, Row, Samples  # noqa: E402
from turns import Measured  # noqa: E402
from workers.board import Finished, add, opened  # noqa: E402


def bench(what: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = HERE / f"{what}.py"
    return subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, check=False
    )


def result(
    goal: Goal, left: tuple[float, ...], right: tuple[float, ...], failed: int = 0
) -> Result:
    row = Row("key", "what", lambda _: {}, goal=goal)
    return Result(row, Samples(left), Samples(right, failed))


@pytest.mark.parametrize("what", ["launch", "recover", "peers"])
def test_help_names_every_row(what):
    said = bench(what, "--help")
    assert said.returncode == 0
    keys = {"launch": "init", "recover": "memory-fds", "peers": "--keep"}
    assert keys[what] in said.stdout
    assert not said.stderr


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--rows", "dump,nosuch"], "no row nosuch; there are dump, again"),
        (["--kills", "0"], "--kills must be at least 1"),
        (["--nproc", "1"], "--nproc 2: a survivor saves"),
        (["--json", "/nosuch/folder/x.json"], "there is no folder /nosuch/folder"),
        (["--replacements", "5"], "--replacements must be more than 5"),
        (["--left", "torchrun"], "unrecognized arguments"),
    ],
)
def test_recover_refuses_and_starts_nothing(words, complaint):
    said = bench("recover", *words)
    assert said.returncode == 2
    assert complaint in said.stderr
    assert not said.stdout


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--runs", "0"], "--runs must be at least 1"),
        (["--keep", __file__], "is no folder"),
        (["--json", "/nosuch/folder/x.json"], "there is no folder /nosuch/folder"),
    ],
)
def test_peers_refuses_and_installs_nothing(words, complaint):
    said = bench("peers", *words)
    assert said.returncode == 2
    assert complaint in said.stderr
    assert not said.stdout


@pytest.mark.parametrize(
    "goal, left, right, failed, reached",
    [
        (Goal(), (1,), (), 3, None),
        (Goal(below=150), (), (149,), 0, True),  # no other side
        (Goal(below=150), (), (150,), 0, False),
        (Goal(below=150), (), (), 3, False),
        (Goal(5), (50, 60), (10, 12), 0, True),
        (Goal(5), (50,), (11,), 0, False),
        (Goal(5), (), (11,), 0, False),  # nothing to compare with
        (Goal(zero=True), (24,), (0, 0), 0, True),
        (Goal(zero=True), (24,), (0, 0, 1), 0, False),  # the median alone would be 0
        (Goal(zero=True), (), (), 0, False),
        (Goal(within=0.02), (), (0.98, 1.02, 1.0), 0, True),
        (Goal(within=0.02), (), (0.97,), 0, False),
        (Goal(within=0.02), (), (1.03,), 0, False),
        (Goal(zero=True, always=True), (24,), (0, 0), 1, False),
    ],
)
def test_a_goal(goal, left, right, failed, reached):
    assert result(goal, left, right, failed).reached is reached


def board(*lines: tuple[float, int, int, int, int, int]) -> list[Finished]:
    """Lines in the order of their time: when, rank, attempt, process, step, batch."""
    return [
        Finished(rank, attempt, pid, step, batch, at_s)
        for at_s, rank, attempt, pid, step, batch in lines
    ]


BEFORE = board((1, 0, 0, 10, 57, 56), (1, 1, 0, 11, 57, 56))
KILLED_S = 2


@pytest.mark.parametrize(
    "since, expected, steps_lost, left_out",
    [
        # rank 1 replaced alone, the interrupted step repeated
        (
            [(3, 0, 1, 10, 58, 57), (3.1, 1, 1, 12, 58, 57)],
            step_board.Again(3.1, 1, 58, 1), 0, 0,
        ),
        # the survivor ended the step under way: not yet back, and that step is not trained again
        (
            [(2.1, 0, 0, 10, 58, 57), (3, 1, 1, 12, 59, 58), (3.1, 0, 1, 10, 59, 58)],
            step_board.Again(3.1, 1, 59, 1), 0, 0,
        ),
        # all go back to a save, after the survivor ended the step under way
        (
            [(2.1, 0, 0, 10, 58, 57), (3, 1, 1, 12, 51, 50), (4, 0, 1, 10, 51, 50)],
            step_board.Again(4, 1, 51, 1), 8, 0,
        ),
        # all in new processes, the second attempt not yet whole
        ([(3, 0, 1, 13, 58, 57)], None, 0, 0),
        # a survivor went on alone and threw a batch away; the newcomer missed three
        (
            [(3, 0, 0, 10, 58, 58), (4, 0, 0, 10, 59, 59), (5, 1, 0, 12, 60, -1),
             (5.1, 0, 0, 10, 60, 60), (6, 0, 0, 10, 61, 61), (6, 1, 0, 12, 61, 61)],
            step_board.Again(5.1, 0, 60, 1), 0, 1 + 4,
        ),
    ],
)  # fmt: skip
def test_when_all_train_again_and_what_it_cost(since, expected, steps_lost, left_out):
    new = board(*since)
    back = step_board.again(new, {10, 11}, 2)
    assert back == expected
    if back is not None:
        assert step_board.lost(BEFORE + new, back) == steps_lost
        assert step_board.discarded(BEFORE + new, KILLED_S, back) == left_out


class Output:
    """As much of a trial as a board needs."""

    def __init__(self, folder):
        self.output = folder / "output"


def test_a_board_is_read_as_it_grows(tmp_path):
    board = step_board.Board(Output(tmp_path))
    assert not board.read()
    file = opened(tmp_path)
    add(file, rank=1, attempt=2, step=3, batch=4)
    assert board.read()
    assert not board.read()
    os.write(file, b"half a line")
    assert not board.read()
    os.close(file)
    assert [line[:5] for line in board.lines] == [(1, 2, os.getpid(), 3, 4)]
    assert board.pids() == {1: os.getpid()}


def test_the_time_of_a_step_is_the_median_over_all_ranks():
    times = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (12, 1)]
    lines = board(*((at_s, rank, 0, rank, 0, 0) for at_s, rank in times))
    assert step_board.step_s(lines) == 1


def test_growth_is_that_of_the_process_that_grew_most():
    early = [{"rss": 100.0, "fds": 9.0}, {"rss": 200.0, "fds": 9.0}]
    late = [{"rss": 99.0, "fds": 9.0}, {"rss": 206.0, "fds": 10.0}]
    assert replacement.most("rss", late, early) == pytest.approx(0.03)
    assert replacement.most("fds", late, early) == 1


def test_a_process_that_opens_a_socket_holds_one_more():
    before = replacement.holding(os.getpid())
    with socket.socket():
        after = replacement.holding(os.getpid())
    assert replacement.most("sockets", [after], [before]) == 1
    assert replacement.most("fds", [after], [before]) == 1


def outcome(*figures: tuple[float, int, int], failures: tuple[str, ...] = ()) -> Outcome:
    keys = ("again", "lost", "discarded")
    taken = [dict(zip(keys, one, strict=True)) | {"anew": 1} for one in figures]
    return Outcome("peer 1.2", Measured(taken, list(failures)))


@pytest.mark.parametrize(
    "ours, other, reached",
    [
        (outcome((0.2, 0, 0)), outcome((1.21, 0, 9)), True),
        (outcome((0.2, 0, 0)), outcome((1.1, 0, 9)), False),  # not 6 times
        (outcome((0.3, 0, 0)), outcome((9, 0, 0)), False),  # not below
        (outcome((0.2, 0, 0), (0.2, 0, 0), (0.2, 0, 1)), outcome((9, 0, 0)), False),  # left out
        (outcome((0.2, 1, 0)), outcome((9, 0, 0)), False),  # lost
        (outcome((0.2, 0, 0), failures=("it hung",)), outcome((9, 0, 0)), False),
        (outcome((0.2, 0, 0)), Outcome("peer", refusal="pip was down"), False),  # nobody else
        (outcome(), outcome((9, 0, 0)), False),
    ],
)
def test_the_goal_beside_peers(ours, other, reached):
    goal = peers_outcome.Goal(below_s=0.3, times=6)
    assert peers_outcome.is_reached({"other": other, "msrun": ours}, goal) is reached


def test_a_peer_that_cannot_be_measured_says_why_in_its_line():
    outcomes = {
        "a": outcome((1.2, 7, 0)),
        "b": Outcome("b 3", refusal="b cannot be installed: no"),
        "c": outcome(failures=("kill, c, turn 1: 60 s were not enough; it said:\n  much",)),
        "msrun": outcome((0.2, 0, 0), (0.2, 0, 2)),
    }
    said = [" | ".join(cells) for cells in peers_outcome.lines(outcomes)]
    assert said[1:] == [
        "a (peer 1.2) | 1.20 [1.20, 1.20] n=1 | 1/6.0 | 7 | 0 | 1",
        "b (b 3) | b cannot be installed: no | - | - | - | -",
        "c (peer 1.2) | kill, c, turn 1: 60 s were not enough | - | - | - | -",
        "msrun (peer 1.2) | 0.200 [0.200, 0.200] n=2 | - | 0 | 0 to 2 | 1",
    ]


def test_what_cannot_be_installed_says_so_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_install, "TORCH", "./no-such-folder")
    monkeypatch.setattr(peers_install, "VENV", ("venv", "--without-pip"))
    tool = peers_install.tools(tmp_path, peers_install.Environment("x", ("xyz==1",)))
    assert tool.refusal.startswith("xyz cannot be installed: ")
    assert "No module named pip" in tool.refusal


def test_what_is_installed_is_kept(tmp_path):
    there = peers_install.Environment("x", ("pip",))
    stamp = tmp_path / "x/.installed"
    stamp.parent.mkdir()
    (tmp_path / "x/bin").symlink_to(Path(sys.executable).parent)
    stamp.write_text(f"{peers_install.TORCH} pip {stamp.parent}")
    assert peers_install.tools(tmp_path, there).version == f"pip {version('pip')}"


def of_nodes(count: int, ranks: int, death_s: float = 0.9, mib: float = 90, peak: float = 199):
    return nodes.Found(count, ranks, 1, 1, 0.1, death_s, 2, mib, mib, peak)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (of_nodes(2048, 2048), "2,048 nodes, 2,048 ranks: reached"),
        (of_nodes(64, 64), "64 nodes, 64 ranks: reached"),
        (
            of_nodes(2048, 2048, peak=263),
            "2,048 nodes, 2,048 ranks: missed: 263 MiB at most instead of 200 MiB",
        ),
        (
            of_nodes(2048, 2048, death_s=1.37),
            "2,048 nodes, 2,048 ranks: missed: a death takes 1.37 s instead of 1 s",
        ),
        (
            of_nodes(2048, 16384, death_s=4.2, mib=158, peak=263),
            "2,048 nodes, 16,384 ranks: no goals, they are for 2,048 nodes of one rank",
        ),
        (
            of_nodes(4096, 4096, death_s=4.2),
            "4,096 nodes, 4,096 ranks: no goals, they are for 2,048 nodes of one rank",
        ),
    ],
)
def test_the_goals_of_many_nodes(found, said):
    """The peak of memory is judged, not what is left behind a replacement."""
    assert found.verdict() == (said, "missed" in said)


def test_the_help_says_which_nodes_the_goals_are_for():
    told = " ".join(bench("nodes", "--help").stdout.split())
    assert nodes.GOALS in told
    assert "2,048 nodes of one rank" in told
