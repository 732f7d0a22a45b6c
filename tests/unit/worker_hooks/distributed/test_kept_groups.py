"""Groups that get new backends, in a process of their own: torch has one set of groups."""

import json
import os
import subprocess

import pytest
from support.jobs import ROOT
from support.warm_python import DEADLINE_S

KEPT = """
import json, os
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from worker_hooks.distributed import kept_groups

server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port), RANK="0", WORLD_SIZE="1",
    TORCHELASTIC_USE_AGENT_STORE="True",
)
dist.init_process_group("gloo")
group = dist.new_group([0], group_desc="of my own")

def seen():
    summed = functional.all_reduce(torch.ones(1), "sum", group)  # found by its name
    return [group.group_name, group.group_desc, group.name(), dist.get_backend(group), *summed]

told = [seen()]
kept = kept_groups.present()
for attempt in (1, 2):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(server.port)
    kept_groups.join(kept, is_first=False)
    told.append(seen())
print(json.dumps(told, default=float))
"""

PRETENDED = """
import json, os
from datetime import timedelta
import torch.distributed as dist
from worker_hooks.distributed import kept_groups, rehearsal

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="1", WORLD_SIZE="2")
rehearsal.install()
dist.init_process_group("gloo", timeout=timedelta(seconds=77))
dist.new_group([0, 1], timeout=timedelta(seconds=55))
dist.new_group([0, 1])
print(json.dumps([group.timeout.total_seconds() for group in kept_groups.present().groups]))
"""

OBJECTS = """
import json, os
import torch.distributed as dist
from torch.distributed import distributed_c10d
from worker_hooks.distributed import rehearsal

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="1", WORLD_SIZE="2")
rehearsal.install()
dist.init_process_group("gloo")
found = []
for name in ("broadcast_object_list", "all_gather_object", "gather_object",
             "scatter_object_list", "recv_object_list"):
    for module in (dist, distributed_c10d):
        try:
            getattr(module, name)([None, None], "mine")
        except RuntimeError as error:
            found.append(str(error) == f"a new rank cannot repeat {name}() alone, before run(train, state)")
rehearsal.end()
print(json.dumps([found, dist.broadcast_object_list.__module__]))
"""

TRIED = """
import json
import torch.distributed as dist
from worker_hooks.distributed import kept_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kind, known = dist.ProcessGroup, []
register, present = kind._register_backend, vars(kind)["_register_backend"]

def refuse(*_):
    raise RuntimeError

def once(group, *told):
    if not known:
        known.append(register(group, *told))

said = []
for change in (present, refuse, once, None):
    kind._register_backend = change
    kept_groups._takes_new_backends.cache_clear()
    said.append(kept_groups.why_not())
print(json.dumps(said))
"""


@pytest.fixture
def told(warm_python):
    """What a script prints, in a process of its own."""

    def run(script):
        words, env = [*warm_python.words, "-c", script], {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        return json.loads(found.stdout)

    return run


def test_a_new_ranks_groups_wait_as_long_as_its_peers_do(told):
    assert told(PRETENDED) == [77, 55, 1800]


def test_a_group_has_its_names_after_it_got_new_backends(told):
    before, *later = told(KEPT)
    assert before[1] == "of my own"
    assert later == [before, before]


def test_what_objects_would_have_told_is_not_guessed(told):
    found, where = told(OBJECTS)
    assert found == [True] * 10
    assert where.startswith("torch.")


def test_whether_groups_take_new_backends_is_found_by_trial(told):
    """Another torch may refuse them, keep the one that it has, or have no such name."""
    here, *elsewhere = told(TRIED)
    assert here == ""
    assert len(elsewhere) == 3
    assert all("ties to their connections" in each for each in elsewhere)
