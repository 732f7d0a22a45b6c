"""What a rank that lives on puts right before it trains with new peers."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.jobs import poll
from torch import nn
from torch.nn.parallel import distributed

from worker_hooks.contract.env import meeting_point, rejoined
from worker_hooks.data.feed_cache import FeedCache
from worker_hooks.distributed import abort, ddp_reducers
from worker_hooks.distributed.module_flags import RecordedFlags
from worker_hooks.state.scaler import ScalerPiece


def test_modules_train_again_after_a_validation_that_was_interrupted():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    net[2].eval()
    net[0].bias.requires_grad_(False)
    modes = RecordedFlags([net])
    net.eval()
    net[0].bias.requires_grad_(True)
    net[0].weight.requires_grad_(False)
    modes.restore()
    assert [each.training for each in net.modules()] == [True, True, True, False]
    assert (net[0].weight.requires_grad, net[0].bias.requires_grad) == (True, False)


def used_scaler():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer


def test_a_scaler_that_was_interrupted_unscales_again():
    scaler, optimizer = used_scaler()
    piece = ScalerPiece("scaler", scaler)
    value, tensors = piece.encode(piece.snapshot())
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        scaler.unscale_(optimizer)
    piece.restore(tensors, value)
    scaler.unscale_(optimizer)


def test_a_new_scaler_tells_what_an_old_one_tells():
    old = ScalerPiece("scaler", used_scaler()[0])
    value, tensors = old.encode(old.snapshot())
    new = ScalerPiece("scaler", torch.amp.GradScaler("cpu", init_scale=2.0))
    new.restore(tensors, value)
    again, others = new.encode(new.snapshot())
    assert again == value
    assert {name: each.item() for name, each in others.items()} == {
        name: each.item() for name, each in tensors.items()
    }


def test_other_loaders_are_let_go_of():
    feeds = FeedCache()
    loaders = [[1, 2], [3, 4]]
    for loader in loaders:
        feed = feeds.of(loader)
        feed.begin(0)
        feed.is_kept, feed.place = True, (0, 0)
        next(feed.open())
    feeds.release_others(feeds.of(loaders[1]))
    assert feeds.of(loaders[0]).open_again((0, 0), 0) is None
    assert next(feeds.of(loaders[1]).open_again((0, 0), 0)) == 3


def test_only_a_main_thread_that_sleeps_is_at_a_place():
    assert abort._place() is None  # it computes: it is the one that asks
    with ThreadPoolExecutor(1) as pool:  # while this one sleeps for the answer
        place = pool.submit(lambda: poll(abort._place)).result()
    assert place is not None


def test_where_ranks_meet():
    environ = {"MASTER_ADDR": "node", "MASTER_PORT": "29500"}
    assert meeting_point(environ) == ("node", 29500)
    environ |= rejoined(2, 4711)
    assert meeting_point(environ) == ("node", 4711)
    assert environ["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert "MASTER_PORT" not in rejoined(2, 0)


def test_ddp_broadcasts_what_is_not_known_to_be_equal(monkeypatch):
    told = []
    monkeypatch.setattr(ddp_reducers, "_is_watched", False)
    monkeypatch.setattr(distributed, "_sync_module_states", told.append)
    known, other = nn.Linear(1, 1), nn.Linear(1, 1)
    mixed = nn.Sequential(known, other)
    try:
        ddp_reducers.trust([known])
        for module in (known, other, mixed):
            distributed._sync_module_states(module)
        assert told == [other, mixed]
        ddp_reducers.trust(())
        distributed._sync_module_states(known)
        assert told == [other, mixed, known]
    finally:
        ddp_reducers.trust(())
    gc.collect()
