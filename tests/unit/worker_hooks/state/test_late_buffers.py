"""Buffers that change between a backward and its commit: only those that differ by rank are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from worker_hooks.contract.fingerprint import LATE, differences
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.private import Position
from worker_hooks.state.registry import pieces_of


class NoLoader:
    entries = ()

    def fill(self, _address: int, _known: object = None) -> int:
        return 0


class Counters(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for number in range(count):
            self.register_buffer(f"seen_{chr(97 + number % 26)}{number // 26}", torch.zeros(2))


class Rank:
    """One rank's committed state with its page."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.state = CommittedState(pieces_of({"model": net, "optimizer": optimizer}), dict)
        os.close(self.state.open(0, 0, NoLoader(), Position(0, 0)))
        self.state.begin_loop(0, 0)

    def step(self, **late: float) -> dict[str, str]:
        """What a rank reports after a step; ``late``: what it adds to buffers behind backward."""
        place = Position(0, self.state.step + 1)
        self.state.under_way(place)
        self.state.updated(1)
        for name, value in late.items():
            self.net.get_buffer(name).data.add_(value)
        self.state.commit(place)
        return self.state.private.late_values()


@pytest.fixture
def ranks() -> Iterator[Callable[[int], list[Rank]]]:
    with ExitStack() as pages:
        found: list[Rank] = []

        def make(count: int) -> list[Rank]:
            for _ in range(3):
                found.append(Rank(Counters(count)))
                pages.callback(found[-1].state.page.close)
            return found

        yield make


def named(texts: list[dict[str, str]]) -> list[str]:
    return [each.name for each in differences(dict(enumerate(texts)))]


def test_of_buffers_that_change_late_only_those_that_differ_by_rank_are_named(ranks):
    texts = [
        each.step(seen_a0=1, seen_b0=2, seen_c0=3 + rank) for rank, each in enumerate(ranks(4))
    ]
    assert named(texts) == [f"{LATE}buffer `model.seen_c0`"]


def test_what_is_late_and_the_same_on_all_ranks_is_not_named(ranks):
    assert named([each.step(seen_a0=1, seen_b0=2) for each in ranks(3)]) == []


def test_of_very_many_alike_ones_are_one_and_told_to_be_several(ranks):
    late = {f"seen_{chr(97 + number % 26)}{number // 26}": 1.0 for number in range(150)}
    same, odd, _ = ranks(150)
    texts = [same.step(**late), odd.step(**late | {"seen_b3": 2.0})]
    assert len(texts[0]) <= 100
    assert named(texts) == [f"{LATE}one of the buffers `model.seen_b*`"]
