"""What tests of `msrun checkpoints` share."""

import pytest
import torch
from support.stored_states import Net

from msrun.commands import run


@pytest.fixture
def net():
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def call(capfd, tmp_path, monkeypatch):
    """`msrun checkpoints WORDS` in an own folder: its exit code, and what it said on both streams."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = run(["checkpoints", *map(str, words)])
        return code, *capfd.readouterr()

    return call
