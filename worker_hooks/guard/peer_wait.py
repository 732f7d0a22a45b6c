"""The main thread's wait for peers in front of an update: by looking, as no system call tells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_YIELDS = 50  # looks, before the first nap
_NAPS_S = (5e-5, 1e-3)  # the first one, and the longest


def await_peers(
    is_over: Callable[[], bool],
    is_held: Callable[[], bool],
    patience_s: float,
    late: Callable[[], object],
) -> None:
    """Look until it is over.

    Args:
        is_over: whether to wait no longer; called between looks, and may raise.
        is_held: whether something has deadlines of its own, such as a freeze: patience begins anew.
        patience_s: seconds after which ``late`` is called, unless it is held.
        late: has ``is_over`` true from then on.
    """
    looks, nap_s, until_s = 0, _NAPS_S[0], time.monotonic() + patience_s
    while not is_over():
        looks += 1
        if looks < _YIELDS:
            os.sched_yield()
            continue
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _NAPS_S[1])
        if is_held():
            until_s = time.monotonic() + patience_s
        elif time.monotonic() > until_s:
            late()
