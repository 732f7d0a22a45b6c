"""What tests of gloo's groups share."""

import threading

import pytest
import torch.distributed as dist


@pytest.fixture
def groups():
    """Two ranks of one group, in one process."""
    store, made = dist.HashStore(), []
    ranks = [
        threading.Thread(
            target=lambda rank: made.append(dist.ProcessGroupGloo(store, rank, 2)), args=(rank,)
        )
        for rank in range(2)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    yield made
    made.clear()  # their threads and descriptors end with them
