"""MindSpore's monitors: the loss and the time of a step, printed."""

from __future__ import annotations

import math
import time

from worker_hooks.callbacks.protocol import Training


class LossMonitor:
    """Prints the loss every so many steps, in MindSpore's form: ``epoch: 1 step: 20, loss is 0.1``.

    Epochs are counted from 1, and steps within them by batches; every rank prints its own lines. As
    in MindSpore, the loss of every step is read, which waits for a GPU, and a loss that is not
    finite ends training.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        """Choose how often to print.

        Args:
            per_print_times: print at every multiple of this count of steps; 0: never. Steps are
                counted since training began, so a resume does not move the lines.

        Raises:
            ValueError: this is no integer of at least 0.
        """
        if type(per_print_times) is not int or per_print_times < 0:
            raise ValueError(
                f"per_print_times must be an integer of at least 0, not {per_print_times!r}"
            )
        self._every = per_print_times

    def step_end(self, state: Training) -> None:
        """Print the loss if it is due.

        Raises:
            ValueError: the loss is NaN or infinite.
        """
        loss = state.loss
        if loss is None:
            return
        epoch = state.epoch + 1
        if not math.isfinite(loss):
            raise ValueError(
                f"In epoch: {epoch} step: {state.batch}, loss is NAN or INF, training process "
                "cannot continue, terminating training."
            )
        if self._every and state.step % self._every == 0:
            print(f"epoch: {epoch} step: {state.batch}, loss is {loss}", flush=True)


class TimeMonitor:
    """Prints how long an epoch and its steps took, in MindSpore's form.

    ``Train epoch time: 5673.360 ms, per step time: 2.996 ms``. After a resume, both count from the
    resume on.
    """

    def __init__(self, data_size: int | None = None, data_time: bool = False) -> None:
        """Choose what to print.

        Args:
            data_size: steps of an epoch; used only if no step was seen, as in MindSpore.
            data_time: add how long a step waited for its batch: ``, per step data time: 0.011 ms``.

        Raises:
            ValueError: ``data_size`` is not an integer of at least 1.
            TypeError: ``data_time`` is not a bool.
        """
        if data_size is not None and (type(data_size) is not int or data_size < 1):
            raise ValueError(f"data_size must be an integer of at least 1, not {data_size!r}")
        if type(data_time) is not bool:
            raise TypeError(f"data_time must be True or False, not {data_time!r}")
        self._data_size = data_size
        self._says_data_time = data_time
        self._epoch_began_s = self._step_ended_s = time.perf_counter()
        self._data_s = 0.0
        self._steps = 0

    def epoch_begin(self, state: Training) -> None:  # noqa: ARG002
        """Start the clock."""
        self._epoch_began_s = self._step_ended_s = time.perf_counter()
        self._data_s = 0.0
        self._steps = 0

    def step_begin(self, state: Training) -> None:  # noqa: ARG002
        """The batch is loaded."""
        self._data_s += time.perf_counter() - self._step_ended_s

    def step_end(self, state: Training) -> None:  # noqa: ARG002
        """The next batch will be loaded."""
        self._steps += 1
        self._step_ended_s = time.perf_counter()

    def epoch_end(self, state: Training) -> None:  # noqa: ARG002
        """Print the times, unless there was no step."""
        steps = self._steps or self._data_size
        if not steps:
            return
        epoch_ms = (time.perf_counter() - self._epoch_began_s) * 1000
        line = f"Train epoch time: {epoch_ms:.3f} ms, per step time: {epoch_ms / steps:.3f} ms"
        if self._says_data_time and self._data_s:  # if step_begin was called
            line += f", per step data time: {self._data_s * 1000 / steps:.3f} ms"
        print(line, flush=True)
