"""Batches since the last commit are handed out again, however often the step is interrupted."""

import random

import pytest
import torch

from worker_hooks.data.batch_replay import MOST, BatchReplay
from worker_hooks.data.feed import Feed
from worker_hooks.rng.randomness import Randomness


def taken(batches, count):
    return [next(batches) for _ in range(count)]


def test_an_interrupted_step_gets_its_batches_again_and_then_the_others():
    again = BatchReplay(iter(range(10)), 0)
    assert taken(again, 3) == [0, 1, 2]
    again.settle(2)
    assert taken(again.after(2, print), 3) == [2, 3, 4]


def test_one_that_was_not_handed_out_before_the_next_interruption_is_not_skipped():
    again = BatchReplay(iter(range(10)), 0)
    taken(again, 3)
    again.after(0, print)  # nothing of it is asked for
    assert taken(again.after(0, print), 1) == [0]
    assert taken(again.after(0, print), 5) == [0, 1, 2, 3, 4]


def test_a_commit_in_the_middle_of_what_is_repeated_forgets_only_what_it_committed():
    again = BatchReplay(iter(range(10)), 4)
    taken(again, 4)  # of the epoch the fifth to the eighth
    assert taken(again.after(4, print), 2) == [0, 1]
    again.settle(6)
    assert not again.has(5) and again.has(6) and again.has(8) and not again.has(9)
    assert taken(again.after(6, print), 3) == [2, 3, 4]


def test_randomness_is_put_back_to_where_loading_had_left_it():
    def load():
        while True:
            yield random.random()

    streams = Randomness()
    again = BatchReplay(load(), 0, streams)
    random.seed(1)
    first = taken(again, 2)
    follows = random.random()
    random.seed(2)
    restored = lambda state: streams.restore(streams.split(state))  # noqa: E731
    assert taken(again.after(0, restored), 2) == first
    assert random.random() == follows


def test_an_iterator_that_failed_is_not_gone_on_with():
    def load():
        yield 1
        raise OSError

    again = BatchReplay(load(), 0)
    next(again)
    assert again.has(0)
    with pytest.raises(OSError):
        next(again)
    assert not again.has(0)


def test_a_feed_goes_on_in_the_same_loop_only():
    feed = Feed([1, 2, 3, 4])
    feed.begin(0)
    feed.is_kept, feed.place = True, (0, 0)
    batches = feed.open()
    assert taken(batches, 2) == [1, 2]
    batches.close(is_over=False)
    assert feed.open_again((0, 1), 1) is None
    assert feed.open_again((1, 0), 1) is None
    feed.settle()
    assert feed.open_again((0, 0), 1) is None  # it is committed
    batches = feed.open_again((0, 0), 2)
    assert taken(batches, 2) == [3, 4]
    batches.close(is_over=True)
    assert feed.open_again((0, 0), 2) is None


def test_a_feed_keeps_nothing_unless_it_is_to():
    feed = Feed([1, 2, 3, 4])
    feed.begin(0)
    feed.place = (0, 0)
    taken(feed.open(), 2)
    assert feed.open_again((0, 0), 2) is None


def test_a_batch_that_the_script_took_apart_is_whole_again():
    again = BatchReplay(iter([{"x": torch.ones(2), "label": [1, (2, "three")]}, 5]), 0)
    batch = next(again)
    batch.pop("label").append(4)
    (repeated,) = taken(again.after(0, print), 1)
    assert repeated["label"] == [1, (2, "three")]
    repeated.clear()
    assert next(again.after(0, print)).keys() == {"x", "label"}


@pytest.mark.parametrize("batch", [[torch.ones(2)], {"x": (torch.ones(2), None)}])
def test_a_tensor_that_the_script_changed_in_place_is_not_handed_out_again(batch):
    again = BatchReplay(iter([batch]), 0)
    next(again)
    assert again.has(0)
    (batch[0] if isinstance(batch, list) else batch["x"][0]).mul_(2)
    assert not again.has(0)


def test_a_kind_that_does_not_tell_whether_it_was_changed_is_not_kept():
    class Words(dict):
        pass

    again = BatchReplay(iter([Words(x=1)]), 0)
    next(again)
    assert not again.has(0) and again.has(1)


def test_a_validation_is_not_kept():
    again = BatchReplay(iter([torch.ones(1)] * 1000), 0)
    with torch.no_grad():
        taken(again, 500)
    assert len(again.recent) == 1
    taken(again, 500)
    assert len(again.recent) <= MOST
    assert not again.has(0)
    again.settle(1000)
    assert again.has(1000)
