# ruff: noqa: NPY002  numpy's functions of old draw from the randomness of the whole process
"""Trains in one of many ways and says at the end, bit by bit, what came of it.

    train_kinds.py OUT --kind NAME [--plain] [--plain-first OTHER]

`--kind all` trains in all ways, one after the other, `--kind a,b` in some. With `--plain` the loops are those of a script
that knows no hooks; `--plain-first` does all of that before, into another folder. Every rank notes each loss in OUT/NAME.RANK.jsonl as it computes it, and the
digest of everything it holds at the end in OUT/NAME.RANK.json.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import kinds_of_changes
import kinds_of_data
import kinds_of_loops
import kinds_of_state
import kinds_of_updates
import numpy as np
import torch
import torch.distributed as dist

from worker_hooks import TrainState, run
from worker_hooks.training import torch_hooks

FILES = (kinds_of_state, kinds_of_updates, kinds_of_loops, kinds_of_data, kinds_of_changes)
KINDS = {name: kind for file in FILES for name, kind in file.KINDS.items()}
RANK = int(os.environ.get("RANK", "0"))


class Plain:
    """What a script without hooks has instead of a TrainState."""

    def __init__(self, **_):
        self.epoch = self.batch = 0
        self.step = -1  # where a loop of the script's own counts them
        self.counts = False

    @property
    def should_exit(self):
        self.step += 1
        self.batch = self.step
        return False

    def epochs(self, count):
        self.counts = True
        for epoch in range(count):
            self.epoch, self.batch = epoch, 0
            yield epoch

    def batches(self, loader):
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None and self.counts:
            set_epoch(self.epoch)
        for number, batch in enumerate(loader, 1):
            self.batch = number
            yield batch


class Job:
    """One training: what it registers, what it notes, how it is run."""

    rank = RANK

    def __init__(self, name, told):
        self.told = told
        self.out = Path(told.out, f"{name}.{RANK}.json")
        self.notes = open(f"{self.out}l", "a")  # noqa: SIM115  it stays open
        self.held = {}
        self.reseed()

    def reseed(self, number=RANK):
        """Everything that is random begins here; differently on each rank."""
        torch.manual_seed(100 + number)
        np.random.seed(200 + number)
        random.seed(300 + number)

    def state(self, **objects):
        self.held = objects
        make = Plain if self.told.plain else TrainState
        self.made = make(ckpt_save_path=self.told.ckpt, **objects)
        return self.made

    def note(self, what, value):
        """Keep a loss, under the place where it came about."""
        place = f"{self.made.epoch}.{what}.{self.made.batch}"
        self.notes.write(
            json.dumps({place: float(getattr(value, "detach", lambda: value)()).hex()}) + "\n"
        )
        self.notes.flush()
        time.sleep(0.002)  # no real step takes less

    def die(self):
        """Kill rank 1, once in a job of msrun."""
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.rank == 1 and is_first and "MSRUN_DRILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

    def lag(self, why, rank, lag_s):
        """Let a rank come late, in a job whose ranks are to be apart for this reason."""
        if self._is_late(why, rank):
            time.sleep(lag_s)

    def lag_until_frozen(self, why, rank, lag_s):
        """The same, and not before msrun has asked the ranks to halt: a busy machine is late."""
        if self._is_late(why, rank):
            until = time.monotonic() + 60
            while "FreezeRanks" not in Path("logs/events.jsonl").read_text():
                assert time.monotonic() < until, "no rank was asked to halt"
                time.sleep(0.01)
            time.sleep(lag_s)

    def _is_late(self, why, rank):
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        return self.rank == rank and is_first and os.environ.get("APART") == why

    def run(self, train):
        if self.told.plain:
            train(self.made)
        else:
            run(train, self.made)

    def end(self):
        self.notes.close()
        found = {name: digest(thing) for name, thing in self.held.items()}
        found["rng.torch"] = digest(torch.get_rng_state())
        found["rng.numpy"] = digest([np.random.get_state()[1].tolist(), np.random.rand()])
        found["rng.python"] = digest(random.getstate())
        self.out.write_text(json.dumps(found))
        print(f"{self.out.name}: step {getattr(self.made, 'step', None)}", flush=True)


def digest(thing):
    seen = hashlib.sha256()
    for octets in walk(thing):
        seen.update(octets)
    return seen.hexdigest()


def walk(thing):
    """Everything in it as bytes, buffers that are not saved included."""
    if isinstance(thing, torch.nn.Module):
        yield from walk(list(thing.named_parameters()))
        yield from walk(list(thing.named_buffers()))
    elif hasattr(thing, "state_dict"):
        yield from walk(thing.state_dict())
    elif isinstance(thing, torch.Tensor):
        plain = thing.detach().contiguous().reshape(-1).view(torch.uint8)
        yield f"{thing.dtype} {tuple(thing.shape)}".encode()
        yield bytes(plain.tolist())
    elif isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield str(key).encode()
            yield from walk(thing[key])
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from walk(each)
    elif not callable(thing):
        yield repr(thing).encode()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--kind", default="all")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--plain-first", metavar="OTHER")
    parser.add_argument("--ckpt", default="checkpoints")
    told, _ = parser.parse_known_args()
    gc.freeze()  # what is imported, as msrun does; each training looks through all that is not
    passes = [(told.plain_first, True)] if told.plain_first else []
    passes.append((told.out, told.plain))
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # started by hand
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for told.out, told.plain in passes:
        Path(told.out).mkdir(exist_ok=True)
        for name in KINDS if told.kind == "all" else told.kind.split(","):
            job = Job(name, told)
            KINDS[name](job)
            job.end()
            if not told.plain:  # the next one's backward is no business of this one
                torch_hooks._watchers.remove(job.made._loop.tracker.backward_begins)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
