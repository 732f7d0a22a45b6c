"""When a rank starts no keeper of its memory, and what it says of that."""

from types import SimpleNamespace

import pytest
import torch

from worker_hooks.training import startup


def asked(keeps, **changes):
    """A guard, and a state of which nothing may be kept."""
    env = SimpleNamespace(keeps_memory=keeps, rank=0)
    guard = SimpleNamespace(env=env, is_on=True, not_kept_why="", **changes)
    startup.keep_memory(SimpleNamespace(), guard)
    return guard.not_kept_why


@pytest.mark.parametrize("keeps", ["live", "auto"])
def test_a_script_that_uses_an_accelerator_has_none(monkeypatch, keeps):
    """Nor one that has pinned memory, which is there with an accelerator only."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert asked(keeps) == "the script uses an accelerator"


def test_a_batch_system_is_asked_about_by_default_only(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert "Slurm" in asked("auto")
    with pytest.raises(AttributeError, match="why_unsafe"):  # a keeper is about to be started
        asked("live")


def test_where_it_is_not_wanted_nothing_is_said():
    assert asked("") == ""
