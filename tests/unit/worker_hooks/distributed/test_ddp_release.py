"""A DDP lets its C++ part go before its group: with stand-ins that note when they end."""

import gc
import sys
from types import SimpleNamespace

import pytest

from worker_hooks.distributed import ddp_release


class Part:
    def __init__(self, name, ended, needs=None):
        self.name, self.ended, self.needs = name, ended, needs

    def __del__(self):
        self.ended.append(self.name)


@pytest.fixture
def ddp(monkeypatch):
    class DistributedDataParallel:
        def __init__(self, ended):
            self.process_group = Part("group", ended)
            self.reducer = Part("reducer", ended)
            self.logger = Part("logger", ended, self.reducer)

    module = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
    monkeypatch.setitem(sys.modules, ddp_release.DDP_MODULE, module)
    ddp_release.install()
    return DistributedDataParallel


@pytest.mark.parametrize("is_cycle", [False, True])
def test_the_group_ends_last(ddp, is_cycle):
    ended = []
    one = ddp(ended)
    one.cycle = one if is_cycle else None
    del one
    gc.collect()
    assert ended == ["logger", "reducer", "group"]


def test_one_that_was_never_made_ends_quietly(ddp, capsys):
    ddp.__new__(ddp).__del__()
    assert capsys.readouterr().err == ""


def test_while_the_interpreter_ends_the_group_is_kept(ddp, monkeypatch):
    del ddp.__del__
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    ddp_release.install()
    ended = []
    one = ddp(ended)
    del one
    assert ended == ["logger", "reducer"]


def test_what_others_put_there_stays(ddp):
    before = ddp.__del__
    ddp_release.install()
    assert ddp.__del__ is before


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_without_torch_nothing_is_done(monkeypatch, module):
    monkeypatch.setitem(sys.modules, ddp_release.DDP_MODULE, module)
    ddp_release.install()
