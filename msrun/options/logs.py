"""The options for output: files, console, filters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agent.spec.job_spec import LogSpec, Std, UsageError
from msrun.options import rank_maps
from msrun.options.dialects import JobSize
from msrun.options.settings import Setting, Settings
from worker_hooks.contract import env


def logs(
    settings: Settings, size: JobSize, environ: Mapping[str, str], warnings: list[str]
) -> LogSpec:
    """The checked description of all output.

    Ranks that torchrun ignores are ignored; ``warnings`` then gets a sentence.

    Raises:
        UsageError: a map, a list or a name is invalid.
    """
    log_dir, nproc = settings.of("log_dir"), size.nproc
    for dest in ("redirects", "tee", "local_ranks_filter"):
        if dest == "local_ranks_filter" or ":" in settings.of(dest).text:  # -t 3 names no rank
            _warn_beyond(settings.of(dest), nproc, warnings)
    tee = rank_maps.streams(settings.of("tee"), nproc)
    for dest, stream in (
        ("duplicate_stdout_filters", Std.OUT),
        ("duplicate_stderr_filters", Std.ERR),
    ):
        if settings.text(dest) and not any(shown & stream for shown in tee.values()):
            shown = settings.of(dest).shown
            warnings.append(f"{shown} is ignored: it picks lines of streams that -t shows.")
    return LogSpec(
        log_dir=folder(log_dir),
        disabled=log_dir.text == os.devnull,
        redirects=rank_maps.streams(settings.of("redirects"), nproc),
        tee=tee,
        local_ranks_filter=_filter(settings.of("local_ranks_filter")),
        tail=_tail(settings.of("tail_worker_log"), size.world or size.nnodes * nproc),
        duplicate_stdout_filters=rank_maps.words(settings.of("duplicate_stdout_filters")),
        duplicate_stderr_filters=rank_maps.words(settings.of("duplicate_stderr_filters")),
        worker_log_name=_stem(settings.of("worker_log_name")),
        prefix_template=environ.get(env.PREFIX_TEMPLATE),
    )


def folder(setting: Setting) -> Path | None:
    """A folder, absolute because a detached msrun may change its working folder."""
    if setting.text in {"", os.devnull}:
        return None
    path = Path(setting.text).absolute()
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not os.path.isdir(nearest):
        raise UsageError(
            f"{setting.shown} is not a folder: name a folder; msrun creates it if it is missing"
        )
    return path


def _warn_beyond(setting: Setting, nproc: int, warnings: list[str]) -> None:
    """Warn only: one command line often serves nodes of several sizes, and torchrun accepts it."""
    beyond = rank_maps.beyond(setting, nproc)
    if beyond:
        ranks = ", ".join(map(str, beyond))
        warnings.append(f"{setting.shown}: local rank {ranks} is ignored, this node has {nproc}.")


def _filter(setting: Setting) -> frozenset[int] | None:
    """Local ranks that the console shows; ``None``: all."""
    return rank_maps.ranks(setting) if setting.text else None


def _tail(setting: Setting, world_size: int) -> frozenset[int] | None:
    """Global ranks that the console shows; -1 anywhere means all: ``None``."""
    ranks = rank_maps.ranks(setting, low=-1)
    if -1 in ranks:
        return None
    if max(ranks) >= world_size:
        raise UsageError(f"{setting.shown}: the ranks are 0 to {world_size - 1}, or -1 for all")
    return ranks


def _stem(setting: Setting) -> str:
    """The stem of the workers' log files, with {ip} and {hostname} filled in."""
    stem = setting.text.replace("{hostname}", os.uname().nodename)
    if "{ip}" in stem:
        stem = stem.replace("{ip}", _own_ip())
    if not stem or "/" in stem or stem.startswith("."):
        raise UsageError(
            f"{setting.shown} must be the stem of a file name: without a slash and a leading dot"
        )
    return stem


def _own_ip() -> str:
    """The address from which this host reaches others; no packet is sent."""
    import socket

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: routed like any other, owned by nobody
            return str(probe.getsockname()[0])
    except OSError:  # no route, no network: only the loopback is left
        return "127.0.0.1"
