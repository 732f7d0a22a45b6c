"""One training step: DistributedDataParallel and AdamW."""

import torch
import torch.distributed as dist
from stamp import stamp
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
stamp("ready")
dist.destroy_process_group()
