"""Trains under NVRx's in-process restart: four ranks work, one more waits to replace one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper, Compose, Wrapper
from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from rollback import train
from training import RANK, Steps, arguments

ACTIVE = int(os.environ["ACTIVE_RANKS"])
GLOO_TIMEOUT = timedelta(seconds=2)  # nothing else frees a rank that waits for a dead one

options = arguments()
torch.optim.AdamW([torch.zeros(1)])  # imports for a second: a spare rank has done that already
port = int(os.environ["DATA_PORT"])  # a store beside the wrapper's own, which it wants for itself
store = dist.TCPStore("127.0.0.1", port, is_master=RANK == 0, wait_for_workers=False)


@Wrapper(rank_assignment=Compose(MaxActiveWorldSize(ACTIVE), ShiftRanks()))
def work(call: CallWrapper | None = None) -> None:
    assert call is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=GLOO_TIMEOUT)
    train(options, rank, world, Steps(options, rank), call.iteration, saving=call.atomic)


work()
