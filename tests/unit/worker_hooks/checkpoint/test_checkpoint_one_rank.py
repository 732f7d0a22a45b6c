"""A training of one rank that saves: when, under which names, and that it goes on bit for bit."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import newest
from support.jobs import ROOT, poll
from support.warm_python import ALONE_S
from torch import nn

from worker_hooks import CheckpointConfig, CheckpointError, ModelCheckpoint, TrainState
from worker_hooks.checkpoint import async_writer, model_checkpoint
from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import read, verify
from worker_hooks.storage.safetensors_file import read_header
from worker_hooks.training import torch_hooks

pytestmark = pytest.mark.slow  # many trainings
BATCHES = 6
WAYS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and torch as it was."""
    for name in ("RANK", "WORLD_SIZE", "MSRUN_HOOKS", "MSRUN_RUNS", "MSRUN_DRILL", "MS_ENABLE_TFT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    before, watchers = torch.get_rng_state(), list(torch_hooks._watchers)
    yield
    torch.set_rng_state(before)
    torch_hooks._watchers[:] = watchers
    gc.collect()  # pages are files


class Training:
    """Dropout, batch norm, AdamW; stops by itself behind a step, as if it was killed."""

    def __init__(self, folder, *, resumes=False, callbacks=(), **config):
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.saving = ModelCheckpoint("Net", folder, CheckpointConfig(**config))
        self.state = TrainState(
            model=self.net,
            optimizer=self.optimizer,
            callbacks=[self.saving, *callbacks],
            is_recover=resumes,
        )

    def run(self, epochs=3, stop=None, body=lambda: None):
        data = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(n)) for n in range(BATCHES)
        ]
        for _ in self.state.epochs(epochs):
            for batch in self.state.batches(data):
                if self.state.step == stop:
                    self.saving._at_exit()
                    return self
                self.net(batch).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                body()
        return self

    def held(self):
        tensors = [*self.net.state_dict().values(), torch.rand(3)]
        return [bytes(tensor.numpy().tobytes()) for tensor in tensors]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@WAYS
@pytest.mark.parametrize("stop", [5, 6, 13])
def test_what_goes_on_ends_as_if_it_had_not_been_interrupted(tmp_path, is_async, stop):
    whole = Training(tmp_path / "whole", save_checkpoint_steps=100).run().held()
    config = {"save_checkpoint_steps": 3, "async_save": is_async}
    Training(tmp_path / "cut", **config).run(stop=stop)
    rest = Training(tmp_path / "cut", resumes=True, **config)
    assert rest.state.step == stop // 3 * 3
    assert rest.run().held() == whole
    assert names(tmp_path / "cut")[-1] == "Net-3_6"


APART = "it is not one folder for all nodes"


@WAYS
def test_where_each_node_has_a_disk_of_its_own_the_first_save_says_so(tmp_path, is_async):
    one = Training(tmp_path / "here", save_checkpoint_steps=3, async_save=is_async)
    guard = one.state.checkpoint_context.guard
    guard.not_shared[str(tmp_path / "elsewhere")] = APART
    guard.not_shared[str(tmp_path / "her")] = APART  # the beginning of the name is not enough
    one.run(stop=4)
    guard.not_shared[str(tmp_path)] = APART
    with pytest.raises(CheckpointError) as raised:
        one.run()
    assert str(raised.value) == (
        f"a ModelCheckpoint in {tmp_path / 'here'} cannot become complete: {APART}. Give it a "
        "folder that all nodes share, or leave it out"
    )
    assert names(tmp_path / "here") == ["Net-1_3"]


class Writer:
    """Writes what never becomes complete; others' disks turn out meanwhile."""

    is_busy, has_given_up = True, False

    def __init__(self, not_shared, folder):
        self.learns = lambda: not_shared.update({str(folder): APART})

    def wait(self, check):
        check()
        self.learns()
        check()

    def give_up(self):
        self.has_given_up = True


