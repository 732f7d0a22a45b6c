"""Two ranks train; in one step one of them, or each, waits for something outside of the job.

Arguments: KIND, one of ``breakpoint`` and ``input`` (rank 1 waits for a person), or ``lock`` (all
ranks wait for the data that the file "data" holds back, as long as somebody has it locked).
"""

from __future__ import annotations

import fcntl
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from msrun import TrainState, run

KIND, AT = sys.argv[1], 40


class Locked(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, place):
        if KIND == "lock" and place == AT:
            with open("data") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return torch.ones(4)


dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.001)
loader = torch.utils.data.DataLoader(Locked(), batch_size=2)
state = TrainState(model=net, optimizer=opt, ckpt_save_path="checkpoints")


def train(state):
    model = DistributedDataParallel(net)
    for batch in state.batches(loader):
        if state.step == AT // 2 and dist.get_rank() == 1:
            print("waits", flush=True)
            if KIND == "breakpoint":
                breakpoint()  # noqa: T100  the case
            elif KIND == "input":
                input("go on? ")
        time.sleep(0.005)  # the end of the wait is to be seen before the end of the training
        model(batch).sum().backward()
        opt.step()
        opt.zero_grad()


run(train, state)
print("trained", state.step, flush=True)
dist.destroy_process_group()
