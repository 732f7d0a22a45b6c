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


TRIED = """
set -e
mount -t tmpfs tmpfs /run
ip link add br0 type bridge
ip link add try0 type veth peer name try1
hostname try
"""
WAYS_OUT = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000, on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0) or, in a container, start it with --privileged"
)


@functools.cache
def refusal(path: str = PATH) -> str:
    """Why no cluster can be made here and what to do, in a sentence; empty: one can be.

    ``path``: where the programs are looked for.
    """
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if missing:
        return (
            f"to make nodes of namespaces {' and '.join(missing)} would have to be installed "
            "(on Debian and Ubuntu: apt install iproute2 util-linux mount hostname)"
        )
    said = subprocess.run(
        [str(shutil.which(NEW_WORLD[0], path=path)), *NEW_WORLD[1:], "sh", "-c", TRIED],
        env={"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        words = "; ".join(filter(None, map(str.strip, said.stderr.splitlines())))
        return f"nodes of namespaces are refused to this user ({words}): {WAYS_OUT}"
    return ""
