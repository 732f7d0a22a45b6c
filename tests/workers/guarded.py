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
    apart       it says nothing of itself
    alone       it outlives msrun, as long as there is a file called stay
    mute        it does not say where it stays
    ahead       it has begun the step after the one that the others are in
    long        its step takes until there is a file called go
    falls       it is killed in the step that all are to come to
    stays       it does not leave when it was told to
    fails       it leaves with 3 when it was told to leave
    done        its training is over, and it waits until it may leave
    finishes    it is done when it is asked where it stays
    catches     it catches SIGTERM, and says so
    ignores     it is deaf to SIGTERM
    file        it says that a graceful exit may be asked for in exit.json
    periodic    it saves into the folder periodic, too
    trains      it is in forward, where it may hang; else it is behind an update
    stuck       it stands in no collective
    kernel      at SIGUSR1 it waits inside the kernel until somebody writes to the file called pipe

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

from worker_hooks.contract import protocol, status_page, wire
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import safetensors_file

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
    exit_file = os.path.abspath("exit.json") if "file" in HOW else ""
    periodic = os.path.abspath("periodic") if "periodic" in HOW else ""
    hello = protocol.Hello(*WHO, os.getpid(), WHERE, "asks" in HOW, exit_file, periodic)
    wire.send(link, hello)
    return link


def committed():
    fd = status_page.create(*WHO, [status_page.Entry("rng", "U8", (4,), 4)])
    mine = status_page.Page(fd)
    for step in range(1, STEP + 1):
        commit(mine, step)
    return fd, mine


def commit(mine, step):
    mine.write(step, 1, step, b'{"at": 1}', lambda to: ctypes.memset(to, RANK, 4), is_commit=True)
    mine.beat(
        step, 1, step, status_page.Phase.FORWARD if "trains" in HOW else status_page.Phase.UPDATED
    )


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


def stand(link, order):
    if "finishes" in HOW:
        wire.send(link, protocol.Leaving(*WHO, True))
    elif "done" in HOW:
        wire.send(link, protocol.Standing(*WHO, order.dump_id, STEP))
    elif "mute" not in HOW:
        step = STEP + 2 if "ahead" in HOW else STEP + 1
        wire.send(link, protocol.Standing(*WHO, order.dump_id, step))


def proceed(link, mine, order):
    if "falls" in HOW:
        os.kill(os.getpid(), signal.SIGKILL)
    if "done" in HOW and order.step > STEP:
        return
    if "long" in HOW and not os.path.exists("go"):
        return
    for step in range(STEP + 1, order.step + 1):
        commit(mine, step)
    wire.send(link, protocol.Frozen(*WHO, order.dump_id, order.step, True))


def depart(order):
    print("Graceful exit is triggered, stop training", file=sys.stderr, flush=True)
    saved = [name for name in os.listdir(WHERE) if not name.endswith("_tmp")]
    say("told to leave:", order.reason, saved)
    if "stays" not in HOW:
        sys.exit(3 if "fails" in HOW else 0)


def dismissed(order):
    say("dismissed:", order.reason)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def listen_to_signals(link):
    if "ignores" in HOW:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "catches" not in HOW:
        return

    def caught(_signum, _frame):
        wire.send(link, protocol.ExitRequested(*WHO, f"rank {RANK} received SIGTERM"))

    signal.signal(signal.SIGTERM, caught)


def save(link, order):
    digest = "odd" if "odd" in HOW else "same"
    who = *WHO, order.dump_id
    if order.parts == 0:
        wire.send(link, protocol.Digested(*who, digest, order.round))
        return
    say("writes into", order.folder)
    file = DumpLayout.shard(RANK, 1, order.step)
    path = os.path.join(order.folder, file)
    if "hang" in HOW:
        return
    if "full" in HOW and "dumps" not in order.folder:
        wire.send(link, protocol.SaveFailed(*who, "No space left on device", True, order.round))
        return
    if "wait" in HOW:
        await_go()
        wire.send(link, protocol.Progress(*who, 1))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if "first" in HOW and first_of_all():
        with open(path, "wb") as half:
            half.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    head = safetensors_file.header([status_page.Entry("w", "U8", (8,), 8)], {})
    done = safetensors_file.write(path, head, [digest.encode().ljust(8)], lambda _: None)
    about = *who, file, done.nbytes, done.sha256, digest, order.round
    wire.send(link, protocol.Written(*about))


