"""What the kernel and the machine's programs must allow, so that namespaces can play nodes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

NEEDED = ("unshare", "nsenter", "mount", "umount", "hostname", "ip")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
ROOTS_WORLD = ("unshare", "-nm", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
NEW_WORLD = (ROOTS_WORLD[0], "-Ur", *ROOTS_WORLD[1:])


class ClusterError(Exception):
    """A program is missing, or the kernel said no."""


@functools.cache
def refusal() -> str:
    """Why no cluster can be made here, in a sentence; empty: one can be."""
    missing = [name for name in NEEDED if not shutil.which(name, path=PATH)]
    if missing:
        return (
            f"to make nodes of namespaces {' and '.join(missing)} would have to be installed "
            "(on Debian and Ubuntu: apt install iproute2 util-linux hostname)"
        )
    tried = "mount -t tmpfs tmpfs /run && ip link add try0 type veth peer name try1 && hostname try"
    said = subprocess.run(
        [*NEW_WORLD, "sh", "-c", tried],
        env={"PATH": PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        return f"nodes of namespaces are refused to this user: {said.stderr.strip()}"
    return ""
