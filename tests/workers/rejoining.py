"""A rank with hooks written by hand that lives on when another one is replaced.

Arguments: ``WHERE LAST RANK=HOW ...``. It committed five steps. Once all go on in attempt ``LAST``,
its training is over. ``HOW`` is one of

    falls   it is killed at its first word, in every attempt but the first
    closes  it closes its line when it is told to join the newcomers
    waits   it saves only when another rank has begun anew
    fails   the same, and then it cannot; on disk neither, once the one that began is gone
    tells   it says that it begins
    large   it says that its state is so large that several should write it

A rank of an attempt that began with all ranks is done at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

from worker_hooks.contract import protocol, status_page, wire
from worker_hooks.storage import manifest, safetensors_file

STEP = 5
RANK, BEGAN = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WHERE, LAST = os.path.abspath(sys.argv[1]), int(sys.argv[2])
BEGUN = Path(f"{WHERE}.begun")  # a newcomer is there
HOW = {word.partition("=")[2] for word in sys.argv[3:] if word.startswith(f"{RANK}=")}


def say(*words):
    print(*words, flush=True)


def register(link, attempt):
    fd = status_page.create(RANK, attempt, [status_page.Entry("rng", "U8", (4,), 4)])
    mine = status_page.Page(fd)
    mine.write(STEP, 1, 5, b'{"at": 1}', lambda to: ctypes.memset(to, RANK, 4), is_commit=True)
    wire.send(link, protocol.Registered(RANK, attempt, STEP), [fd])
    os.close(fd)
    return mine


def resumed(path):
    """What the checkpoint in memory holds for this rank."""
    found = manifest.read(Path(path))
    held = {}
    for shard in found.shards:
        place = Path(path).parent / shard.file
        assert safetensors_file.read_header(place, shard.at, shard.nbytes).entries
        content = place.read_bytes()[shard.at :][: shard.nbytes]
        held.setdefault(shard.kind, {})[shard.rank] = content[-4:].hex()
    (whole,) = set(held["replicated"].values())  # each writer put all of it there
    return f"{found.kind} {found.step} {whole} {held['private'][RANK]}"


def poll(is_true, otherwise):
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def await_newcomer(*, is_gone):
    poll(BEGUN.exists, "nobody begins before the state is saved")
    if is_gone:
        poll(lambda: not Path("/proc", BEGUN.read_text()).exists(), "nobody calls it off")


def save(link, attempt, order):
    who = RANK, attempt, order.dump_id
    if {"waits", "fails"} & HOW:
        await_newcomer(is_gone=not order.is_quick)
    if "fails" in HOW:
        wire.send(link, protocol.SaveFailed(*who, "the test says so", False, order.round))
        return
    if order.parts == 0:
        wire.send(link, protocol.Digested(*who, "same", order.round))
        return
    head = safetensors_file.header([status_page.Entry("w", "U8", (8,), 8)], {})
    with open(order.folder, "r+b") as file:
        file.write(head + b"weights!")
    wire.send(link, protocol.Written(*who, "", len(head) + 8, "", "same", order.round))


def rejoin(link, order, old):
    if "closes" in HOW:
        link.close()
        signal.pause()
    wire.send(link, protocol.Leaving(RANK, old, True))  # from before it was told
    wire.send(link, protocol.Rejoining(RANK, order.attempt))
    say("lives on with", resumed(order.path))
    return register(link, order.attempt)


def greet():
    if "tells" in HOW:
        say("begins")
    if BEGAN:
        BEGUN.write_text(str(os.getpid()))
    if "falls" in HOW and BEGAN:
        os.kill(os.getpid(), signal.SIGKILL)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect("\0" + os.environ["MSRUN_HOOKS"])
    wire.send(link, protocol.Hello(RANK, BEGAN, os.getpid(), WHERE, False))
    welcome, _ = wire.receive(link)
    if welcome.is_barred:
        say("began with", resumed(welcome.resume))
    kept = register(link, BEGAN)
    say("ready")
    if BEGAN and not welcome.is_barred:
        wire.send(link, protocol.Leaving(RANK, BEGAN, True))
    return link, kept


def main():
    (link, kept), attempt = greet(), BEGAN
    while (order := wire.receive(link)[0]) is not None:
        match order:
            case protocol.Freeze():
                nbytes = (1 << 28) * ("large" in HOW)
                about = RANK, attempt, order.dump_id, STEP, True, "", nbytes
                wire.send(link, protocol.Frozen(*about))
            case protocol.Save():
                save(link, attempt, order)
            case protocol.Rejoin():
                kept = rejoin(link, order, attempt)
                attempt = order.attempt
            case protocol.GoOn():
                say("goes on in", order.attempt)
                if order.attempt == LAST:
                    wire.send(link, protocol.Leaving(RANK, attempt, True))
            case protocol.Release():
                del kept
                sys.exit(0)
    sys.exit(3)


main()
