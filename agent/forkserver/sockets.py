"""Has multiprocessing make its sockets in one folder of the run, which msrun removes at its end.

Python has each process make a folder, and removes it as the process ends in peace. Workers of a
DataLoader have one each, and after a rank's death they are ended by SIGKILL: theirs would stay.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from agent.forkserver.after_import import call_after_import
from worker_hooks.contract.env import RUNS
from worker_hooks.contract.layout import sockets_folder

_UTIL = "multiprocessing.util"
_MOST_BYTES = 80  # of the folder's path; a socket's has 18 more, of at most 107


def begin() -> None:
    """In a worker: have the folder used, once somebody has imported multiprocessing."""
    path = str(sockets_folder(os.environ, os.environ.get(RUNS, "").rpartition(":")[2]))
    if len(os.fsencode(path)) > _MOST_BYTES:
        return
    if _UTIL in sys.modules:
        _use(path)
    else:
        call_after_import(_UTIL, lambda: _use(path))


def remove(record_id: str) -> None:
    """All processes of the run have ended, msrun too: remove the folder, if there is one."""
    shutil.rmtree(sockets_folder(os.environ, record_id), ignore_errors=True)


def _use(path: str) -> None:
    util: Any = sys.modules[_UTIL]
    own = util.get_temp_dir

    def get_temp_dir() -> str:
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            is_ours = os.lstat(path).st_uid == os.getuid()
        except OSError:
            is_ours = False
        return path if is_ours else str(own())

    util.get_temp_dir = get_temp_dir
