"""Orders of many workers go in messages that fit a packet each."""

import pytest

from agent.workers.order_batches import BATCH, batches
from worker_hooks.contract.protocol import StartWorkers, WorkerOrder
from worker_hooks.contract.wire import PACKET_BYTES, encode

PLAIN = WorkerOrder(0, ("python", "-u", "train.py"), {"RANK": "0"}, "", "")


def test_a_batch_of_ordinary_workers_fits_a_packet():
    environ = {f"A_VARIABLE_NAME_{i}": "/a/long/path" * 8 for i in range(12)}
    order = WorkerOrder(0, ("python", "-u", "x" * 200), environ, "y" * 200, "z" * 200)
    assert len(encode(StartWorkers(0, (order,) * BATCH))) < PACKET_BYTES


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([10], [1]),
        ([10] * BATCH, [BATCH]),
        ([10] * (2 * BATCH + 1), [BATCH, BATCH, 1]),
        ([100_000] * 3, [1, 1, 1]),
        ([60_000] * 8, [3, 3, 2]),
        ([60_000, 60_000, 150_000, 10, 190_000], [2, 2, 1]),
        ([10, PACKET_BYTES, 10], [1, 1, 1]),  # that one fits nowhere, and spoils no other
    ],
)
def test_workers_are_ordered_in_messages_that_fit_a_packet(lengths, expected):
    workers = [PLAIN._replace(rank=i, argv=("x" * length,)) for i, length in enumerate(lengths)]
    made = list(batches(3, workers))
    assert [len(batch.workers) for batch in made] == expected
    assert [worker for batch in made for worker in batch.workers] == workers
    assert {batch.attempt for batch in made} <= {3}
    kept = list(batches(3, workers, keeps=True))
    assert [batch._replace(keeps=False) for batch in kept] == made
    assert all(batch.keeps for batch in kept)


@pytest.mark.parametrize("letter", ["x", "ä", "\n", "😀"])
def test_a_packet_is_filled_to_the_byte(letter):
    """Two orders that fill a packet exactly go together; one byte more parts them."""
    left = PACKET_BYTES - len(encode(StartWorkers(0, (PLAIN, PLAIN._replace(stdout=letter * 50)))))
    for more, expected in ((0, [2]), (1, [1, 1])):
        second = PLAIN._replace(stdout=letter * 50, stderr="x" * (left + more))
        made = list(batches(0, [PLAIN, second]))
        assert [len(batch.workers) for batch in made] == expected
        assert all(len(encode(batch)) <= PACKET_BYTES for batch in made)
