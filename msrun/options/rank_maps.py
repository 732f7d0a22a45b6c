"""Reads the small languages inside option values: rank lists, stream maps, core maps, filters.

Each function takes the setting that it reads, so that an error can show it as it was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agent.spec.job_spec import Std, UsageError
from msrun.options.settings import Setting

_STREAMS = re.compile(r"[0-3]")
_STREAM_MAP = re.compile(r"[0-9]+:[0-3](,[0-9]+:[0-3])*")
_CORES = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_DEVICE = re.compile(r"(?:device)?([0-9]+)")


def streams(setting: Setting, nproc: int) -> dict[int, Std]:
    """The streams of each local rank that ``-r``/``-t`` name; ranks with none are left out.

    Ranks that this node does not have are left out, as in torchrun (one command for all nodes).
    """
    text = setting.text.replace(" ", "")
    if _STREAMS.fullmatch(text):
        ranks = {rank: Std(int(text)) for rank in range(nproc)}
    elif _STREAM_MAP.fullmatch(text):
        pairs = (item.split(":") for item in text.split(","))
        ranks = {int(rank): Std(int(std)) for rank, std in pairs}
    else:
        raise UsageError(
            f"{setting.shown} must be 0, 1 (stdout), 2 (stderr) or 3 (both), or a map of local "
            "ranks to these such as 0:3,1:1"
        )
    return {rank: std for rank, std in ranks.items() if std and rank < nproc}


def beyond(setting: Setting, nproc: int) -> list[int]:
    """The local ranks in a map or list that this node does not have."""
    text = setting.text.replace(" ", "")
    ranks = (int(word) for word in re.findall(r"(?:^|,)([0-9]+)(?=:|,|$)", text))
    return [rank for rank in ranks if rank >= nproc]


def ranks(setting: Setting, *, low: int = 0) -> frozenset[int]:
    """A comma-separated list of ranks, none below ``low``."""
    try:
        listed = frozenset(int(word) for word in setting.text.split(","))
    except ValueError:
        message = f"{setting.shown} must be a comma-separated list of ranks such as 0,1,2"
        raise UsageError(message) from None
    if min(listed) < low:
        raise UsageError(f"{setting.shown} must not name a rank below {low}")
    return listed


def words(setting: Setting) -> tuple[str, ...]:
    """A comma-separated list; ``,,`` is a comma inside a word, empty words are dropped."""
    parts = re.split(r"(,+)", setting.text)
    joined = "".join(_separators(part) if part.startswith(",") else part for part in parts)
    return tuple(word for word in joined.split("\0") if word)


def _separators(commas: str) -> str:
    """A pair of commas stands for a comma; a single one separates words."""
    return "," * (len(commas) // 2) + "\0" * (len(commas) % 2)


def check_pairs(setting: Setting) -> dict[str, str]:
    """``key=value,...`` of ``--rdzv-conf``; keys and values are not checked."""
    pairs: dict[str, str] = {}
    for pair in setting.text.split(",") if setting.text.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"{setting.shown}: every key needs a value, as in key1=value1,key2=2")
        pairs[key] = value
    return pairs


def cores(setting: Setting, nproc: int) -> Mapping[int, tuple[str, ...]]:
    """The core ranges of each local rank from JSON, such as ``{"device0": ["0-3"]}``."""
    bound: dict[int, tuple[str, ...]] = {}
    for key, value in _json_object(setting).items():
        device = _DEVICE.fullmatch(str(key))
        if device is None or int(device[1]) >= nproc:
            raise UsageError(f"{setting.shown}: {key!r} is not one of device0 to device{nproc - 1}")
        bound[int(device[1])] = tuple(_core_ranges(setting, value))
    return bound


def _json_object(setting: Setting) -> dict[str, Any]:
    """A JSON object that is not empty."""
    try:
        value = json.loads(setting.text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value:
        message = f'{setting.shown} must be True, False or JSON such as {{"device0": ["0-3", "8"]}}'
        raise UsageError(message)
    return value


def _core_ranges(setting: Setting, value: Any) -> list[str]:
    """The ranges of one device: a list of ``a-b`` or ``a``, or one text with commas."""
    listed = value if isinstance(value, list) else str(value).split(",")
    ranges = [str(item).strip() for item in listed]
    for item in ranges:
        match = _CORES.fullmatch(item)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UsageError(f"{setting.shown}: {item!r} is not a range of cores such as 0-3 or 8")
    if not ranges:
        raise UsageError(f"{setting.shown}: a device needs at least one core")
    return ranges
