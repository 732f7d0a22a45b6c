"""A rank with hooks written by hand: it committed five steps and answers what the agent orders.

Arguments: ``WHERE RANK=HOW ...`` with ``WHERE`` its ckpt_save_path and ``HOW`` one of

    odd         its digest differs
    torn        it is not whole
    raise       it is held with an exception, once there is a file called go
    late        it answers late when it is told to freeze
    first       whoever is the first to be told to write dies in the middle of it
    full        it says that the folder is full, wherever it is not called dumps
    hang        it never answers an order to write
    wait        it waits for a file called go before it writes
    leave       it wants to leave when it was told to freeze
    garbage     it talks nonsense when it is told to freeze
    close       it closes its line when it is told to freeze
    child       a child of it says Hello, too, and stays
    ends        it leaves at once with 0
    asks        it asks by itself to go on, and leaves with 2 if that is refused
    dies        it is killed once all are registered, in every attempt
    alone       it outlives msrun, as long as there is a file called stay

A restarted rank says what it was told, and leaves.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time

from worker_hooks import page, protocol, safetensor
from worker_hooks.layout import DumpLayout

STEP = 5
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WHO = RANK, ATTEMPT
WHERE = os.path.abspath(sys.argv[1])
HOW = {word.partition("=")[2] for word in sys.argv[2:] if word.startswith((f"{RANK}=", "all="))}


def say(*words):
    print(*words, flush=True)


def connect():
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect("\0" + os.environ["MSRUN_HOOKS"])
    protocol.send(link, protocol.Hello(*WHO, os.getpid(), WHERE, "asks" in HOW))
    return link


def committed():
    fd = page.create(*WHO, [page.Entry("rng", "U8", (4,), 4)])
    mine = page.Page(fd)
    for step in range(1, STEP + 1):
        mine.write(
            step, 1, step, b'{"at": 1}', lambda to: ctypes.memset(to, RANK, 4), is_commit=True
        )
    mine.beat(STEP, 1, STEP, page.Phase.FORWARD)
    return fd, mine


def await_go():
    while not os.path.exists("go"):
        time.sleep(0.01)


def await_all():
    """Every rank of this attempt said that it waits here, too, or that it is registered."""
    names = [f"registered_{ATTEMPT}_{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    open(names[RANK], "w").close()
    while "dies" in HOW and not all(map(os.path.exists, names)):
        time.sleep(0.01)


def first_of_all():
    try:
        os.close(os.open("died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def save(link, order):
    digest = "odd" if "odd" in HOW else "same"
    who = *WHO, order.dump_id
    if order.parts == 0:
        protocol.send(link, protocol.Digested(*who, digest))
        return
    say("writes into", order.folder)
    file = DumpLayout.shard(RANK, 1, order.step)
    path = os.path.join(order.folder, file)
    if "hang" in HOW:
        return
    if "full" in HOW and "dumps" not in order.folder:
        protocol.send(link, protocol.SaveFailed(*who, "No space left on device", True))
        return
    if "wait" in HOW:
        await_go()
        protocol.send(link, protocol.Progress(*who, 1))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if "first" in HOW and first_of_all():
        with open(path, "wb") as half:
            half.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    head = safetensor.header([page.Entry("w", "U8", (8,), 8)], {})
    done = safetensor.write(path, head, [digest.encode().ljust(8)], lambda _: None)
    protocol.send(link, protocol.Written(*who, file, done.nbytes, done.sha256, digest))


def freeze(link, order):
    if "garbage" in HOW:
        link.send(b"{nonsense")
    elif "close" in HOW:
        link.close()
        say("closed")
        signal.pause()
    else:
        time.sleep(0.3 if "late" in HOW else 0)
        whole = "torn" not in HOW
        why = "" if whole else "an update was under way"
        protocol.send(link, protocol.Frozen(*WHO, order.dump_id, STEP, whole, why))
        if "leave" in HOW:
            protocol.send(link, protocol.Leaving(*WHO))


def child():
    """What a child that imports the script does: it is told nothing, and lives on without."""
    answer, _ = protocol.receive(connect())
    say("the child was told", answer)
    signal.pause()


def begin(link, welcome):
    """Register, and do what comes before the first order."""
    fd, mine = committed()
    protocol.send(link, protocol.Registered(*WHO, STEP), [fd])
    os.close(fd)
    if ATTEMPT > 0:
        say("resumed from", welcome.resume, "with", sys.argv[-1])
    if "dies" in HOW:
        await_all()
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT > 0 and "asks" not in HOW:
        protocol.send(link, protocol.Leaving(*WHO))
    if "asks" in HOW:
        await_all()
    if "child" in HOW:
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "child"])
    if "alone" in HOW:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    say("ready")
    if "raise" in HOW and ATTEMPT == 0:
        await_go()
        print("Traceback (most recent call last):\nValueError: mine", file=sys.stderr, flush=True)
        protocol.send(link, protocol.Raised(*WHO, "ValueError: mine"))
    return mine


def main():
    link = connect()
    welcome, _ = protocol.receive(link)
    say("welcome", welcome._asdict())
    say("arguments", sys.argv[1:])
    say("files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if "ends" in HOW:
        sys.exit(0)
    if welcome.refusal:
        print(welcome.refusal, file=sys.stderr, flush=True)
        sys.exit(2)
    kept = begin(link, welcome)
    while True:
        order, _ = protocol.receive(link)
        match order:
            case protocol.Freeze():
                freeze(link, order)
            case protocol.Save():
                save(link, order)
            case protocol.Release():
                saved = [name for name in os.listdir(WHERE) if not name.endswith("_tmp")]
                say("released:", order.reason, saved)
                sys.exit(1 if "raise" in HOW and ATTEMPT == 0 else 0)
            case None:
                break
    say("the line is closed")
    while "alone" in HOW and os.path.exists("stay"):
        time.sleep(0.02)
    say("leaves")
    del kept
    sys.exit(3)


if sys.argv[-1] == "child":
    child()
main()
