"""Temporary environments for the systems that msrun is compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
TORCH = "torch==2.13.0"
VENV = ("venv",)
LIMIT_S = 1200.0  # of an install; torch is large
TAIL_CHARS = 300


class InstallError(Exception):
    """The environment cannot be made; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages of a peer. ``wants[0]`` is the peer itself."""

    name: str
    wants: tuple[str, ...]

    @property
    def package(self) -> str:
        """The peer's name in the package registry."""
        return self.wants[0].partition("==")[0]


@dataclass(frozen=True, slots=True)
class Tools:
    """Where a side's programs are. ``refusal``: why they are missing, a sentence."""

    bin_: Path
    version: str = ""
    refusal: str = ""


def tools(folder: Path, environment: Environment | None) -> Tools:
    """Install a side's packages; ``None``: use the present environment."""
    if environment is None:
        return Tools(Path(sys.executable).parent)
    bin_ = folder / environment.name / "bin"
    try:
        install(folder, environment)
        return Tools(bin_, f"{environment.package} {version(bin_, environment)}")
    except (InstallError, OSError) as error:
        return Tools(bin_, environment.wants[0], str(error))


def install(folder: Path, environment: Environment) -> None:
    """Make the environment in ``folder`` unless it exists.

    Raises:
        InstallError: pip could not.
    """
    venv = folder / environment.name
    bin_ = venv / "bin"
    wanted = " ".join((TORCH, *environment.wants, str(venv)))
    stamp = venv / ".installed"  # written last: an incomplete environment is made again
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {' '.join(environment.wants)} and {TORCH}", file=sys.stderr, flush=True)
    command([sys.executable, "-m", *VENV, "--clear", str(venv)], environment)
    pip = [str(bin_ / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    wants = (TORCH, *environment.wants)
    command([*pip, "-c", str(CONSTRAINTS), *wants], environment, TMPDIR=str(venv))  # goes with it
    stamp.write_text(wanted)


def version(bin_: Path, environment: Environment) -> str:
    """The installed version.

    Raises:
        InstallError: none was.
    """
    asked = f"from importlib.metadata import version; print(version({environment.package!r}))"
    return command([str(bin_ / "python"), "-c", asked], environment).strip()


def command(words: Sequence[str], environment: Environment, **environ: str) -> str:
    """Run a command and return its output. If this ends early, so do the command and its children.

    Raises:
        InstallError: it failed, or took too long.
    """
    process = subprocess.Popen(
        words,
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, complaints = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise InstallError(f"{environment.package} was not installed in {LIMIT_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        why = " ".join((complaints or output).split())[-TAIL_CHARS:]
        raise InstallError(f"{environment.package} cannot be installed: {why}")
    return output
