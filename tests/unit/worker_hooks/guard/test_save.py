"""A rank's part of a dump is only what it was told to be: nothing that changed under the reader."""

import json

import pytest
import torch

from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.guard.save import failed, save
from worker_hooks.state.snapshot import NotSavableError
from worker_hooks.tensors.shard import Replica

ENV = RankEnv(rank=0, world_size=1, attempt=0, record_id="r", hooks="", drill="")


class Source:
    """A state of one tensor, with a version and a doubt that a test changes."""

    def __init__(self):
        self.state_version, self.doubt, self.moved = 3, "", ""

    def replica(self, step, _without=()):
        return Replica({"w": torch.ones(8)}, [], json.dumps({"step": step}), {})

    def position(self, _step):
        return 1, 5

    def version(self, _step):
        return self.state_version

    def why_moved(self):
        return self.moved

    def why_unknown(self):
        return self.doubt


ORDERS = [
    {},
    {"is_quick": True},
    {"parts": 1},
    {"parts": 1, "is_quick": True},
]


def order(folder, parts=0, is_quick=False):
    folder = folder / "memory" if is_quick else folder
    if is_quick:
        folder.touch()
    return protocol.Save(1, 5, str(folder), 0, parts, is_quick)


@pytest.mark.parametrize("kind", ORDERS, ids=str)
@pytest.mark.parametrize("frozen_version", [None, 3])
def test_a_state_that_stays_is_saved(tmp_path, kind, frozen_version):
    answer = save(Source(), ENV, order(tmp_path, **kind), frozen_version, lambda _: None)
    assert isinstance(answer, protocol.Written if kind.get("parts") else protocol.Digested)


@pytest.mark.parametrize("kind", ORDERS, ids=str)
@pytest.mark.parametrize("frozen_version", [None, 3])
def test_a_state_that_changes_while_it_is_read_is_not(tmp_path, kind, frozen_version):
    source = Source()

    def advance(_nbytes):
        source.state_version = 4

    with pytest.raises(NotSavableError, match="the state changed while it was read"):
        save(source, ENV, order(tmp_path, **kind), frozen_version, advance)


def test_nor_is_one_that_changed_since_it_was_called_complete(tmp_path):
    with pytest.raises(NotSavableError, match="the state changed while it was read"):
        save(Source(), ENV, order(tmp_path), 2, lambda _: None)


def test_nor_is_a_commit_that_became_doubtful_meanwhile(tmp_path):
    source = Source()

    def advance(_nbytes):
        source.doubt = "a change that nobody saw"

    with pytest.raises(NotSavableError, match="nobody saw"):
        save(source, ENV, order(tmp_path), None, advance)


@pytest.mark.parametrize("kind", ORDERS, ids=str)
def test_nor_is_one_whose_device_went_on(tmp_path, kind):
    source = Source()
    source.moved = "its device went on"
    with pytest.raises(NotSavableError, match="its device went on"):
        save(source, ENV, order(tmp_path, **kind), None, lambda _: None)


def test_why_a_step_cannot_be_saved_is_one_sentence(tmp_path, caplog):
    why = "model.weight changed after step 5"
    answer = failed(ENV, order(tmp_path), NotSavableError(why))
    assert answer.why == why
    (line,) = caplog.records
    assert (line.getMessage(), line.exc_info) == (f"rank 0 cannot save step 5: {why}", None)


def test_where_an_error_that_nobody_foresaw_comes_from_is_in_the_log(tmp_path, caplog):
    answer = failed(ENV, order(tmp_path), RuntimeError("odd"))
    assert answer.why == "RuntimeError('odd')"
    (line,) = caplog.records
    assert line.exc_info
