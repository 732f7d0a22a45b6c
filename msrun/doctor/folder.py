"""Whether checkpoints can be kept in a folder: file system, syncing, renaming, speed, room."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.text.wording import sized
from msrun.doctor.finding import Finding, doubtful, fine, unfit
from msrun.doctor.probe import Probe, ProbeAnswer
from worker_hooks.machine.kernel_files import lines

LIMIT_S = 20.0
CLEANING_S = 5.0
LITTLE = 1 << 30  # bytes free
TOO_LITTLE = 64 << 20
SLOW = 50e6  # bytes a second
LOST = {
    "tmpfs": "it is memory: checkpoints are gone after a reboot",
    "ramfs": "it is memory: checkpoints are gone after a reboot",
    "overlay": "it is a container's own layer: checkpoints are gone with the container",
}
SERVED = ("nfs", "cifs", "smb", "9p", "fuse", "lustre", "gpfs", "beegfs", "ceph", "virtiofs")
PART = "folder"
_WHY = {
    "sync of a folder": "a checkpoint may be lost if power fails soon after it was saved",
    "rename of a folder": "msrun completes a checkpoint by its manifest alone here",
    "hard link": "msrun copies instead; a checkpoint takes more room",
    "flock": "two msruns could resume one run at the same time",
}
_PROGRAM = str(Path(__file__).with_name("folder_probe.py"))


class FolderProbe:
    """The look at one folder, begun at once."""

    def __init__(self, folder: Path) -> None:
        """``folder`` need not exist yet."""
        self._folder = str(folder.absolute())
        name = f".msrun-doctor-{os.getpid()}-{os.urandom(4).hex()}"
        self._words = (sys.executable, "-I", "-S", _PROGRAM, self._folder, name)
        self._probe = Probe(self._words, LIMIT_S)

    def findings(self) -> list[Finding]:
        """What was found, in lines."""
        answer = self._probe.answer()
        if answer.code is None:
            Probe((*self._words, "clean"), CLEANING_S).answer()
        return list(judged(self._folder, answer))


def file_system(place: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system, by the kernel's table; the file system itself is not asked."""
    best, kind = "", "unknown"
    for row in lines(mountinfo):
        fields, _, rest = row.partition(" - ")
        words = fields.split()
        mount = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), words[4])
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best) and rest:
            best, kind = mount, rest.split()[0]
    return kind


def judged(folder: str, answer: ProbeAnswer) -> Iterator[Finding]:
    """The lines about a folder, from the probe's answer."""
    facts = [fact for line in answer.out.splitlines() if (fact := _fact(line))]
    for fact in facts:
        if "file" in fact:
            yield unfit(PART, f"{fact['file']} is a file", "name a folder")
            return
    steps = {fact["step"]: fact for fact in facts if "step" in fact}
    found = next((fact for fact in facts if "place" in fact), {"place": folder, "is_there": True})
    place = str(found["place"])
    kind = file_system(place)
    where = folder if found["is_there"] else f"{folder} does not exist yet, {place} does"
    denied = steps.get("mkdir", {}).get("error")
    if denied:
        yield unfit(PART, f"{where} ({kind}): {denied}", "name a folder that you may write to")
        return
    advice = LOST.get(kind, "")
    yield doubtful(PART, f"{where} ({kind})", advice) if advice else fine(PART, f"{where} ({kind})")
    yield from _room(facts)
    yield from _speed(steps.get("write"), kind)
    for what, why in _WHY.items():
        if what in steps:
            error = steps[what].get("error")
            yield doubtful(what, error, why) if error else fine(what, "works")
    if answer.code != 0:
        doing = [fact["doing"] for fact in facts if "doing" in fact][-1:] or ["the first look"]
        yield _stuck(doing[0], folder, answer)


def _fact(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:  # it was killed while it wrote
        return {}
    return found if isinstance(found, dict) else {}


def _room(facts: list[dict[str, Any]]) -> Iterator[Finding]:
    for fact in facts:
        if "free" in fact:
            found = f"{sized(fact['free'])} of {sized(fact['size'])}"
            if fact["free"] < TOO_LITTLE:
                yield unfit("free space", found, "make room, or name another folder")
            elif fact["free"] < LITTLE:
                yield doubtful("free space", found, "make room: a dump holds model and optimizer")
            else:
                yield fine("free space", found)


def _speed(wrote: dict[str, Any] | None, kind: str) -> Iterator[Finding]:
    if wrote is None:
        return
    if "error" in wrote:
        yield unfit("write and sync", wrote["error"], "msrun cannot save into this folder")
        return
    rate = wrote["nbytes"] / max(wrote["synced_s"], 1e-6)
    synced_s = wrote["synced_s"] - wrote["wrote_s"]
    found = f"{sized(wrote['nbytes'])} at {sized(rate)}/s, of which the sync took {synced_s:.2f} s"
    if wrote["nbytes"] and rate < SLOW:
        server = ", a server's" if kind.startswith(SERVED) else ""
        yield doubtful("write and sync", found, f"it is slow{server}: name a faster disk")
    else:
        yield fine("write and sync", found)


def _stuck(doing: str, folder: str, answer: ProbeAnswer) -> Finding:
    if answer.code is None:
        return unfit(
            PART,
            f"{folder}: {doing} has not ended within {LIMIT_S:.0f} s",
            "its disk or file server does not answer: look at `dmesg` and `mount`",
        )
    last = answer.err.strip().splitlines()[-1:] or [f"exit code {answer.code}"]
    return unfit(PART, f"{folder}: {doing} failed: {last[0]}", "name another folder")
