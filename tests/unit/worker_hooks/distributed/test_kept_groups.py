"""Groups that get new backends, in a process of their own: torch has one set of groups."""

import json
import subprocess
import sys

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


def told(script):
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(found.stdout)


def test_a_new_ranks_groups_wait_as_long_as_its_peers_do():
    assert told(PRETENDED) == [77, 55, 1800]


def test_a_group_has_its_names_after_it_got_new_backends():
    before, *later = told(KEPT)
    assert before[1] == "of my own"
    assert later == [before, before]
