"""How the values that a script keeps for itself are written on a rank's page, as bytes.

A count, which is not 0; the size of the head; the head, as JSON; the contents of its entries. The
agent reads what the head says, without a look at the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from worker_hooks.contract.status_page import Entry

SCRIPT = "script"
"""The name of the entry."""

OWN = "state.own."
"""Prefix of the names of what a script keeps for each rank alone."""

REGISTERED = "state.registered."
"""Prefix of the names of registered objects that may differ between ranks."""

BUFFERS = "state.buffers."
"""Prefix of the names of buffers that have outgrown their place on the page."""

_COUNT = struct.Struct("<Q")


class ScriptRecord(NamedTuple):
    """The values of one rank as of one moment; what this lacks was never written."""

    values: Mapping[str, Any] = {}  # by name, as JSON
    was: Mapping[str, int] = {}  # checksums as of the commit before; none: unchanged until then
    now: Mapping[str, int] = {}  # checksums of those in ``late``
    late: frozenset[str] = frozenset()  # have ever changed between a backward and its commit
    printed: frozenset[str] = frozenset()  # of those: training does not depend on them
    entries: tuple[Entry, ...] = ()
    content: bytes = b""
    is_settled: bool = False  # no commit, but nothing changes between this and the commit


def split(octets: bytes) -> ScriptRecord:
    """What :func:`join` joined.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    if len(octets) < 2 * _COUNT.size or not _COUNT.unpack_from(octets)[0]:
        return ScriptRecord()
    total, size = (_COUNT.unpack_from(octets, at)[0] for at in (0, _COUNT.size))
    at = 2 * _COUNT.size
    head = json.loads(octets[at : at + size])
    entries = tuple(Entry(n, dtype, tuple(shape), b) for n, dtype, shape, b in head["entries"])
    return ScriptRecord(
        values=head["values"],
        was=head["was"],
        now=head["now"],
        late=frozenset(head["late"]),
        printed=frozenset(head["printed"]),
        entries=entries,
        content=octets[at + size : at + total],
        is_settled=head["is_settled"],
    )


def join(
    texts: Mapping[str, str],
    entries: Collection[Entry],
    content: bytes,
    *,
    was: Mapping[str, int],
    now: Mapping[str, int],
    late: Collection[str],
    printed: Collection[str],
    is_settled: bool,
) -> bytes:
    """Values as one piece of bytes, that says its own length; ``texts``: their JSON by name."""
    rest = {
        "was": was,
        "now": now,
        "late": sorted(late),
        "printed": sorted(printed),
        "entries": list(entries),
        "is_settled": is_settled,
    }
    values = ",".join(f"{json.dumps(name)}:{text}" for name, text in texts.items())
    head = f'{{"values":{{{values}}},{json.dumps(rest)[1:]}'.encode()
    counts = _COUNT.pack(len(head) + len(content)), _COUNT.pack(len(head))
    return b"".join((*counts, head, content))
