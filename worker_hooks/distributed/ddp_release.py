"""Makes a DDP release its C++ part before its process group: the other order can hang.

The end of a gloo group joins its threads. One of them may still have to drop the last collective of
a backward, which carries a Python object along (torch 2.13) and so needs the GIL. Python gives the
GIL up while it drops a group; the C++ part of a DDP, if it has the last reference, does not. So a
script hangs at its end where ``destroy_process_group()`` comes before its DDP goes out of scope.

The agent's forkserver uses this, too, so nothing here imports torch.
"""

from __future__ import annotations

import sys
from typing import Any

DDP_MODULE = "torch.nn.parallel.distributed"


def install() -> None:
    """Give torch's DDP, which is imported already, a ``__del__`` that keeps the order."""
    ddp = getattr(sys.modules.get(DDP_MODULE), "DistributedDataParallel", None)
    if ddp is None or hasattr(ddp, "__del__"):
        return
    import ctypes  # torch has imported it

    keep, is_finalizing = ctypes.pythonapi.Py_IncRef, sys.is_finalizing
    py_object = ctypes.py_object

    def release_in_order(self: Any) -> None:
        parts = vars(self)
        group = parts.get("process_group")
        if group is not None and is_finalizing():  # no thread gets the GIL any more
            keep(py_object(group))
        for name in ("logger", "reducer"):
            parts.pop(name, None)

    ddp.__del__ = release_in_order
