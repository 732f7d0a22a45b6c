"""One end of a TCP connection: sends the lines it reads, says what it hears and how it ends.

`listen PORT` or `call HOST PORT`; `guarded` as the last word: silence ends it after 2 s.
"""

import selectors
import socket
import sys


def connected(words: list[str]) -> socket.socket:
    if words[0] == "call":
        return socket.create_connection((words[1], int(words[2])), 2)
    with socket.create_server(("", int(words[1]))) as door:
        print("listens", flush=True)
        return door.accept()[0]


def ending(line: socket.socket) -> str:
    """Why there is nothing more to hear."""
    ready = selectors.DefaultSelector()
    ready.register(line, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is line:
                heard = line.recv(65536)
                if not heard:
                    return "end"
                print("heard", heard.decode(), end="", flush=True)
            elif said := sys.stdin.buffer.readline():
                line.sendall(said)
            else:
                return "end of words"


words = sys.argv[1:]
try:
    with connected(words) as line:
        line.setblocking(True)
        if words[-1] == "guarded":
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000)
        print(f"linked to {line.getpeername()[0]}", flush=True)
        print(ending(line))
except OSError as error:
    print(type(error).__name__)
