"""Tests of the training loop have a status page and no agent."""

from __future__ import annotations

import gc

import pytest
import torch

from worker_hooks.guard.guard import Guard
from worker_hooks.training import torch_hooks


@pytest.fixture(autouse=True)
def paged(monkeypatch):
    """There is a page, though there is no agent; torch and its hooks are left as they were."""
    for name in ("RANK", "WORLD_SIZE", "MSRUN_HOOKS", "MSRUN_DRILL", "MS_ENABLE_TFT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Guard, "is_on", property(lambda _: True))
    before, watchers = torch.get_rng_state(), list(torch_hooks._watchers)
    yield
    torch.set_rng_state(before)
    torch_hooks._watchers[:] = watchers
    gc.collect()  # pages are files