def test_a_save_that_waits_for_ranks_with_other_disks_ends_once_that_is_known(tmp_path):
    saving, not_shared = ModelCheckpoint("Net", tmp_path), {}
    gate = SimpleNamespace(raise_if_ejected=lambda: None)
    saving._context = SimpleNamespace(guard=SimpleNamespace(gate=gate, not_shared=not_shared))
    saving._writer = writer = Writer(not_shared, tmp_path)
    with pytest.raises(CheckpointError, match="cannot become complete"):
        saving.wait()
    assert writer.has_given_up
    saving.wait()  # nothing is under way any more


def test_without_memory_for_a_copy_each_save_is_waited_for(tmp_path, monkeypatch, caplog):
    begun, steps, begin = [], [], async_writer.AsyncWriter.begin

    def noted(writer, order, copying):
        begun.append(order.step)
        begin(writer, order, copying)

    monkeypatch.setattr(async_writer.AsyncWriter, "begin", noted)
    monkeypatch.setattr(async_writer, "free_bytes", lambda: 100 if len(steps) < 8 else None)
    training = Training(tmp_path, save_checkpoint_steps=4, keep_checkpoint_max=9, async_save=True)
    training.run(2, body=lambda: steps.append(1))
    assert names(tmp_path) == ["Net-1_4", "Net-2_2", "Net-2_6"]
    assert begun == [8, 12]  # there is memory again
    said = [one.getMessage() for one in caplog.records if "async_save" in one.getMessage()]
    assert len(said) == 1
    assert "waits for its saves while memory is short: a copy of the state takes" in said[0]


@pytest.mark.parametrize(
    ("nbytes", "ranks", "free", "is_short"),
    [
        (100, 1, 200, False),
        (100, 1, 199, True),
        (100, 3, 600, False),
        (100, 3, 599, True),
        (1 << 30, 2, (2 << 30) + async_writer.SPARE, False),
        (1 << 30, 2, (2 << 30) + async_writer.SPARE - 1, True),
        (1 << 30, 8, None, False),  # the kernel does not say
        (0, 8, 0, False),
    ],
)
def test_each_rank_asks_for_itself_and_those_behind_it(monkeypatch, nbytes, ranks, free, is_short):
    monkeypatch.setattr(async_writer, "free_bytes", lambda: free)
    writer = async_writer.AsyncWriter()
    try:
        assert bool(writer.shortage(nbytes, ranks)) == is_short
    finally:
        writer.close()


@WAYS
def test_the_names_are_mindspore_s_and_the_last_step_is_saved(tmp_path, is_async):
    Training(tmp_path, save_checkpoint_steps=4, keep_checkpoint_max=9, async_save=is_async).run(2)
    assert names(tmp_path) == ["Net-1_4", "Net-2_2", "Net-2_6"]
    found = read(tmp_path / "Net-2_2")
    assert (found.kind, found.step, found.epoch, found.batch) == ("checkpoint", 8, 1, 2)
    assert found.reason == "every 4 steps"
    assert read(tmp_path / "Net-2_6").step == 12
    for path, manifest in candidates(tmp_path):
        assert verify(path, manifest) == []


def test_both_ways_write_the_same_bytes(tmp_path):
    # no loop: its variable would be one of the script's, which are saved, too
    Training(tmp_path / "False", save_checkpoint_steps=5, async_save=False).run(1)
    Training(tmp_path / "True", save_checkpoint_steps=5, async_save=True).run(1)
    for file in ("rank_0/Net-1_5.safetensors", "rank_0/private_rank_0.safetensors"):
        one, other = (tmp_path / f"{way}/Net-1_5" / file for way in (True, False))
        assert one.read_bytes() == other.read_bytes()
    one, other = (read(tmp_path / f"{way}/Net-1_5") for way in (True, False))
    assert (one.digest, one.shards) == (other.digest, other.shards)


def test_only_the_last_step_without_a_policy(tmp_path):
    Training(tmp_path, save_checkpoint_steps=0).run(1)
    assert names(tmp_path) == ["Net-1_6"]


