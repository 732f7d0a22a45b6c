"""The callback that writes a model when training is left: its arguments, its files, its program."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from worker_hooks.callbacks import on_request_exit as room
from worker_hooks.callbacks.on_request_exit import OnRequestExit
from worker_hooks.contract.exit_file import ExitFile


class Net(nn.Module):
    """Dropout and BatchNorm, two names for one tensor, a keyword."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale):
        return self.drop(self.two(self.norm(self.one(x)))) * scale


class Exit:
    """What a training knows of leaving."""

    is_guarded, is_requested, loss_scale, run_id = True, False, None, "run"

    def __init__(self, model):
        self.models, self.asked = {"model": model}, []
        self.save_to = ""

    def redirected(self, folder):
        return self.save_to or folder

    def request(self, why):
        self.asked.append(why)


class Training:
    """What the callback sees of a training."""

    epoch, step, batch, batches_per_epoch, loss = 2, 40, 8, 16, 0.5

    def __init__(self, model=None, rank=0, world_size=2):
        torch.manual_seed(1)
        self.model = Net() if model is None else model
        self.exit = Exit(self.model)
        self.rank, self.world_size = rank, world_size


@pytest.fixture(autouse=True)
def caught():
    """Signals are left as they were."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def left(tmp_path, training, **options):
    """The callback of a training that was left."""
    callback = OnRequestExit(file_name="LeNet", directory=tmp_path, **options)
    callback.begin(training)
    training.model(torch.randn(3, 4), scale=torch.ones(1))
    callback.exit_requested(training)
    return callback


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"save_ckpt": 1}, "'save_ckpt' must be isinstance of <class 'bool'>, but got 1."),
        ({"save_mindir": "yes"}, "'save_mindir' must be isinstance of"),
        ({"dedup": 0}, "'dedup' must be isinstance of"),
        ({"file_name": 3}, "'file_name' must be isinstance of <class 'str'>"),
        ({"file_name": "a/b"}, "a name without a folder"),
        ({"file_name": ""}, "a name without a folder"),
        ({"directory": 3}, "'directory' must be isinstance of"),
        ({"config_file": 3}, "'config_file' must be isinstance of"),
        ({"sig": "SIGTERM"}, "'sig' must be isinstance of <class 'int'>"),
        ({"sig": 0}, "'sig' must be a signal, but got 0"),
        ({"sig": True}, "'sig' must be a signal, but got True"),
        ({"sig": signal.SIGKILL}, "^Not support send exit request by signal SIGKILL.$"),
        ({"sig": 9}, "^Not support send exit request by signal SIGKILL.$"),
    ],
)
def test_arguments_are_refused_in_mindspores_words(arguments, told):
    with pytest.raises(ValueError, match=told):
        OnRequestExit(**arguments)


def test_what_the_agent_must_know_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = OnRequestExit(config_file="exit.json")
    assert (callback.exit_file, callback.exit_signal) == (str(tmp_path / "exit.json"), 15)
    assert OnRequestExit().exit_file == ""


def test_a_place_that_cannot_be_made_is_known_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        OnRequestExit(directory=tmp_path / "file").begin(Training())


# --- files ------------------------------------------------------------------------------------


def test_the_file_loads_into_the_model_and_says_where_training_was(tmp_path):
    training = Training(rank=1)
    training.exit.loss_scale = 1024.0
    left(tmp_path, training, save_mindir=False)
    path = tmp_path / "rank_1" / "LeNet_train.safetensors"
    assert files(tmp_path) == ["rank_1/LeNet_train.safetensors"]
    other = Net()
    other.load_state_dict(safetensors.torch.load_file(path))
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert {name: said[name] for name in ("epoch_num", "step_num", "batch_num", "global_step")} == {
        "epoch_num": "3",
        "step_num": "40",
        "batch_num": "16",
        "global_step": "40",
    }
    assert said["loss_scale"] == "1024.0"


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    training = Training(torch.compile(nn.Linear(4, 2), backend="eager"))
    callback = OnRequestExit(directory=tmp_path, save_mindir=False)
    callback.begin(training)
    callback.exit_requested(training)
    path = tmp_path / "rank_0" / "Net_train.safetensors"
    nn.Linear(4, 2).load_state_dict(safetensors.torch.load_file(path))


def test_what_is_not_wanted_is_not_written(tmp_path):
    callback = OnRequestExit(save_ckpt=False, save_mindir=False, directory=tmp_path / "none")
    callback.begin(Training())
    callback.exit_requested(Training())
    assert not (tmp_path / "none").exists()


def test_it_is_saved_once_and_not_at_an_end_that_nobody_asked_for(tmp_path):
    training = Training()
    callback = OnRequestExit(directory=tmp_path, save_mindir=False)
    callback.begin(training)
    callback.end(training)
    assert files(tmp_path) == []
    training.exit.is_requested = True
    callback.end(training)
    (name,) = files(tmp_path)
    written = (tmp_path / name).stat().st_mtime_ns
    callback.exit_requested(training)
    assert (tmp_path / name).stat().st_mtime_ns == written


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_lets_the_rank_leave(tmp_path, caplog):
    training = Training()
    old = tmp_path / "rank_0" / "Net_train.safetensors"
    callback = OnRequestExit(directory=tmp_path, save_mindir=False)
    callback.begin(training)
    old.write_bytes(b"old")
    (old.parent / ".Net_train.safetensors_tmp").mkdir()
    callback.exit_requested(training)
    assert old.read_bytes() == b"old"
    assert "rank 0 cannot save its model" in caplog.text


def test_equal_ranks_write_nothing_with_dedup(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FIRST_S", 0.1)
    stale = tmp_path / "rank_1" / "LeNet_train.safetensors"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier run")
    left(tmp_path, Training(rank=0), dedup=True, save_mindir=False)
    equal, odd = Training(rank=1), Training(rank=2)
    with torch.no_grad():
        odd.model.one.weight.add_(1.0)
    model = equal.model
    callback = OnRequestExit(file_name="LeNet", directory=tmp_path, dedup=True)
    callback.begin(equal)
    model.load_state_dict(
        safetensors.torch.load_file(tmp_path / "rank_0" / "LeNet_train.safetensors")
    )
    callback.exit_requested(equal)
    left(tmp_path, odd, dedup=True, save_mindir=False)
    assert files(tmp_path) == ["rank_0/LeNet_train.safetensors", "rank_2/LeNet_train.safetensors"]


def test_with_dedup_a_first_rank_that_writes_nothing_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FIRST_S", 0.1)
    left(tmp_path, Training(rank=0), dedup=True, save_mindir=False)
    late = Training(rank=1)
    late.step = 41  # and the first rank's file is of step 40
    left(tmp_path, late, dedup=True, save_mindir=False)
    assert len(files(tmp_path)) == 2


# --- the program ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9 reads so itself
def test_the_program_infers_as_the_model_does_for_any_batch(tmp_path):
    training = Training()
    left(tmp_path, training)
    model = training.model
    assert model.training and model.drop.training
    assert files(tmp_path) == ["rank_0/LeNet_train.pt2", "rank_0/LeNet_train.safetensors"]
    program = torch.export.load(tmp_path / "rank_0" / "LeNet_train.pt2").module()
    x, scale = torch.randn(7, 4), torch.full((1,), 2.0)
    model.eval()
    assert torch.equal(program(x, scale=scale), model(x, scale=scale))


class Branching(nn.Module):
    def forward(self, x, scale):
        return x if (x * scale).sum() > 0 else -x


@pytest.mark.parametrize(
    "model, told",
    [(Branching(), "rank 0 exports no LeNet_train.pt2: "), (None, "was not called")],
)
def test_a_program_that_cannot_be_made_is_a_warning(tmp_path, caplog, model, told):
    training = Training(model)
    if model is None:
        callback = OnRequestExit(directory=tmp_path)
        callback.begin(training)
        callback.exit_requested(training)
    else:
        left(tmp_path, training)
    assert told in caplog.text
    assert [path.rpartition(".")[2] for path in files(tmp_path)] == ["safetensors"]


def test_arguments_of_the_model_are_not_kept_alive(tmp_path):
    training = Training()
    callback = OnRequestExit(directory=tmp_path)
    callback.begin(training)
    model = training.model
    model(torch.randn(3, 4), scale=torch.ones(1))
    assert not model._forward_pre_hooks
    assert not any(isinstance(leaf, torch.Tensor) for leaf in callback._example._leaves)


# --- without msrun ----------------------------------------------------------------------------


class Alone(Training):
    """One that msrun knows nothing of."""

    def __init__(self, **options):
        super().__init__(**options)
        self.exit.is_guarded = False


def test_several_ranks_that_nobody_guards_are_warned_once(tmp_path, caplog):
    for rank in range(2):
        callback = OnRequestExit(directory=tmp_path, sig=signal.SIGUSR2)
        before = signal.getsignal(signal.SIGUSR2)
        callback.begin(Alone(rank=rank))
        assert signal.getsignal(signal.SIGUSR2) is before
    assert caplog.text.count("nothing makes all of them exit") == 1


def test_one_process_asks_itself_on_the_first_signal_only(tmp_path):
    training = Alone(world_size=1)
    before = signal.getsignal(signal.SIGUSR2)
    OnRequestExit(directory=tmp_path, sig=signal.SIGUSR2).begin(training)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert training.exit.asked == ["received SIGUSR2"]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_child_of_a_process_that_listens_does_not(tmp_path):
    OnRequestExit(directory=tmp_path, sig=signal.SIGUSR2).begin(Alone(world_size=1))
    pid = os.fork()
    if not pid:
        os._exit(signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_in_another_thread_no_signal_is_heeded_and_nothing_fails(tmp_path, caplog):
    callback = OnRequestExit(directory=tmp_path, sig=signal.SIGUSR2)
    thread = threading.Thread(target=callback.begin, args=(Alone(world_size=1),))
    thread.start()
    thread.join()
    assert "signals are ignored" in caplog.text


def test_one_process_looks_into_the_file_twice_a_second(tmp_path, monkeypatch):
    path = tmp_path / "exit.json"
    training = Alone(world_size=1)
    callback = OnRequestExit(directory=tmp_path, sig=signal.SIGUSR2, config_file=path)
    callback.begin(training)
    callback.step_end(training)
    path.write_text('{"GracefulExit": 1}')
    callback.step_end(training)
    assert training.exit.asked == []
    now = room.time.monotonic() + 1.0
    monkeypatch.setattr("worker_hooks.contract.exit_file.time.monotonic", lambda: now)
    callback.step_end(training)
    assert training.exit.asked == [f"{path} asks for it"]


@pytest.mark.parametrize(
    "before, after, asks, told",
    [
        (None, '{"GracefulExit": 1}', True, ""),
        ('{"GracefulExit": 0}', '{"GracefulExit": 1}', True, ""),
        ('{"GracefulExit": 1}', None, False, "before this training began"),
        ('{"GracefulExit": 1}', '{"GracefulExit": 1 }', True, "before this training began"),
        (None, '{"GracefulExit": 0}', False, ""),
        (None, '{"GracefulExit"', False, "Parse json file failed"),
        (None, "[1]", False, ""),
        (None, "1", False, ""),
    ],
)
def test_a_file_asks_if_it_was_changed(tmp_path, caplog, before, after, asks, told):
    path = tmp_path / "exit.json"
    if before is not None:
        path.write_text(before)
        os.utime(path, (1, 1))
    with caplog.at_level(logging.WARNING):
        file = ExitFile(str(path))
        if after is not None:
            path.write_text(after)
        assert file.asks() is asks
        file._next = 0.0
        assert file.asks() is False  # it is consumed
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


def test_a_drill_writes_none_of_the_users_files(tmp_path):
    training = Training()
    training.exit.save_to = str(tmp_path / "drill")
    left(tmp_path / "mine", training)
    assert sorted(os.listdir(tmp_path)) == ["drill"]
    assert "LeNet_train.safetensors" in os.listdir(tmp_path / "drill" / "rank_0")


def test_a_pipe_in_the_files_place_is_not_waited_for(tmp_path, caplog):
    os.mkfifo(tmp_path / "exit.json")
    assert not ExitFile(str(tmp_path / "exit.json")).asks()
    assert "it is no file" in caplog.text
