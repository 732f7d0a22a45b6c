"""Saving a shard: beside a main thread that hangs, on a full disk, with little memory."""

import os
import subprocess
import threading

import pytest
import torch
from support.jobs import ROOT

from worker_hooks.tensors.shard import Replica, digest, write

pytestmark = pytest.mark.slow


ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


def quiet(_nbytes):
    pass


def replica(tensors):
    return Replica(tensors, [], "{}", {})


def test_it_runs_in_a_thread_of_its_own(tmp_path):
    tensors = {
        "a": torch.nn.Parameter(torch.ones(2000, 3000).t()),
        "b": torch.ones(3, requires_grad=True) * 2,
    }
    found = []
    thread = threading.Thread(
        target=lambda: found.append(write(tmp_path / "x", replica(tensors), 0, 1, quiet))
    )
    thread.start()
    thread.join()
    assert found[0].digest == digest(replica(tensors), quiet)
    assert tensors["b"].grad_fn is not None


def test_a_full_disk_leaves_nothing(tmp_path, warm_python):
    code = f"""
import os, resource, threading, torch
from pathlib import Path
from worker_hooks.tensors.shard import Replica, write
resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20))
fds = os.listdir("/proc/self/fd")
try:
    write(Path({str(tmp_path)!r}, "x"), Replica({{"a": torch.ones(5 << 20)}}, [], "", {{}}), 0, 1, print)
except OSError as error:
    assert error.filename.endswith("/x")
    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/fd")) == len(fds)
    print(error.strerror)
"""
    run = [*warm_python.words, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=ENVIRON)
    assert done.stdout == "File too large\n"
    assert list(tmp_path.iterdir()) == []


MEMORY = """
import json, sys, torch
from pathlib import Path
from worker_hooks.tensors import shard
def peak_kb():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0])
path, kind, part, parts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tensors = {str(i): torch.ones(1 << 12, 1 << 12) for i in range(7)}
tensors["small"] = torch.ones(1 << 24).int()
if kind == "strided":
    tensors = {name: tensor[..., 1:] for name, tensor in tensors.items()}
tensors["x"] = torch.ones(300, 300).t()
small = shard.Replica({"x": tensors["x"]}, [], "{}", {})
for every in range(2):
    shard.write(path, small, 0, 1, lambda n: None)  # torch's first calls cost memory, too
Path("/proc/self/clear_refs").write_text("5")
before = peak_kb()
state = shard.Replica(tensors, [], "{}", {})
if parts:
    shard.write(path, state, part, parts, lambda n: None)
else:
    shard.digest(state, lambda n: None)
print(sum(t.nbytes for t in tensors.values()), (peak_kb() - before) * 1024)
"""


@pytest.mark.parametrize(
    ("kind", "part", "parts"), [("in order", 0, 1), ("strided", 1, 3), ("strided", 0, 0)]
)
def test_extra_memory_is_bounded(tmp_path, warm_python, kind, part, parts):
    run = [*warm_python.words, "-c", MEMORY, tmp_path / "x", kind, str(part), str(parts)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=ENVIRON)
    size, extra = map(int, done.stdout.split())
    assert size > 500e6
    assert extra < (64e6 if kind == "strided" else 8e6)