def test_a_clock_s_turn(tmp_path, monkeypatch):
    now = [0.0]

    def later():
        now[0] += 1.0

    monkeypatch.setattr(
        model_checkpoint.schedule.Seconds.__init__, "__defaults__", (lambda: now[0],)
    )
    config = {"save_checkpoint_steps": 0, "save_checkpoint_seconds": 2}
    Training(tmp_path, keep_checkpoint_max=9, **config).run(1, body=later)
    assert names(tmp_path) == ["Net-1_3", "Net-1_5", "Net-1_6"]


def test_retention_counts_over_restarts_but_not_over_strangers(tmp_path):
    config = {"save_checkpoint_steps": 2, "keep_checkpoint_max": 2}
    Training(tmp_path, **config).run(stop=5)
    assert names(tmp_path) == ["Net-1_2", "Net-1_4"]
    Training(tmp_path, resumes=True, **config).run(stop=9)
    assert names(tmp_path) == ["Net-1_6", "Net-2_2"]
    Training(tmp_path, **config).run(stop=3)  # begins anew
    assert names(tmp_path) == ["Net-1_6", "Net-2_2", "Net_1-1_2"]


def test_what_is_appended_is_in_the_file(tmp_path):
    Training(tmp_path, append_info=["epoch_num", "step_num", {"lr": 0.5}]).run(2)
    header = read_header(tmp_path / "Net-2_3/Net-2_3.safetensors")
    assert json.loads(header.metadata["append_info"]) == {"epoch_num": 2, "step_num": 9, "lr": 0.5}


@WAYS
def test_a_save_that_is_asked_for(tmp_path, is_async):
    class Asking:
        def step_end(self, state):
            if state.step == 2:
                training.saving.save_now(state)
                training.saving.save_now(state)
                assert names(tmp_path) == ["Net-1_2"]

    config = {"save_checkpoint_steps": 100, "async_save": is_async}
    training = Training(tmp_path, callbacks=[Asking()], **config)
    training.run(stop=4)
    assert read(tmp_path / "Net-1_2").reason == "asked for"


def test_between_steps_nothing_is_saved(tmp_path):
    training = Training(tmp_path, save_checkpoint_steps=100)

    def ask():
        if training.state.step == 2:
            with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
                training.saving.save_now(training.state)

    training.run(1, body=ask)
    assert names(tmp_path) == ["Net-1_6"]


def test_a_failure_ends_training_at_once(tmp_path):
    (tmp_path / "file").touch()
    training = Training(tmp_path / "file" / "folder")
    with pytest.raises(CheckpointError, match="Not a directory"):
        training.run()
    assert training.state.step == 1


def test_a_failure_beside_training_is_raised_at_a_later_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(model_checkpoint.incarnation, "current", lambda _: "me")
    (tmp_path / "Net-1_2.me_tmp").touch()
    training = Training(tmp_path, save_checkpoint_steps=2, async_save=True)

    def wait():
        if training.saving._writer.is_busy:
            poll(lambda: select_readable(training.saving._writer))

    with pytest.raises(CheckpointError, match="File exists"):
        training.run(body=wait)
    assert training.state.step == 3
    training.saving._at_exit()


def select_readable(background):
    import select

    return select.select([background._process.stdout], [], [], 0)[0]


def test_a_writer_that_is_killed_is_an_error_not_a_hang(tmp_path):
    training = Training(tmp_path, save_checkpoint_steps=1, async_save=True)

    def kill():
        os.kill(training.saving._writer._process.pid, signal.SIGKILL)

    with pytest.raises(CheckpointError, match=r"its writer is gone \(signal 9\)"):
        training.run(body=kill)
    training.saving._at_exit()


