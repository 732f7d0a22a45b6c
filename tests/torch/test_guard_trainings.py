"""Trainings that try to fool their guard. The test is the agent: it greets, orders, and reads.

Each case was once a state called whole that was not, or a wrong use that nobody heard of.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from pathlib import Path
from typing import Self

import pytest
from support.jobs import DEADLINE_S
from support.warm_python import WarmPython

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.status_page import Page

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.torch
PRELUDE = """
import os, sys, threading, time, torch
from torch import nn
from worker_hooks import TrainState
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(8, 4).split(1)

def backward(x):
    net(x).sum().backward()

def step(x):
    backward(x)
    opt.step()
    opt.zero_grad()

def tell(word):
    print(word, flush=True)

def await_line():
    sys.stdin.readline()
"""
_numbers = itertools.count()


class Guarded:
    """A training in its own process, and its agent's end of the line."""

    def __init__(self, python: WarmPython, script: str, folder: Path) -> None:
        name = f"msrun-test-{os.getpid()}-{next(_numbers)}"
        self.folder = folder
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(f"\0{name}")
            door.listen()
            door.settimeout(DEADLINE_S)
            told = {"RANK": "0", "WORLD_SIZE": "1", "MSRUN_HOOKS": name, "MSRUN_RUNS": name}
            self.process = subprocess.Popen(
                [*python.words, "-c", PRELUDE + script],
                env={**os.environ, **told, "CKPT": str(folder), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.link, _ = door.accept()
            self.link.settimeout(DEADLINE_S)
            self.pages: list[Page] = []
            assert isinstance(self.hear()[0], protocol.Hello)
            self.say(protocol.Welcome(""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.link.close()
        for page in self.pages:
            page.close()

    def say(self, message: protocol.Message) -> None:
        wire.send(self.link, message)

    def hear(self) -> tuple[protocol.Message | None, list[int]]:
        return wire.receive(self.link)

    def page(self) -> Page:
        """The status page, once the state is registered."""
        message, (fd,) = self.hear()
        assert isinstance(message, protocol.Registered)
        page = Page(fd)
        os.close(fd)
        self.pages.append(page)
        return page

    def await_word(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"{word}\n", line + self.end()[1]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def frozen(self, grace_s: float = 2.0) -> protocol.Frozen:
        self.say(protocol.Freeze(1, grace_s))
        answer, _ = self.hear()
        assert isinstance(answer, protocol.Frozen)
        return answer

    def saved(self, step: int) -> protocol.Message | None:
        self.say(protocol.Save(1, step, str(self.folder), 0, 1))
        return self.hear()[0]

    def end(self) -> tuple[int, str]:
        """Let it leave; its exit code and what it said of errors."""
        self.link.close()
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


def plain(python: WarmPython, script: str) -> subprocess.CompletedProcess[str]:
    """A training that nobody guards."""
    return subprocess.run(
        [*python.words, "-c", PRELUDE + script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_forked_child_that_trains_leaves_its_parents_page_alone(tmp_path, warm_python):
    script = """
state = TrainState(model=net, optimizer=opt, ckpt_save_path=os.environ["CKPT"])
for x in state.batches(data):
    if state.batch == 4:
        pid = os.fork()
        if pid == 0:
            for _ in range(3):
                step(x)
            os._exit(7)
        tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        await_line()
    step(x)
"""
    with Guarded(warm_python, script, tmp_path) as job:
        page = job.page()
        job.await_word("7")
        assert page.newest_step() == 3
        assert page.record(4) is None  # nothing of step 4 is under way in this rank
        job.go_on()
        assert job.end() == (0, "")


def test_one_process_has_one_state(tmp_path, warm_python):
    script = """
state = TrainState(model=net, optimizer=opt, ckpt_save_path=os.environ["CKPT"])
try:
    TrainState(other=nn.Linear(2, 2), ckpt_save_path=os.environ["CKPT"])
except ValueError as error:
    tell(error)
"""
    with Guarded(warm_python, script, tmp_path) as job:
        job.await_word("this process has a TrainState already: register everything in one")
        assert job.end()[0] == 0


def test_batches_within_batches_are_refused(warm_python):
    done = plain(
        warm_python,
        """
state = TrainState(model=net, optimizer=opt)
for x in state.batches(data):
    for y in state.batches(data):
        step(y)
tell("went on")
""",
    )
    assert done.returncode == 1
    assert "ValueError: batches() was called within a loop over batches()" in done.stderr


def test_a_loop_that_was_dropped_late_does_not_move_the_place(warm_python):
    done = plain(
        warm_python,
        """
state = TrainState(model=net, optimizer=opt)
for _ in state.epochs(1):
    kept = iter(state.batches(data))
    step(next(kept))
    for x in state.batches(data):
        if state.batch == 3:
            before = state._loop._meta
            del kept
            assert state._loop._meta == before, (state._loop._meta, before)
        step(x)
tell("done")
""",
    )
    assert done.stdout == "done\n", done.stderr


def test_epochs_are_counted_once(warm_python):
    done = plain(
        warm_python,
        """
state = TrainState(model=net, optimizer=opt)
for _ in state.epochs(2):
    for x in state.batches(data):
        step(x)
for _ in state.epochs(4):
    tell("went on")
""",
    )
    assert "went on" not in done.stdout
    assert "ValueError: epochs() was called again" in done.stderr


def test_weights_that_a_forward_changes_make_no_commit_amid_an_accumulation(warm_python):
    done = plain(
        warm_python,
        """
table = nn.Embedding(10, 4, max_norm=0.5)
opt = torch.optim.SGD(table.parameters(), lr=0.1)
state = TrainState(model=table, optimizer=opt)
for x in state.batches(torch.randint(0, 10, (8, 3))):
    table(x).sum().backward()
    if state.batch % 4 == 0:
        opt.step()
        opt.zero_grad()
tell(state.step)
""",
    )
    assert done.stdout == "2\n", done.stderr


def test_what_changes_between_freeze_and_save_is_noticed(tmp_path, warm_python):
    script = """
extra = torch.optim.SGD(net.parameters(), lr=0.5)
state = TrainState(model=net, optimizer=opt, ckpt_save_path=os.environ["CKPT"])
for x in state.batches(data):
    step(x)
    if state.batch == 3:
        tell("updated")
        await_line()
        with torch.no_grad():
            net.weight.add_(1)
        tell("changed")
        await_line()
"""
    with Guarded(warm_python, script, tmp_path) as job:
        job.page()
        job.await_word("updated")
        frozen = job.frozen()
        assert (frozen.step, frozen.is_whole) == (3, True)
        job.go_on()
        job.await_word("changed")
        answer = job.saved(3)
        assert isinstance(answer, protocol.SaveFailed), answer
        assert "changed" in answer.why
