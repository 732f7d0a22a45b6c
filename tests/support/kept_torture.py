"""Tortures memory that outlives its process: who reads it finds each byte as it was, or nothing.

    scripts/drill --memory 30          for thirty minutes
    scripts/drill --memory 1 --seed 7  other dice

A process trains with a keeper, and allocates, frees, trims, forks and moves its state about
meanwhile (`memory_acts.py`). It is killed with SIGKILL at a random moment, amid an update or a
commit too. Whatever its memory then says to be whole has to be what an undisturbed training had at
that step, byte by byte; and a step that was committed has to be there, unless the
state was too large to be copied, and had begun to change. Not a test itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # as a program

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  else the first optimizer of each life imports it
from torch import nn  # noqa: E402

from agent.kept.kept_rank import KeptRank  # noqa: E402
from support.memory_acts import Acts, Churn  # noqa: E402
from worker_hooks.changes import copies  # noqa: E402
from worker_hooks.contract.process_stat import children  # noqa: E402
from worker_hooks.data.feed import Feed  # noqa: E402
from worker_hooks.kept.state_mapper import StateMapper  # noqa: E402
from worker_hooks.machine.kept_memory import StateMap  # noqa: E402
from worker_hooks.state.committed_state import CommittedState, Position  # noqa: E402
from worker_hooks.state.registry import pieces_of  # noqa: E402

STEPS = 160
THAWED = 30  # from this step on one layer more is trained
LONG_S = 120.0
WALL = 0x40000000  # __WALL: children whose end signals nothing, too
MOST_S = 1.5  # of a life, once it trains
_NOTES = struct.Struct("=6Q")
CHANGING = ("changing", "audited")  # facts that tell of the torture


class TrainedState:
    """A network with layers of all sizes, one of which is trained later, and an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 700), nn.Linear(700, 3)
        )
        self.late = nn.Parameter(torch.ones(40, 50))
        self.net.register_parameter("late", self.late)
        early = [each for each in self.net.parameters() if each is not self.late]
        self.optimizer = torch.optim.AdamW(early, lr=0.01)
        things = {"model": self.net, "optimizer": self.optimizer}
        self.committed = CommittedState(pieces_of(things), dict)

    def open(self) -> None:
        """Make a page."""
        feed = Feed(())
        feed.begin(None)
        os.close(self.committed.open(0, 0, feed, Position(0, 0)))
        self.committed.changes.begin(0)

    def step(self, act: Callable[[str], None]) -> None:
        """One more; ``act``: called in each place."""
        committed = self.committed
        number = committed.step + 1
        act("begun")
        generator = torch.Generator().manual_seed(number)
        loss = self.net(torch.randn(6, 8, generator=generator)).square().sum()
        (loss + (self.late * number).sin().sum()).backward()
        committed.under_way(Position(0, number))
        act("backward")
        act("updating")  # told before the board says so: the rank may be killed in between
        committed.update_begins()
        if committed.kept is not None:
            committed.kept.update_begins()
        act("update")
        self.optimizer.step()
        self.optimizer.zero_grad()
        committed.updated(1)
        if number == THAWED:
            self.optimizer.add_param_group({"params": [self.late]})
        act("updated")
        committed.commit(Position(0, number))
        act("committed")

    def file(self) -> str:
        """All of the newest commit, as :func:`told` has what was read."""
        from worker_hooks.tensors import shard

        replica = self.committed.replica(self.committed.step)
        plan, found = shard.plan(replica, 0, 1), hashlib.sha256()
        for tensor, _ in plan.segments:
            found.update(tensor.detach().numpy().tobytes())
        for content in plan.buffers:
            found.update(content)
        return told(plan.head, found.hexdigest(), shard.digest_like("kept-", replica))


def told(head: bytes, content: str, digest: str) -> str:
    """Of a file: what it has, but for what the torture itself changes in it."""
    fields = json.loads(head[8:])
    facts = json.loads(fields["__metadata__"].pop("facts"))
    facts = {name: value for name, value in facts.items() if name not in CHANGING}
    return json.dumps([fields, facts, content, digest], sort_keys=True)


