"""Maps torch's libraries while Python modules are imported: two halves of ``import torch`` at once.

Mapping and relocating ``libtorch_cpu.so`` takes a fifth of ``import torch`` and needs no Python; a
thread does it, as torch itself would, while this one imports what torch imports before and after.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading

# In torch's own order and with its own flags (torch/__init__.py, _load_global_deps, then _C).
LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_LOCAL))

# What `import torch` imports, too (a test says so), and what needs no library of torch.
BESIDE = (
    "numpy",
    "typing_extensions",
    "dataclasses",
    "inspect",
    "asyncio",
    "unittest.mock",
    "multiprocessing.connection",
    "tempfile",
    "logging",
    "datetime",
    "platform",
)


def start() -> threading.Thread | None:
    """Begin mapping; ``None`` where there is no torch. The thread ends by itself: join it."""
    places = (os.path.join(entry, "torch", "lib") for entry in sys.path)
    folder = next((place for place in places if os.path.isdir(place)), None)
    if folder is None:
        return None
    thread = threading.Thread(target=_map, args=(folder,), daemon=True)
    thread.start()
    return thread


def _map(folder: str) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # unlike ctypes.CDLL(path), it gives the GIL away
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, flags in LIBRARIES:
        dlopen(
            os.fsencode(os.path.join(folder, name)), os.RTLD_NOW | flags
        )  # or torch says why not


def import_beside() -> None:
    """Import what torch imports itself."""
    for name in BESIDE:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112  torch meets it again and knows what to do
            continue
