"""MindSpore's monitors: when they print, what, and what they refuse."""

import math
import re
from types import SimpleNamespace

import pytest

from worker_hooks.callbacks import monitors
from worker_hooks.callbacks.monitors import LossMonitor, TimeMonitor


def training(**values):
    usual = {
        "epoch": 0, "step": 1, "batch": 1, "loss": 0.5, "batches_per_epoch": 4,
        "rank": 0, "world_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**usual | values)


def printed(monitor, losses, batches_per_epoch=4, first_step=1):
    """Steps with these losses; NaN where a step must not print."""
    for step, loss in enumerate(losses, first_step):
        epoch, batch = divmod(step - 1, batches_per_epoch)
        monitor.step_end(training(epoch=epoch, step=step, batch=batch + 1, loss=loss))


def test_the_loss_is_printed_in_mindspores_form(capsys):
    printed(LossMonitor(), [0.25, 0.125])
    assert capsys.readouterr().out == (
        "epoch: 1 step: 1, loss is 0.25\nepoch: 1 step: 2, loss is 0.125\n"
    )


def test_steps_are_of_the_epoch_and_intervals_of_the_training(capsys):
    printed(LossMonitor(3), [0.5] * 9)
    steps = re.findall(r"epoch: (\d) step: (\d)", capsys.readouterr().out)
    assert steps == [("1", "3"), ("2", "2"), ("3", "1")]


def test_a_resume_does_not_move_the_lines(capsys):
    printed(LossMonitor(3), [0.5] * 5, first_step=5)
    steps = re.findall(r"epoch: (\d) step: (\d)", capsys.readouterr().out)
    assert steps == [("2", "2"), ("3", "1")]


def test_nothing_is_printed_without_a_loss(capsys):
    printed(LossMonitor(), [None])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("every", [0, 1, 1000])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_training(capsys, every, loss):
    monitor = LossMonitor(every)
    with pytest.raises(ValueError) as raised:
        monitor.step_end(training(epoch=1, step=7, batch=3, loss=loss))
    assert str(raised.value) == (
        "In epoch: 2 step: 3, loss is NAN or INF, training process cannot continue, "
        "terminating training."
    )
    assert capsys.readouterr().out == ""


def test_zero_never_prints(capsys):
    printed(LossMonitor(0), [0.5] * 5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", None, True])
def test_a_wrong_interval_is_refused(wrong):
    with pytest.raises(ValueError, match="per_print_times must be an integer of at least 0"):
        LossMonitor(wrong)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told to."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(monitors.time, "perf_counter", lambda: now.s)
    return now


def epoch(monitor, clock, steps, data_s=0.25, step_s=1.0):
    state = training()
    monitor.epoch_begin(state)
    for _ in range(steps):
        clock.s += data_s
        monitor.step_begin(state)
        clock.s += step_s
        monitor.step_end(state)
    monitor.epoch_end(state)


def test_the_time_is_printed_in_mindspores_form(capsys, clock):
    epoch(TimeMonitor(), clock, 4)
    assert capsys.readouterr().out == "Train epoch time: 5000.000 ms, per step time: 1250.000 ms\n"


def test_each_epoch_is_timed_anew(capsys, clock):
    monitor = TimeMonitor()
    epoch(monitor, clock, 4)
    clock.s += 50
    epoch(monitor, clock, 2)
    assert capsys.readouterr().out.splitlines()[1] == (
        "Train epoch time: 2500.000 ms, per step time: 1250.000 ms"
    )


def test_the_wait_for_data_is_told_when_asked_for(capsys, clock):
    monitor = TimeMonitor(data_time=True)
    for _ in range(2):
        epoch(monitor, clock, 4)
        assert capsys.readouterr().out.endswith(
            ", per step time: 1250.000 ms, per step data time: 250.000 ms\n"
        )


def test_the_given_size_counts_only_without_steps(capsys, clock):
    monitor = TimeMonitor(10)
    epoch(monitor, clock, 4)
    assert "per step time: 1250.000 ms" in capsys.readouterr().out
    monitor.epoch_begin(training())
    clock.s += 1
    monitor.epoch_end(training())
    assert capsys.readouterr().out == "Train epoch time: 1000.000 ms, per step time: 100.000 ms\n"


def test_an_epoch_without_steps_is_not_timed(capsys, clock):
    epoch(TimeMonitor(), clock, 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_a_wrong_size_is_refused(wrong):
    with pytest.raises(ValueError, match="data_size must be an integer of at least 1"):
        TimeMonitor(wrong)


@pytest.mark.parametrize("wrong", [0, 1, None, "yes"])
def test_a_wrong_switch_is_refused(wrong):
    with pytest.raises(TypeError, match="data_time must be True or False"):
        TimeMonitor(data_time=wrong)