class Notes:
    """What a rank tells in memory that it shares with its killer."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def read(self) -> tuple[int, ...]:
        """Keeper; board; the step committed last; the one whose update has begun; whether it has
        failed; and whether the script has changed or moved the state since the commit."""
        return _NOTES.unpack_from(self._memory)

    def write(self, place: int, value: int) -> None:
        """One of them: a single store, as far as any reader can tell."""
        struct.pack_into("=Q", self._memory, 8 * place, value)

    def close(self) -> None:
        """Free it."""
        self._memory.close()


class TorturedRank:
    """In the process that is to be killed."""

    def __init__(self, seed: int, notes: Notes, agent: int) -> None:
        rng = self._rng = Random(seed)
        self._notes = notes
        state = self._state = TrainedState()
        committed = state.committed
        mapper = StateMapper(committed.pieces, lambda: ("", ""), lambda _: None, (agent,))
        committed.kept = mapper
        if is_copied(seed):
            copies.SHARE = math.inf  # steps are so short that no copy would be cheap
            committed.changes.keep_all()
        state.open()
        self._acts = Acts(rng, state.net, state.optimizer)
        notes.write(1, mapper.board)
        notes.write(0, mapper.keeper)
        Churn(seed, self._failed).start()

    def train(self) -> None:
        """To the end, and then wait to be killed."""

        def act(place: str) -> None:
            if place == "updating":
                self._notes.write(3, self._state.committed.step + 1)
                return
            if place == "committed":
                self._notes.write(2, self._state.committed.step)
                self._notes.write(5, 0)
            for _ in range(self._rng.randrange(3)):
                self._acts.anywhere()
            if place == "updated" and self._rng.random() < 0.2:
                self._acts.within_update()
            if place == "begun" and self._rng.random() < 0.3:
                self._notes.write(5, 1)
                self._rng.choice((self._exchange, self._acts.within_update))()

        while self._state.committed.step < STEPS:
            self._state.step(act)
        signal.pause()

    def _exchange(self) -> None:
        """Other weights for a while, as for a validation; torch counts that."""
        weight = self._rng.choice(list(self._state.net.parameters()))
        with torch.no_grad():
            saved = weight.clone()
            weight.mul_(1.5)
            for _ in range(self._rng.randrange(8)):
                self._acts.anywhere()
            weight.copy_(saved)

    def _failed(self, why: str) -> None:
        print(f"in the rank: {why}", file=sys.stderr, flush=True)
        self._notes.write(4, 1)


def is_copied(seed: int) -> bool:
    """Whether the rank of this life copies its state at each commit."""
    return seed % 2 == 0


class Findings(NamedTuple):
    """What a life has shown."""

    maps: int  # that were whole
    nbytes: int  # compared
    is_lost: bool  # amid an update, or another change, of a state that is not copied


class TortureError(Exception):
    """Something is not as it must be."""


def undisturbed() -> list[str]:
    """What each step is, from one training in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException), os.fdopen(writing, "wb") as file:
            state = TrainedState()
            state.open()
            found = [state.file()]
            for _ in range(STEPS):
                state.step(lambda _: None)
                found.append(state.file())
            pickle.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = pickle.load(file)
    os.waitpid(pid, 0)
    return found


