"""Plays a rank that trains, without torch: steps in lockstep, fault injector and trace, a file as dump.

What it computes depends on the step alone, so a rank may go on from the newest step anybody
committed. `lose=N` goes on N steps earlier, `forget=1` witnesses no end, `drift=1` ends differently
after a restart, `unseeded=1` ends differently each time, `deaf=1` does not mind SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.drill.trace import TrainingTrace

words = dict(word.split("=") for word in sys.argv[1:] if not word.startswith("-"))
env = RankEnv.read(os.environ)
rank, world, attempt = env.rank, env.world_size, env.attempt
plan = DrillPlan.decode(env.drill)
if "deaf" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ckpt = Path(plan.ckpt)
life = os.environ["MSRUN_RUNS"].replace(":", "_") + f"_{attempt}"
injector, trace = FaultInjector.of(plan, env), TrainingTrace(plan, env)


def meet(name):
    """All ranks have come here."""
    (ckpt / f"{name}_{life}_{rank}").touch()
    while len(list(ckpt.glob(f"{name}_{life}_*"))) < world:
        time.sleep(0.001)


committed = [int(path.name.rpartition("_")[2]) for path in ckpt.glob("committed_*")]
step = max(0, max(committed, default=0) - int(words.get("lose", 0)))
meet("begin")
while step < int(words["steps"]):
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.UPDATED):
        if injector:
            injector.phase_begins(phase, step + 1)
        time.sleep(0.002)
        if phase is Phase.FORWARD:
            trace.backward_begins(step + 1, 1 / (step + 1 + rank))
            meet(f"step_{step + 1}")
    step += 1
    (ckpt / f"committed_{step}").touch()
    trace.committed(step)
if "forget" not in words:
    drift = attempt if "drift" in words else 0
    drift = os.getpid() if "unseeded" in words else drift
    trace.training_ended(step, f"weights of {step + drift}", f"private of {rank}")
