"""Run on a node: reads all that passes its network, and says how often it has seen a pattern.

`listen_in.py FILE`: FILE has the pattern. It says that it listens; at SIGTERM it prints the count.
"""

import signal
import socket
import sys
from pathlib import Path

ALL = 3  # ETH_P_ALL


def listen(pattern: bytes) -> None:
    """Until SIGTERM."""
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    seen = packets = 0

    def end(*_: object) -> None:
        print(f"seen {seen} times in {packets} packets", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    print("listens", flush=True)
    while True:
        packet = line.recv(1 << 17)
        packets += 1
        seen += pattern in packet


if __name__ == "__main__":
    listen(Path(sys.argv[1]).read_bytes())
