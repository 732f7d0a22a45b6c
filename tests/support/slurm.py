"""A Slurm of Debian's packages over the nodes of a cluster; what is not given is Slurm's default."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msrun.cluster.namespaces import PATH
from msrun.cluster.program import NodeProgram
from support.cluster import Cluster
from support.engine_jobs import missing_programs
from support.jobs import DEADLINE_S, poll

NEEDED = ("slurmctld", "slurmd", "srun", "munged")
REQUEUE_S = 120  # Slurm begins no job of which it has ended a run before so long
CONF = """
ClusterName=test
SlurmctldHost=node0
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=1
SlurmdTimeout=10
KillWait=20
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=node[0-{last}] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why it cannot be had here, in a sentence, or nothing."""
    return missing_programs(NEEDED, "Slurm's daemons need root")


@dataclass
class Slurm:
    """Its daemons are at work."""

    cluster: Cluster
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *words: object, env: dict[str, str] | None = None) -> NodeProgram:
        """One of Slurm's commands on node 0, in the folder that all nodes see."""
        cluster = self.cluster
        return cluster.nodes[0].run(words, self.environ | (env or {}), cluster.folder)

    def say(self, *words: object) -> str:
        """What a short command prints; it must succeed."""
        done = self.run(*words)
        code = done.wait(DEADLINE_S)
        assert code == 0, f"{words}: {done.errors()}"
        return done.output()

    def state(self, job: int) -> str:
        """Of a job: RUNNING, PENDING ..."""
        return self.say("squeue", "-h", "-j", job, "-o", "%T").strip()


@contextlib.contextmanager
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    """Start the daemons; they end with the cluster."""
    # names of sockets are short
    made = tempfile.TemporaryDirectory(prefix="msrun-slurm-", ignore_cleanup_errors=True)
    with made as name:
        yield _started(cluster, Path(name))


def _started(cluster: Cluster, folder: Path) -> Slurm:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    found = Slurm(cluster, folder)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, last=len(cluster.nodes) - 1))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # no cgroup is used
    files = ("key", "socket", "pid", "log", "seed")
    own = [f"--{name}-file={folder}/munge.{name}" for name in files if name != "socket"]
    found.run("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own)
    poll((folder / "munge.socket").exists)
    found.run("slurmctld", "-D", "-c")
    for node in cluster.nodes:
        node.run(["slurmd", "-D", "-N", node.name], found.environ)

    def is_up() -> bool:
        asked = found.run("sinfo", "-h", "-N", "-p", "low", "-o", "%n %t")
        asked.wait(DEADLINE_S)
        return asked.output().count("idle") == len(cluster.nodes)

    poll(is_up)
    return found
