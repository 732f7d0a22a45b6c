"""Communicators of an accelerator are aborted as one group, in a thread, with a deadline."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import worker_hooks
from worker_hooks.contract.env import ENABLE_TFT, HOOKS, NCCL_ASYNC_ERRORS
from worker_hooks.distributed import communicators

LONG_S = 60.0


class Communicator:
    """As ProcessGroupNCCL: an abort outside of a group waits for its peers, which wait for it."""

    def __init__(self, said: list[str], name: str, error: Exception | None = None) -> None:
        self.said, self.name, self.error = said, name, error

    def _group_start(self) -> None:
        self.said.append("(")

    def _group_end(self) -> None:
        self.said.append(")")

    def abort(self) -> None:
        self.said.append(self.name)
        if self.error:
            raise self.error


class Plain:
    """A backend of another maker, without groups."""

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def abort(self) -> None:
        self.said.append(self.name)


def test_all_are_aborted_as_one_group_whatever_one_of_them_says():
    said: list[str] = []
    broken = RuntimeError("aborted before")
    backends = [Communicator(said, "b", broken), Communicator(said, "a"), Plain(said, "x")]
    communicators.abort_together(backends)
    assert said == ["(", "b", "a", "x", ")"]


def test_the_group_that_was_made_last_comes_first(monkeypatch):
    said: list[str] = []
    made = {name: Communicator(said, name) for name in "abc"}

    def group(name):
        def backend(device):
            if device.type != "xpu" or name == "b":
                raise RuntimeError("no backend for this device")
            return made[name]

        return SimpleNamespace(_get_backend=backend)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    groups = [(group(name), ("nccl", None)) for name in "abc"]
    world = SimpleNamespace(pg_map=SimpleNamespace(items=lambda: groups))
    monkeypatch.setattr(distributed_c10d, "_world", world)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    aborting = communicators.abort()
    assert aborting is not None
    communicators.await_abort(aborting)
    assert said == ["(", "c", "a", ")"]


def test_a_host_alone_has_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert [*communicators.device_types()] == ["cpu"]
    assert communicators.abort() is None
    communicators.await_abort(None)


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_whose_abort_does_not_end_is_killed(ends, capfd):
    pid = os.fork()
    if pid == 0:
        stuck = threading.Thread(target=threading.Event().wait, args=(0.01 if ends else LONG_S,))
        stuck.daemon = True
        stuck.start()
        communicators.await_abort(stuck, LONG_S if ends else 0.2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (0 if ends else -signal.SIGKILL)
    assert ("could not be aborted" in capfd.readouterr().err) != ends


UNDER_MSRUN = {HOOKS: "msrun-1", NCCL_ASYNC_ERRORS: "1"}


@pytest.mark.parametrize(
    ("environ", "handling"),
    [
        (UNDER_MSRUN, "0"),
        ({NCCL_ASYNC_ERRORS: "1"}, "1"),  # torchrun has nobody else who looks
        (UNDER_MSRUN | {NCCL_ASYNC_ERRORS: "3"}, "3"),  # the user's own choice
        ({HOOKS: "msrun-1"}, None),
        (UNDER_MSRUN | {ENABLE_TFT: "{TTP:0}"}, "1"),  # nobody looks then, either
        (UNDER_MSRUN | {ENABLE_TFT: "nonsense"}, "1"),
    ],
)
def test_a_script_that_imports_the_hooks_is_not_ended_by_torchs_watchdog(environ, handling):
    environ = dict(environ)
    communicators.outlive_peers(environ)
    assert environ.get(NCCL_ASYNC_ERRORS) == handling


@pytest.mark.parametrize("name", ["TrainState", "TrainFaultTolerance"])
def test_the_import_of_the_hooks_is_what_does_it(monkeypatch, name):
    for key, value in UNDER_MSRUN.items():
        monkeypatch.setenv(key, value)
    getattr(worker_hooks, name)
    assert os.environ[NCCL_ASYNC_ERRORS] == "0"


def test_a_group_that_was_there_before_keeps_what_it_was_made_with(monkeypatch):
    monkeypatch.setattr(communicators, "_backends", lambda: [Communicator([], "a")])
    environ = dict(UNDER_MSRUN)
    communicators.outlive_peers(environ)
    assert environ == UNDER_MSRUN


NCCL = Communicator([], "a")
NO_GROUP: list[Communicator] | None = None


@pytest.mark.parametrize(
    ("kind", "made", "environ", "why"),
    [
        ("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "0"}, ""),
        ("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, ""),
        ("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "3", "TORCH_NCCL_BLOCKING_WAIT": "1"}, ""),
        ("cuda", [], {NCCL_ASYNC_ERRORS: "3"}, ""),  # gloo alone
        (None, [NCCL], {NCCL_ASYNC_ERRORS: "1"}, ""),
        ("npu", [NCCL], {NCCL_ASYNC_ERRORS: "1"}, ""),
        (
            *("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "1"}),
            "NCCL's group was made before TrainState was imported; import it first",
        ),
        ("cuda", NO_GROUP, {NCCL_ASYNC_ERRORS: "3"}, f"{NCCL_ASYNC_ERRORS} is 3; set it to 0"),
        ("cuda", NO_GROUP, {}, f"{NCCL_ASYNC_ERRORS} is unset; set it to 0"),
        (
            *("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "0", "TORCH_DISTRIBUTED_DEBUG": "detail"}),
            "TORCH_DISTRIBUTED_DEBUG is detail; unset it",
        ),
        (
            *("cuda", [NCCL], {NCCL_ASYNC_ERRORS: "0", "TORCH_NCCL_DESYNC_DEBUG": "1"}),
            "TORCH_NCCL_DESYNC_DEBUG is 1; unset it",
        ),
    ],
)
def test_what_lets_torch_end_a_survivor_is_told_before_a_death(
    monkeypatch, kind, made, environ, why
):
    found = None if kind is None else SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(communicators, "_groups", lambda: [] if made is NO_GROUP else ["a group"])
    monkeypatch.setattr(communicators, "_backends", lambda: made or [])
    assert communicators.why_peers_end_it(environ) == why
