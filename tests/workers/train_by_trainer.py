"""Trains by a class that owns the loop, as Hugging Face's Trainer does, with a callback for msrun.

The callback restores weights and the count of steps. The trainer's data begin anew, as it does not
know where they were.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState

EPOCHS = 2


class Trainer:
    """Steps over all data of some epochs."""

    def __init__(self, net, data, callback):
        self.net, self.callback = net, callback
        self.loader = DataLoader(data, 4, sampler=DistributedSampler(data))
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.step, self.is_stopping = 0, False

    def train(self):
        model = DistributedDataParallel(self.net)
        self.callback.on_train_begin(self)
        for epoch in range(EPOCHS):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                if self.is_stopping or self.step == EPOCHS * len(self.loader):
                    return
                (model(x) - y).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                self.callback.on_step_end(self)


class Protect:
    """What a user writes first."""

    def on_train_begin(self, trainer):
        self.state = TrainState(
            model=trainer.net, optimizer=trainer.optimizer, ckpt_save_path="checkpoints"
        )
        trainer.is_stopping = self.state.should_exit
        trainer.step = self.state.step

    def on_step_end(self, trainer):
        trainer.is_stopping = self.state.should_exit
        print(f"step {self.state.step}", flush=True)
        time.sleep(0.1)


torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo")
Trainer(
    torch.nn.Linear(4, 1), TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), Protect()
).train()
dist.destroy_process_group()
