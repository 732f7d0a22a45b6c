"""The options for telling programs outside of a job what happens to it."""

from __future__ import annotations

import os
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from agent.spec.job_spec import NotifySpec, UsageError
from msrun.options.settings import Setting, Settings


def notify(settings: Settings) -> NotifySpec:
    """The checked options.

    Raises:
        UsageError: a command is not there, an address is none, or a folder or package is missing.
    """
    for setting in (settings.of("metrics_file"), settings.of("metrics_port")):
        if setting.text and find_spec("prometheus_client") is None:
            raise UsageError(
                f"{setting.name} needs the package prometheus_client: pip install 'msrun[metrics]'"
            )
    return NotifySpec(
        on_event=_command(settings.of("on_event")),
        webhook=_address(settings.of("webhook")),
        metrics_file=_file(settings.of("metrics_file")),
        metrics_port=settings.integer("metrics_port"),
    )


def _command(setting: Setting) -> tuple[str, ...]:
    """Its words; no shell runs it. The program is found now, not when it is needed."""
    try:
        words = shlex.split(setting.text)
    except ValueError as error:
        raise UsageError(f"{setting.shown} is no command: {error}") from None
    if not words:
        return ()
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(f"{setting.shown}: {words[0]} is no program that can be run")
    return (os.path.abspath(found), *words[1:])


def _address(setting: Setting) -> str:
    """An address of http or https; none with a password where other users can read it."""
    if not setting.text:
        return ""
    try:
        parts = urlsplit(setting.text)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        is_address = is_address and (parts.port or 1) > 0 and setting.text.isprintable()
    except ValueError:
        is_address = False
    if not is_address or " " in setting.text:
        raise UsageError(f"{setting.name} must be an address that begins with http:// or https://")
    if parts.password is not None and setting.name.startswith("-"):
        raise UsageError(
            f"{setting.name} has a password, which others can read in the list of processes: set "
            "the variable PET_WEBHOOK instead"
        )
    return setting.text


def _file(setting: Setting) -> Path | None:
    if not setting.text:
        return None
    path = Path(setting.text).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{setting.shown} must name a file in a folder that exists")
    return path
