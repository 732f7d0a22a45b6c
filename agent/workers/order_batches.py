"""Splits the orders of many workers into messages that fit a packet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from worker_hooks.contract.protocol import StartWorkers, WorkerOrder
from worker_hooks.contract.wire import PACKET_BYTES, encode

BATCH = 32  # workers in one message, at most; ordinary ones stay well below a packet


def order_bytes(order: WorkerOrder) -> int:
    """The bytes that one order takes in a packet (JSON is ASCII, so characters are bytes)."""
    return len(json.dumps(order._asdict()))


def batches(
    attempt: int, workers: Sequence[WorkerOrder], *, keeps: bool = False
) -> Iterator[StartWorkers]:
    """Messages that order these workers; each fits a packet, unless one order alone does not.

    ``keeps``: workers of earlier attempts stay alive.
    """
    empty = len(encode(StartWorkers(attempt, (), keeps))) - len(", ")
    batch: list[WorkerOrder] = []
    size = empty
    for order in workers:
        added = order_bytes(order) + len(", ")
        if batch and (len(batch) == BATCH or size + added > PACKET_BYTES):
            yield StartWorkers(attempt, tuple(batch), keeps)
            batch, size = [], empty
        batch.append(order)
        size += added
    if batch:
        yield StartWorkers(attempt, tuple(batch), keeps)