def freeze(link, order):
    if "garbage" in HOW:
        link.send(b"{nonsense")
        signal.pause()  # if it left at once, its exit could be seen before the end of its line
    elif "close" in HOW:
        link.close()
        say("closed")
        signal.pause()
    else:
        time.sleep(0.3 if "late" in HOW else 0)
        whole = "torn" not in HOW
        why = "" if whole else "an update was under way"
        wire.send(link, protocol.Frozen(*WHO, order.dump_id, STEP, whole, why))
        if "leave" in HOW:
            wire.send(link, protocol.Leaving(*WHO))


def child():
    """What a child that imports the script does: it is told nothing, and lives on without."""
    answer, _ = wire.receive(connect())
    say("the child was told", answer)
    signal.pause()


def begin(link, welcome):
    """Register, and do what comes before the first order."""
    listen_to_signals(link)
    fd, mine = committed()
    wire.send(link, protocol.Registered(*WHO, STEP, "it cannot"), [fd])  # be replaced
    os.close(fd)
    if ATTEMPT > 0:
        say("resumed from", welcome.resume, "with", *(w for w in sys.argv if "is_recover" in w))
    if "dies" in HOW:
        await_all()
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT > 0 and "asks" not in HOW:
        wire.send(link, protocol.Leaving(*WHO))
    if "asks" in HOW:
        await_all()
    if "child" in HOW:
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "child"])
    if "alone" in HOW:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if "kernel" in HOW:
        # a parent waits, in state D, until its child by vfork() has executed another program
        opens = (os.POSIX_SPAWN_OPEN, 0, "pipe", os.O_RDONLY, 0)
        spawned = ("/bin/true", ["true"], {})
        signal.signal(signal.SIGUSR1, lambda *_: os.posix_spawn(*spawned, file_actions=[opens]))
    say("ready")
    if "done" in HOW:
        await_go()  # who is done alone is let go at once
        wire.send(link, protocol.Leaving(*WHO, True))
    if "raise" in HOW and ATTEMPT == 0:
        await_go()
        print("Traceback (most recent call last):\nValueError: mine", file=sys.stderr, flush=True)
        wire.send(link, protocol.Raised(*WHO, "ValueError: mine"))
    return mine


def release(order):
    saved = [name for name in os.listdir(WHERE) if not name.endswith("_tmp")]
    say("released:", order.reason, saved)
    if "stays" in HOW:
        signal.pause()
    sys.exit(1 if "raise" in HOW and ATTEMPT == 0 else 0)


def obey(link, mine, order):
    match order:
        case protocol.Hold():
            stand(link, order)
        case protocol.Proceed():
            proceed(link, mine, order)
        case protocol.Leave():
            depart(order)
        case protocol.Dismiss():
            dismissed(order)
        case protocol.Freeze():
            freeze(link, order)
        case protocol.Save():
            save(link, order)
        case protocol.Release():
            release(order)
        case protocol.Inspect():
            wire.send(link, protocol.Stack(*WHO, order.id, "stuck" not in HOW, "train.py:9 f"))


def main():
    if "apart" in HOW:
        signal.pause()
    link = connect()
    welcome, _ = wire.receive(link)
    say("welcome", welcome._asdict())
    say("arguments", sys.argv[1:])
    say("files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if "ends" in HOW:
        sys.exit(0)
    if welcome.refusal:
        print(welcome.refusal, file=sys.stderr, flush=True)
        sys.exit(2)
    kept = begin(link, welcome)
    while (order := wire.receive(link)[0]) is not None:
        obey(link, kept, order)
    say("the line is closed")
    while "alone" in HOW and os.path.exists("stay"):
        time.sleep(0.02)
    say("leaves")
    del kept
    sys.exit(3)


if sys.argv[-1] == "child":
    child()
main()
