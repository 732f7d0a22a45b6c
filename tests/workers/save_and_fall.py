"""A training that saves, whose ranks are killed in the middle of it.

Arguments: JSON of ``[[RANK, STEP, MOMENT], ...]``, then those of ``train_and_save.py``. Each of
these strikes once, in the attempt that comes there first. ``MOMENT`` is one of

    before part    the rank has written nothing of its part of this step's checkpoint
    in part        it has written some of it
    after part     it has said that its part is complete
    in commit      rank 0: the manifest is written, the folder is not renamed yet
    after commit   rank 0: the checkpoint is complete
    beside         the process that writes beside training stands still, the rank dies
    a step later   the same, and the rank dies when it has committed one step more
"""

import json
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed
import torch.optim  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: F401

from worker_hooks.checkpoint import model_checkpoint
from worker_hooks.checkpoint.model_checkpoint import ModelCheckpoint
from worker_hooks.storage import commit
from worker_hooks.storage.find import candidates

falls = json.loads(sys.argv.pop(1))
rank = int(os.environ["RANK"])
random.seed(rank)  # a checkpoint has all randomness, and is compared with that of another run
np.random.seed(rank)  # noqa: NPY002


def is_to(step, moment):
    """Whether this is a moment to fall that nobody has taken yet."""
    for number, fall in enumerate(falls):
        if fall == [rank, step, moment]:
            try:
                Path(f"fell.{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
    return False


def fall(step, moment):
    if is_to(step, moment):
        os.kill(os.getpid(), signal.SIGKILL)


write_part, finalize, save, write = (
    model_checkpoint.write_part,
    model_checkpoint.finalize,
    ModelCheckpoint._save,
    commit.manifests.write,
)


def carried_out(order, content, advance):
    def advanced(nbytes):
        fall(order.step, "in part")
        advance(nbytes)

    fall(order.step, "before part")
    write_part(order, content, advanced)
    fall(order.step, "after part")


def committed(order, advance):
    done = finalize(order, advance)
    fall(order.step, "after commit")
    return done


def written(folder, manifest):
    write(folder, manifest)
    fall(manifest.step, "in commit")


late = []


def saved(self, step, reason):
    is_beside, is_late = is_to(step, "beside"), is_to(step, "a step later")
    if is_beside or is_late:
        self.wait()  # for this rank's part; rank 0 completes the checkpoint in another process
        while self._step not in {
            getattr(one, "step", -1) for _, one in candidates(self._directory)
        }:
            time.sleep(0.01)
        os.kill(self._writer._process.pid, signal.SIGSTOP)
    save(self, step, reason)
    if is_beside:
        os.kill(os.getpid(), signal.SIGKILL)
    if is_late:
        late.append(step + 1)


step_end = ModelCheckpoint.step_end


def ended(self, state):
    step_end(self, state)
    if state.step in late:
        os.kill(os.getpid(), signal.SIGKILL)


model_checkpoint.write_part, model_checkpoint.finalize = carried_out, committed
ModelCheckpoint._save, ModelCheckpoint.step_end = saved, ended
commit.manifests.write = written
runpy.run_path(str(Path(__file__).with_name("train_and_save.py")), run_name="__main__")
