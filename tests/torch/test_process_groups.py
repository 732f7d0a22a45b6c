"""A rank that waits in a collective for a peer that never comes is freed, and meets the others."""

import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.jobs import DEADLINE_S, poll

from worker_hooks.contract.protocol import Rejoin
from worker_hooks.distributed import process_group
from worker_hooks.recovery.rejoin import Membership

SCRIPT = Path(__file__).parents[1] / "workers" / "leave_group.py"


def test_a_rank_tells_why_it_could_not_join_others():
    script = SCRIPT.with_name("fixed_groups.py")
    environ = {"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": os.environ["PATH"]}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, env=environ, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == {
        "none": "",
        "store": process_group.STORE,
        "plain": "",
        "groups": "",
        "kept": "",
        "debugged": "makes process groups of _ProcessGroupWrapper outside of the training function",
        "early": process_group.EARLY,
        "wrapped": process_group.WRAPPED,
    }


def leave(where):
    """Exit code, stdout and stderr of the script."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": os.environ["PATH"]},
        start_new_session=True,
    ) as job:
        try:
            out, err = job.communicate(timeout=DEADLINE_S)
            return job.returncode, out, err
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("where", ["all_reduce", "receive", "send"])
def test_ranks_leave_a_broken_group_and_make_a_new_one(where):
    code, out, err = leave(where)
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == 3
    for each in told:
        assert each["freed_s"] < 5  # torch's own time-out is half an hour
        assert each["echo"] == "?"  # a connection that is no rank's still answers
        assert each["channel"] == "!"  # and so does one to rank 0 that is no group's
        assert each["total"] == 3
        assert each["threads"][1] <= each["threads"][0]


class Cycle:
    """Not gone before the collector has looked."""

    def __init__(self, held):
        self.held = self, held


class Ordered:
    """A guard, as far as it matters to whoever leaves."""

    is_on = False
    not_replaceable_why = ""

    def rejoin(self):
        return Rejoin(1, "", "", 0), False


HELD = {
    "nothing": lambda: None,
    "the group": lambda: dist.group.WORLD,
    "its backend": lambda: dist.group.WORLD._get_backend(torch.device("cpu")),
    "a collective": lambda: dist.all_reduce(torch.ones(1), async_op=True),
    "another group": lambda: dist.new_group([0]),
}


@pytest.mark.parametrize("held", HELD)
def test_no_thread_of_a_group_is_left_for_a_forked_child_to_join(monkeypatch, held):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        poll(process_group.have_threads)  # each gives itself its name
        Cycle(HELD[held]())
        Membership(Ordered(), list).leave([])
    finally:
        gc.enable()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert not process_group.have_threads()


def test_a_group_is_seen_before_its_threads_have_their_names(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        poll(process_group.have_threads)
        for task in Path("/proc/self/task").iterdir():
            (task / "comm").write_text("python")
        assert process_group.have_threads()
    finally:
        dist.destroy_process_group()
    assert not process_group.have_threads()


class Node:
    """A group, or a DDP of one; may be part of a cycle."""

    held = None


@pytest.mark.parametrize(
    ("holder", "looks"), [("nobody", 0), ("group", 1), ("ddp", 1), ("accelerator", 1)]
)
def test_all_of_the_process_is_searched_only_where_somebody_holds_a_group(
    monkeypatch, holder, looks
):
    searched, collect = [], gc.collect
    group, ddp = Node(), Node()
    if holder == "group":
        cycle = Node()
        cycle.held = cycle, group
        del cycle
    elif holder == "ddp":
        ddp.held = ddp
    modules = [torch.nn.Linear(1, 1, device="meta")] if holder == "accelerator" else []
    left, gone = [group], [ref(group), ref(ddp)]
    del group, ddp
    monkeypatch.setattr(gc, "collect", lambda: searched.append(collect()))
    monkeypatch.setattr(process_group, "leave", lambda: [left.pop()])
    monkeypatch.setattr(process_group, "have_threads", lambda: False)  # another test's, that is
    monkeypatch.setattr(os, "environ", dict(os.environ))
    gc.disable()  # no cycle is found by chance
    try:
        Membership(Ordered(), lambda: modules).leave([gone[1]])
    finally:
        gc.enable()
    assert len(searched) == looks
    assert [one() for one in gone] == [None, None]
