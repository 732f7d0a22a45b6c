"""MindSpore's callback for exiting on request: save the model, end with exit code 0.

    state = TrainState(..., callbacks=[OnRequestExit(file_name="LeNet", config_file="exit.json")])

Under msrun a request to one rank is a request to the job: all ranks finish the same step, and msrun
saves what a resume needs. Only then each rank calls this callback, which writes its model.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from worker_hooks.callbacks import model_file
from worker_hooks.callbacks.exported_program import Example
from worker_hooks.callbacks.graceful_exit import ExitControl
from worker_hooks.callbacks.protocol import Training
from worker_hooks.contract.atomic_file import ensure_folder
from worker_hooks.contract.exit_file import ExitFile
from worker_hooks.guard.signal_wakeup import SignalCatcher
from worker_hooks.storage import safetensors_file

log = logging.getLogger("msrun")

FIRST_S = 10.0  # to wait for the first rank's file, with dedup
LOOK_S = 0.02
NO_COMMON_STEP = (
    "OnRequestExit: nothing guards these ranks, so nothing makes all of them exit after the same "
    "step: requests to exit are ignored; start them with msrun"
)


class Exiting(Training, Protocol):
    """What this callback reads of a training."""

    @property
    def exit(self) -> ExitControl:
        """What is known of exiting early."""


class OnRequestExit:
    """Exits training on request, as MindSpore's callback of this name does.

    On a graceful exit, and only then, each rank writes ``{directory}/rank_{rank}/`` with

    * ``{file_name}_train.safetensors``: parameters and buffers under the model's own names, with
      ``epoch_num``, ``step_num``, ``batch_num``, ``global_step`` and, where there is a scaler,
      ``loss_scale`` as metadata, and
    * ``{file_name}_train.pt2``: the model as a program for inference, if it can be exported.

    Unlike MindSpore's it does not load these files (``msrun --resume`` resumes from what msrun has
    saved; ``load_state_dict`` reads the model's file), it needs no unanimous request and no
    communication between ranks in each step, and it counts ranks, not devices. In MindSpore a
    request in the last step makes the end of training save a second time, without metadata; here it
    saves once, like any other request.

    Without msrun a single process exits after the step under way; several processes do not exit.
    """

    def __init__(
        self,
        save_ckpt: bool = True,
        save_mindir: bool = True,
        file_name: str = "Net",
        directory: str | os.PathLike[str] | None = "./",
        config_file: str | os.PathLike[str] | None = None,
        sig: int = signal.SIGTERM,
        dedup: bool = False,
    ) -> None:
        """Take MindSpore's arguments, and ``dedup``.

        Args:
            save_ckpt: write the model's weights.
            save_mindir: write the exported program.
            file_name: the files' stem, without a folder.
            directory: where the ranks' folders are made; ``None``: the working directory.
            config_file: a JSON file in which ``{"GracefulExit": 1}`` requests an exit; it may be
                made later, and its content from before the run does not count.
            sig: a signal to any rank that also requests an exit.
            dedup: ranks whose model is equal to the first rank's write nothing.

        Raises:
            ValueError: an argument is of the wrong type, or no process can catch the signal.
        """
        path = str, os.PathLike
        for name, value, kind in (
            ("save_ckpt", save_ckpt, bool),
            ("save_mindir", save_mindir, bool),
            ("dedup", dedup, bool),
            ("file_name", file_name, str),
            ("directory", directory, (*path, type(None))),
            ("config_file", config_file, (*path, type(None))),
            ("sig", sig, int),
        ):
            _check(name, value, kind)
        if sig in {signal.SIGKILL, signal.SIGSTOP}:
            raise ValueError(f"Not support send exit request by signal {signal.Signals(sig).name}.")
        if isinstance(sig, bool) or sig not in signal.valid_signals():
            raise ValueError(f"The parameter 'sig' must be a signal, but got {sig}.")
        if not file_name or os.path.basename(file_name) != file_name:
            raise ValueError(
                f"The parameter 'file_name' must be a name without a folder, but got {file_name!r}."
            )
        self.exit_signal = int(sig)
        self.exit_file = "" if config_file is None else os.path.abspath(config_file)
        self._saves = save_ckpt, save_mindir
        self._dedup = dedup
        self._name = f"{file_name}_train"
        self._directory = Path(os.path.abspath(directory or "."))
        self._folder = self._directory
        self._example: Example | None = None
        self._caught: SignalCatcher | None = None
        self._file: ExitFile | None = None
        self._is_saved = False

    def begin(self, state: Exiting) -> None:
        """Make the folder now, so that a wrong one is refused early; without msrun, listen.

        Raises:
            OSError: the folder cannot be made.
        """
        if any(self._saves):
            directory = state.exit.redirected(str(self._directory))
            self._folder = Path(directory, f"rank_{state.rank}")
            ensure_folder(self._folder)
        models = list(state.exit.models.values())
        if self._saves[1] and len(models) == 1:
            self._example = Example(models[0])
        if state.exit.is_guarded:
            return
        if state.world_size > 1:
            if state.rank == 0:
                log.warning(NO_COMMON_STEP)
            return
        self._listen(state)

    def step_end(self, state: Exiting) -> None:
        """Look for a request in the file, if msrun does not."""
        if self._file is not None and self._file.asks():
            state.exit.request(f"{self.exit_file} asks for it")

    def exit_requested(self, state: Exiting) -> None:
        """Write the files: training ends now."""
        if self._is_saved:
            return
        self._is_saved = True
        if self._caught is not None:
            self._caught.restore()
        is_wanted = True
        try:
            if self._saves[0]:
                is_wanted = self._save(state)
        except (OSError, TypeError) as error:
            log.error("rank %d cannot save its model: %s", state.rank, error)  # noqa: TRY400
        if self._saves[1] and is_wanted:
            self._export(state)

    def end(self, state: Exiting) -> None:
        """Training reached its end: write the files only if an exit was requested meanwhile."""
        if state.exit.is_requested:
            self.exit_requested(state)

    def _listen(self, state: Exiting) -> None:
        """Without msrun, this process itself receives requests."""

        def heard(number: int, _frame: FrameType | None) -> None:
            if self._caught is not None:
                self._caught.restore()  # a second signal ends the process at once
            state.exit.request(f"received {signal.Signals(number).name}")

        try:
            self._caught = SignalCatcher([self.exit_signal], heard)
        except (OSError, ValueError) as error:
            log.warning("OnRequestExit: signals are ignored: %s", error)
        self._file = ExitFile(self.exit_file) if self.exit_file else None

    def _save(self, state: Exiting) -> bool:
        """Write the model's weights; ``False``: the first rank's file has them."""
        tensors = model_file.tensors_of(state.exit.models)
        metadata = {
            "epoch_num": str(state.epoch + 1),
            "step_num": str(state.step),
            "batch_num": str(state.batches_per_epoch or state.batch),
            "global_step": str(state.step),
            "run_id": state.exit.run_id,
            "digest": model_file.digest_of(tensors),
        }
        if state.exit.loss_scale is not None:
            metadata["loss_scale"] = str(state.exit.loss_scale)
        path = self._folder / f"{self._name}.safetensors"
        if self._dedup and state.rank > 0 and self._is_first_equal(metadata):
            for each in (path, path.with_suffix(".pt2")):
                each.unlink(missing_ok=True)  # of an earlier run: it would look like this run's
            return False
        model_file.write(path, tensors, metadata)
        return True

    def _is_first_equal(self, mine: Mapping[str, str]) -> bool:
        """Whether the first rank's file has the same content as this rank's would have."""
        path = self._folder.parent / "rank_0" / f"{self._name}.safetensors"
        deadline = time.monotonic() + FIRST_S
        while time.monotonic() < deadline:
            try:
                theirs = safetensors_file.read_header(path).metadata
            except (OSError, ValueError):
                theirs = {}
            if all(theirs.get(key) == mine[key] for key in ("run_id", "global_step")):
                return theirs.get("digest") == mine["digest"]
            time.sleep(LOOK_S)
        return False

    def _export(self, state: Exiting) -> None:
        path = self._folder / f"{self._name}.pt2"
        try:
            if self._example is None:
                raise ValueError(f"there are {len(state.exit.models)} models")  # noqa: TRY301
            self._example.export(path)
        except Exception as error:  # noqa: BLE001  torch raises many types
            lines = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("rank %d exports no %s: %s", state.rank, path.name, lines[0])


def _check(name: str, value: Any, kind: Any) -> None:
    """Refuse with MindSpore's message."""
    if not isinstance(value, kind):
        raise ValueError(  # noqa: TRY004  MindSpore's type of error
            f"The parameter '{name}' must be isinstance of {kind}, but got {value}."
        )
