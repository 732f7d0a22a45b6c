"""Batches since the last commit are handed out again, however often the step is interrupted."""

import random

import pytest

from worker_hooks.again import Again
from worker_hooks.loader import Feed
from worker_hooks.rng import Randomness


def taken(batches, count):
    return [next(batches) for _ in range(count)]


def test_an_interrupted_step_gets_its_batches_again_and_then_the_others():
    again = Again(iter(range(10)), 0)
    assert taken(again, 3) == [0, 1, 2]
    again.settle(2)
    assert taken(again.behind(2, print), 3) == [2, 3, 4]


def test_one_that_was_not_handed_out_before_the_next_interruption_is_not_skipped():
    again = Again(iter(range(10)), 0)
    taken(again, 3)
    again.behind(0, print)  # nothing of it is asked for
    assert taken(again.behind(0, print), 1) == [0]
    assert taken(again.behind(0, print), 5) == [0, 1, 2, 3, 4]


def test_a_commit_in_the_middle_of_what_is_repeated_forgets_only_what_it_committed():
    again = Again(iter(range(10)), 4)
    taken(again, 4)  # of the epoch the fifth to the eighth
    assert taken(again.behind(4, print), 2) == [0, 1]
    again.settle(6)
    assert not again.has(5) and again.has(6) and again.has(8) and not again.has(9)
    assert taken(again.behind(6, print), 3) == [2, 3, 4]


def test_randomness_is_put_back_to_where_loading_had_left_it():
    def load():
        while True:
            yield random.random()

    streams = Randomness()
    again = Again(load(), 0, streams)
    random.seed(1)
    first = taken(again, 2)
    follows = random.random()
    random.seed(2)
    restored = lambda state: streams.restore(streams.split(state))  # noqa: E731
    assert taken(again.behind(0, restored), 2) == first
    assert random.random() == follows


def test_an_iterator_that_failed_is_not_gone_on_with():
    def load():
        yield 1
        raise OSError

    again = Again(load(), 0)
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
