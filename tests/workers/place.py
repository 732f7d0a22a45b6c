"""Tells where it is in the job, as a line of JSON, and then does what its words say.

``wait=FILE`` waits until there is one, ``exit=RANK:CODE`` leaves with that code as this rank,
``raise=RANK`` raises, ``err=TEXT`` writes to stderr, ``mute`` tells nothing.
"""

import json
import os
import socket
import sys
import time

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"),
)


def tell():
    found = {name: os.environ.get(name) for name in NAMES}
    text = "place " + json.dumps({**found, "host": socket.gethostname(), "argv": sys.argv[1:]})
    os.write(1, f"{text}\n".encode())


def act():
    rank = os.environ["RANK"]
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if name == "err":
            os.write(2, f"{value} of rank {rank}\n".encode())
        elif name == "wait":
            while not os.path.exists(value):
                time.sleep(0.01)
        elif name == "exit" and value.partition(":")[0] == rank:
            sys.exit(int(value.partition(":")[2]))
        elif name == "raise" and value == rank:
            raise RuntimeError(f"the mistake of rank {rank}")


if __name__ == "__main__":
    if "mute" not in sys.argv:
        tell()
    act()
