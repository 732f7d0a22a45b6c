"""Ranks as direct children of this process: one is stopped, the others leave and meet again.

The argument says where: "all_reduce": it does not join one, "receive": it sends a large tensor to
the others, "send": it is sent one.

Prints a JSON line of each survivor: seconds from the order to the exception, whether connections of
its own still answer, to a process that is no rank and to rank 0, the sum that the second group made,
and the threads of before and after. Exit code 3: a survivor could not be freed and ended itself.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

import torch
import torch.distributed as dist

from worker_hooks.contract.env import RankEnv, meeting_point
from worker_hooks.distributed import abort, process_group
from worker_hooks.distributed.abort import unblock

RANKS, STOPPED = 4, 1
STUCK = 3
SIZE = 10_000_000  # more than the kernel keeps of a connection
COLLECTIVES = {
    "all_reduce": (torch.ones(1), dist.all_reduce),
    "receive": (torch.ones(SIZE), lambda total: dist.broadcast(total, STOPPED)),
    "send": (torch.ones(SIZE), lambda total: dist.broadcast(total, 0)),
}


def stop(collective):
    """Stop this process, in front of a collective or, if that is large, in the middle of one."""
    if sys.argv[1] == "all_reduce":
        os.kill(os.getpid(), signal.SIGSTOP)
    done = threading.Semaphore(0)

    def end():
        for _ in range(3):
            done.acquire()
        os.kill(os.getpid(), signal.SIGSTOP)

    threading.Thread(target=end, daemon=True).start()
    while True:
        collective()
        done.release()


def answer(end):
    while said := end.recv(1):
        end.sendall(said)


def serve(server):
    """A script's own server in rank 0: for metrics, say, or parameters."""
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()


def rank(number, order, address, own):
    if number == 0:
        threading.Thread(target=serve, args=(own,), daemon=True).start()
    channel = socket.create_connection(own.getsockname())
    own_epoll = select.epoll()  # as an event loop of the script's own has it
    own_epoll.register(channel, select.EPOLLIN)
    echo = socket.create_connection(address)
    ports = json.loads(echo.recv(100))
    hook = sys.excepthook
    os.environ.update(RANK=str(number), MASTER_PORT=str(ports[0]))
    dist.init_process_group("gloo")
    assert process_group.not_replaceable_why(RankEnv.read(os.environ), list) == ""
    group = process_group.present()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert process_group.not_replaceable_why(RankEnv.read(os.environ), list) == process_group.EARLY
    threads = len(os.listdir("/proc/self/task"))
    total, collective = COLLECTIVES[sys.argv[1]]
    if number == STOPPED:
        stop(lambda: collective(total))
    ordered, is_out = [], threading.Event()

    def listen():
        os.read(order, 1)
        ordered.append(time.monotonic())
        store = meeting_point(os.environ)
        unblock(store)
        threading.Thread(target=abort.end_if_stuck, args=(is_out, store), daemon=True).start()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        while True:
            collective(total)
    except RuntimeError:
        raised = time.monotonic()
    is_out.set()
    listener.join()  # another survivor may have broken the connections to this one first
    freed_s = max(0.0, raised - ordered[0])
    echo.sendall(b"?")
    channel.sendall(b"!")
    through = channel.recv(1).decode()
    process_group.leave()
    place = [each for each in range(RANKS) if each != STOPPED].index(number)
    os.environ.update(RANK=str(place), WORLD_SIZE=str(RANKS - 1), MASTER_PORT=str(ports[1]))
    process_group.join(group)
    total = torch.ones(1)
    dist.all_reduce(total)
    process_group.leave()
    told = {
        "freed_s": freed_s,
        "echo": echo.recv(1).decode(),
        "channel": through,
        "total": total.item(),
        "threads": [threads, len(os.listdir("/proc/self/task"))],
    }
    assert sys.excepthook is hook  # torch wraps it again with each group
    print(json.dumps(told), flush=True)


def main():
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        WORLD_SIZE=str(RANKS),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    order, tell = os.pipe()
    server, own = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    pids = []
    for number in range(RANKS):
        if not (pid := os.fork()):
            try:
                rank(number, order, server.getsockname(), own)
            except BaseException:  # noqa: BLE001  the fork must not go on as its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    echoes = [server.accept()[0] for _ in pids]
    # not before the forks: it starts threads
    stores = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(2)]
    for echo in echoes:
        echo.sendall(json.dumps([store.port for store in stores]).encode())
    os.waitid(os.P_PID, pids[STOPPED], os.WSTOPPED)
    os.write(tell, b"." * RANKS)
    waiting = {echo.fileno(): echo for echo in echoes}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while len(waiting) > 1:
        for descriptor, _ in poll.poll(20_000) or sys.exit("a survivor does not answer"):
            poll.unregister(descriptor)
            echo = waiting.pop(descriptor)
            if not (said := echo.recv(1)):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED)
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                sys.exit(STUCK if ended.si_status == signal.SIGKILL else "a survivor failed")
            echo.sendall(said)
    os.kill(pids[STOPPED], signal.SIGKILL)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert codes.count(0) == RANKS - 1, codes


main()
