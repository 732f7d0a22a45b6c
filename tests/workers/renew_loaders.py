"""Iterators of DataLoaders go on in copies of their process, with new workers; says what differs.

``renew_loaders.py CASE`` trains nothing: it hands out batches, once left alone and once not.
"""

import multiprocessing
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from worker_hooks.contract.process_stat import children
from worker_hooks.data import renewed_workers

torch.set_num_threads(1)  # a copy would lack the others
renewed_workers.watch(bool)


class Drawing(TensorDataset):
    """Draws from each generator that a worker has, and takes its time: batches come late."""

    def __init__(self, count=48):
        super().__init__(torch.arange(count).float())
        self.own = torch.Generator().manual_seed(7)
        self.secret = []

    def __getitem__(self, index):
        time.sleep(0.01 * (index % 3))
        drawn = random.random() + np.random.random()  # noqa: NPY002
        mine = torch.rand((), generator=self.own)
        return super().__getitem__(index)[0] + drawn + torch.rand(()) + mine


class Secretive(Drawing):
    """Its batches depend on what no look finds."""

    def __getitem__(self, index):
        return super().__getitem__(index) + state.count

    def __init__(self):
        super().__init__()
        self.secret = []


class Lazy(Drawing):
    """Opens its file at first use, in each worker: as data sets do that read HDF5 or LMDB."""

    def __init__(self):
        super().__init__()
        self.opened = None

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = open(__file__, "rb")  # noqa: SIM115  as they do
        return super().__getitem__(index) + os.pread(self.opened.fileno(), 1, index)[0]


class State:
    __slots__ = ("count",)


state = State()
state.count = 0


def lose_workers():
    """Go on in a copy of this process, which has no workers."""
    assert not (why := renewed_workers.note()), why
    drawn = random.getstate()
    if copy := os.fork():
        _, status = os.waitpid(copy, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for a worker that is killed
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(os.waitstatus_to_exitcode(status))
    random.setstate(drawn)
    renewed_workers.renew()


def seen(case, lost):
    torch.manual_seed(1)
    random.seed(1)
    found = []
    persistent = case == "persistent"
    data = {"secretive": Secretive, "lazy": Lazy}.get(case, Drawing)()
    loader = DataLoader(
        data, batch_size=4, shuffle=True, num_workers=3, persistent_workers=persistent
    )
    other = DataLoader(Drawing(), batch_size=8, num_workers=2, persistent_workers=persistent)
    beside = None
    for epoch in range(3):
        batches = iter(loader)
        for place, batch in enumerate(batches):
            found.append(batch.clone())
            if epoch == 1 and place == 2:
                beside = iter(other)
                found.append(next(beside))
            if lost and (epoch, place) in {(0, 0), (1, 4), (1, 5), (2, 11)}:
                state.count = epoch
                lose_workers()
            if epoch == 1 and place == 8 and case != "whole":
                break
        if beside is not None:
            found += list(beside)
            beside = None
        if lost and persistent:
            lose_workers()
        elif lost and case == "whole":
            assert batches._shutdown
            lose_workers()  # between epochs there are none
    found.append(torch.rand(3))
    return found


if sys.argv[1] == "strange":  # as another torch might be
    renewed_workers.look = None
    loader = DataLoader(Drawing(), batch_size=4, num_workers=1)
    assert len(list(batches := iter(loader))) == 12
    assert not renewed_workers.pids()
    batches = iter(loader)
    assert {each.pid for each in batches._workers} <= set(children(os.getpid()))
    print("the same", flush=True)
    sys.exit()
one, other = seen(sys.argv[1], lost=False), seen(sys.argv[1], lost=True)
assert len(one) == len(other), (len(one), len(other))
differ = [
    place for place, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)
]
assert not differ, differ
print("the same", flush=True)
