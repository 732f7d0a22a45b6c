"""What a replica under torchft is, whatever its ranks hold.

A replica whose step is not committed continues with its next batch, as in torchft's own examples.
A replica that returns gets the data position with the rest of the state.
"""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from training import Steps, batches, data

REPLICA, REPLICAS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])


class Replica:
    """Its manager, and how far it is in the data."""

    def __init__(
        self, save: Callable[[], dict[str, object]], load: Callable[[dict[str, object]], None]
    ) -> None:
        """``save`` and ``load``: the rest of its state."""
        self._save = save
        self._load = load
        self._batch = -1
        self._healed: list[int] = []  # the batch of the replica that sent its state
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            min_replica_size=1,
            load_state_dict=self._put,
            state_dict=lambda: {**self._save(), "batch": self._batch},
            replica_id=f"replica_{REPLICA}",
            timeout=timedelta(seconds=10),
            init_sync=False,  # every replica starts with the same weights
        )

    def _put(self, saved: dict[str, object]) -> None:
        self._load(saved)
        self._healed.append(saved["batch"])

    def train(
        self, model: nn.Module, adam: torch.optim.Optimizer, steps: Steps, rank: int, ranks: int
    ) -> None:
        """Until it is stopped; ``rank``: among the ``ranks`` of all replicas."""
        optimizer, loader = Optimizer(self.manager, adam), data(rank, ranks)
        steps.begin(0, attempt=0)
        feed = batches(loader, 0)
        while True:
            self._batch, inputs, labels = next(feed)
            optimizer.zero_grad()  # requests the quorum
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            before = self.manager.current_step()
            optimizer.step()  # if the replicas commit
            is_committed = self.manager.current_step() > before
            if self._healed:  # the others' gradients alone moved it: its own batch was not trained
                feed, self._batch = batches(loader, self._healed.pop() + 1), -1
            if is_committed:
                steps.finish(self.manager.current_step(), self._batch)
