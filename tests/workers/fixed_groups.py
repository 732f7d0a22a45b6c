"""One rank that tells why it could not join new peers, for each way to make its group. Prints JSON."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.contract.env import RankEnv
from worker_hooks.distributed import kept_groups
from worker_hooks.distributed.process_group import not_replaceable_why

server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
os.environ.update(
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=str(server.port),
    RANK="0",
    WORLD_SIZE="1",
    TORCHELASTIC_USE_AGENT_STORE="True",
)
net = nn.Linear(1, 1)


def why():
    # as one of two ranks: a rank alone has no peers to lose
    return not_replaceable_why(RankEnv.read(os.environ)._replace(world_size=2), lambda: [net])


told = {"none": why()}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
told["store"] = why()
dist.destroy_process_group()
dist.init_process_group("gloo")
told["plain"] = why()
dist.new_group([0])
told["groups"] = why()
told["kept"] = kept_groups.why_not()
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.new_group([0])
told["debugged"] = kept_groups.why_not()
dist.set_debug_level(dist.DebugLevel.OFF)
dist.destroy_process_group()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
told["early"] = why()
model = DistributedDataParallel(net)
told["wrapped"] = why()
dist.destroy_process_group()
print(json.dumps(told))
