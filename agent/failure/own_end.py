"""Why a process killed itself, as the last line of its log says.

Read at once when a rank was killed, while its peers wait: so this is little, and imports little.
"""

from __future__ import annotations

from pathlib import Path

from agent.text.sanitize import encodable
from agent.text.wording import WORDS_CHARS
from worker_hooks.contract.atomic_file import read_end
from worker_hooks.contract.rank_lines import ENDS_ITSELF

_LINE_BYTES = 4096


def own_end(line: str) -> str:
    """The reason in a log's last line; empty: the process did not kill itself."""
    return line.partition(ENDS_ITSELF)[2]


def own_end_in(log: str) -> str:
    """The same of a log, cut to what messages quote.

    ``log``: the file that the process wrote its errors to; empty: it has none.
    """
    if not log:
        return ""
    try:
        octets, _ = read_end(Path(log), _LINE_BYTES)
    except (OSError, ValueError):  # without a log there is no reason
        return ""
    lines = octets.decode(errors="replace").strip().splitlines()
    return encodable(own_end(lines[-1])[:WORDS_CHARS]) if lines else ""
