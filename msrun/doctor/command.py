"""``msrun doctor``: looks at everything at once, and prints a line for each part."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.text.sanitize import sanitized
from agent.text.tone import Tone
from msrun.doctor import limits, machine, network, software
from msrun.doctor.finding import Finding, Grade
from msrun.doctor.folder import FolderProbe
from msrun.terminal.console import STDOUT, coloured
from msrun.terminal.stdout import put

UNFIT_EXIT = 1
TONES = {Grade.OK: Tone.GOOD, Grade.WARN: Tone.CAUTION, Grade.FAIL: Tone.BAD}
_GRADE_WIDTH, _PART_WIDTH = 6, 20


def examine(folder: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything; what may hang is looked at by children at the same time."""
    python = software.interpreter(environ, sys.executable)
    torch, name, disk = software.torch_probe(python), network.name_probe(), FolderProbe(folder)
    yield from software.python_findings(python)
    yield from machine.findings()
    yield from limits.findings()
    yield from network.findings(name.answer())
    yield from disk.findings()
    yield from software.torch_findings(torch.answer(), environ)


def show(findings: Iterable[Finding], environ: Mapping[str, str]) -> int:
    """Print each line as soon as it is known; the exit code."""
    counts = dict.fromkeys(Grade, 0)
    for one in findings:
        counts[one.grade] += 1
        grade = coloured(one.grade.value.ljust(_GRADE_WIDTH), TONES[one.grade], environ, STDOUT)
        line = f"{grade}{one.part.ljust(_PART_WIDTH)}{sanitized(one.found)}\n"
        advice = " " * (_GRADE_WIDTH + _PART_WIDTH) + f"-> {sanitized(one.advice)}\n"
        put(line + advice * bool(one.advice))
    put(f"{counts[Grade.OK]} ok, {counts[Grade.WARN]} warn, {counts[Grade.FAIL]} fail\n")
    return exit_code(counts[Grade.FAIL])


def exit_code(failures: int) -> int:
    """1 if a job will fail here."""
    return UNFIT_EXIT if failures else 0


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """For programs."""
    found = list(findings)
    grades = [one.grade for one in found]
    worst = next(each for each in (Grade.FAIL, Grade.WARN, Grade.OK) if each in grades)
    parts = [{**one._asdict(), "grade": one.grade.value} for one in found]
    return {"worst": worst.value, "findings": parts}