def live_and_die(seed: int, expected: list[str]) -> Findings:
    """One life: a rank trains under torture, is killed, and is read.

    Raises:
        TortureError: a byte is another one, or a step is missing.
    """
    rng, notes = Random(-1 - seed), Notes()
    agent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            TorturedRank(seed, notes, agent).train()
        except BaseException:  # noqa: BLE001  its killer tells it
            traceback.print_exc()
            notes.write(4, 1)
        os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    rank = Watched(pid)
    try:
        deadline, wanted = time.monotonic() + LONG_S, rng.randrange(5)
        while not (notes.read()[0] and notes.read()[2] >= wanted):
            if rank.has_ended(0.01) or time.monotonic() > deadline:
                raise TortureError("the rank ended, or did not begin")
        memory, keeper = KeptRank(*notes.read()[:2]), Watched(notes.read()[0])
        try:
            rank.has_ended(rng.random() ** 2 * MOST_S)
            os.kill(pid, signal.SIGKILL)
            if not rank.has_ended(LONG_S):
                raise TortureError("the rank cannot be killed")
            return _judged(memory, notes, expected, is_copied=is_copied(seed))
        finally:
            memory.close()
            if not keeper.has_ended(LONG_S):
                raise TortureError("the keeper outlives its memory")
            os.waitpid(keeper.pid, WALL)
            keeper.close()
    finally:
        rank.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its children, too
        reap()
        notes.close()


class Watched:
    """A process whose end can be awaited."""

    def __init__(self, pid: int) -> None:
        self.pid, self._file = pid, os.pidfd_open(pid)

    def has_ended(self, within_s: float) -> bool:
        """Wait for its end."""
        return bool(select.select([self._file], [], [], within_s)[0])

    def close(self) -> None:
        """Watch it no more."""
        os.close(self._file)


def reap() -> None:
    """All that has ended and belongs to this process, which adopts orphans."""
    with contextlib.suppress(ChildProcessError):
        while children(os.getpid()):
            os.waitpid(-1, WALL)


def _judged(memory: KeptRank, notes: Notes, expected: list[str], *, is_copied: bool) -> Findings:
    _, _, step, begun, has_failed, is_changed = notes.read()
    if has_failed:
        raise TortureError("the rank's own memory has foreign bytes, or it failed")
    states = memory.states()
    nbytes = sum(_checked(memory, state, expected) for state in states)
    newest = max((state.step for state in states), default=-1)
    is_lost = newest < step
    if is_lost and (is_copied or not (begun > step or is_changed)):
        raise TortureError(f"step {step} was committed, and {newest} is the newest that is whole")
    return Findings(len(states), nbytes, is_lost)


def _checked(memory: KeptRank, state: StateMap, expected: list[str]) -> int:
    content, taken = hashlib.sha256(), list[bytes]()
    digest = memory.checksum(state, taken.append)
    for piece in taken[1:]:
        content.update(piece)
    if told(state.head, content.hexdigest(), digest) != expected[state.step]:
        raise TortureError(f"step {state.step} is not what an undisturbed training has")
    return sum(map(len, taken))


def torture(seed: int, until: Callable[[int], bool]) -> tuple[Counter[str], int]:
    """Lives one after another, from this seed on; what they have shown, and how many.

    Args:
        seed: of the first.
        until: is told how many there were, and says whether that is enough.

    Raises:
        TortureError: the message names the seed.
    """
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: keepers come here
    expected, found, lives = undisturbed(), Counter[str](), 0
    while not until(lives):
        try:
            seen = live_and_die(seed + lives, expected)
        except TortureError as error:
            raise TortureError(f"seed {seed + lives}: {error}") from error
        found.update(maps=seen.maps, bytes=seen.nbytes, lost=seen.is_lost)
        lives += 1
    return found, lives


def main(words: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="scripts/drill --memory", description=__doc__)
    parser.add_argument("minutes", type=float, help="how long; at least one life")
    parser.add_argument("--seed", type=int, default=1, help="of the first life (1)")
    options: Any = parser.parse_args(words)
    torch.set_num_threads(1)
    began = time.monotonic()
    end = began + 60 * options.minutes
    try:
        found, lives = torture(options.seed, lambda lives: lives > 0 and time.monotonic() >= end)
    except TortureError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{lives} lives in {(time.monotonic() - began) / 60:.1f} minutes: {found['maps']} steps "
        f"were whole, {found['bytes'] / 1e9:.1f} GB of them equal; {found['lost']} steps were "
        "lost amid an update, or another change, of a state that is not copied; none elsewhere"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