def test_a_copy_is_what_it_was_though_training_goes_on(tmp_path):
    """The writer stands still while the state changes."""
    seen = {}

    class Slow:
        def step_end(self, state):
            process = training.saving._writer._process
            if state.step == 1:
                os.kill(process.pid, signal.SIGSTOP)
            if state.step == 2:
                seen["w"] = training.net[0].weight.detach().clone()
            if state.step == 4 - 1:
                assert training.saving._writer.is_busy
                os.kill(process.pid, signal.SIGCONT)

    config = {"save_checkpoint_steps": 2, "async_save": True, "keep_checkpoint_max": 9}
    training = Training(tmp_path, callbacks=[Slow()], **config)
    training.run(1)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "Net-1_2/Net-1_2.safetensors")
    assert torch.equal(found["model.0.weight"], seen["w"])


SCRIPT = """
import os, sys, torch
from torch import nn
from worker_hooks import CheckpointConfig, ModelCheckpoint, TrainState
how, folder = sys.argv[1:]
net = nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
config = CheckpointConfig(save_checkpoint_steps=4, async_save=how == "ends", exception_save=True)
state = TrainState(model=net, optimizer=optimizer, callbacks=[ModelCheckpoint("Net", folder, config)])
for batch in state.batches(range(9)):
    net(torch.ones(1, 3)).sum().backward()
    if how == "torn" and batch == 5:
        with torch.no_grad(): net.weight.add_(1)
    if how == "ends" and batch == 4:
        sys.exit(0)
    if batch == 5:
        raise RuntimeError("the script's own mistake")
    optimizer.step()
    optimizer.zero_grad()
"""


def script(tmp_path, how, python=(sys.executable,)):
    run = [*python, "-c", SCRIPT, how, str(tmp_path / "saved")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        run, env=env, capture_output=True, text=True, timeout=ALONE_S, check=False
    )


def test_an_exception_leaves_a_checkpoint_of_its_own_name(tmp_path, warm_python):
    done = script(tmp_path, "raises", warm_python.words)
    assert done.returncode == 1
    assert done.stderr.index("RuntimeError: the script's own mistake") < done.stderr.index(
        "saved: "
    )
    assert names(tmp_path / "saved") == ["Net-1_4", "Net-1_5_breakpoint"]
    path, found = newest(tmp_path / "saved", print)
    assert (path.name, found.step) == ("Net-1_5_breakpoint", 5)
    assert found.reason == "RuntimeError: the script's own mistake"


def test_a_state_that_is_torn_is_not_saved(tmp_path, warm_python):
    done = script(tmp_path, "torn", warm_python.words)
    assert "the state at the exception is not saved" in done.stderr
    assert names(tmp_path / "saved") == ["Net-1_4"]


def test_the_process_s_end_waits_for_the_writer(tmp_path):  # not warm: a real end of a process
    assert script(tmp_path, "ends").returncode == 0
    assert names(tmp_path / "saved") == ["Net-1_4"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"save_checkpoint_steps": 0, "save_checkpoint_seconds": 3}, "one host"),
        ({"exception_save": True}, "needs msrun"),
    ],
)
def test_what_several_ranks_cannot_agree_on_is_refused(tmp_path, monkeypatch, config, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=words):
        Training(tmp_path, **config)


def test_a_directory_for_each_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="must be the same for all ranks"):
        Training(tmp_path / "rank_1")


def test_ranks_without_msrun_need_a_process_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CheckpointError, match="start them with msrun"):
        Training(tmp_path).run()


def test_a_step_with_gradients_that_wait_is_saved_only_at_the_end(tmp_path):
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    often, seldom = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (body, head))
    config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=9)
    saving = ModelCheckpoint("Net", str(tmp_path), config)
    state = TrainState(model=[body, head], optimizer=[often, seldom], callbacks=[saving])
    for number, _ in enumerate(state.batches(range(5))):
        head(body(torch.ones(1, 2))).sum().backward()
        often.step()
        often.zero_grad()
        if number % 2:
            seldom.step()
            seldom.zero_grad()
    assert [read(tmp_path / name).step for name in names(tmp_path)] == [2, 4]
    state.finish()
    assert [read(tmp_path / name).step for name in names(tmp_path)] == [2, 4, 5]
