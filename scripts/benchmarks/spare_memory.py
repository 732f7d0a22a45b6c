"""Memory that this machine has at hand, not only its host.

A virtual machine's free memory goes back to the host when nobody has touched it for seconds (free
page reporting), and to touch it again then takes several times as long as to clear it: 2.8 s/GiB
instead of 0.45 were measured. That is neither launcher's doing.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE

from processes import KIB, PROC, field
from trial import TrialError

LEFT = 2 << 30  # bytes that stay available: the machine must not swap
LIMIT_S = 60.0

TOUCH = f"""\
import mmap, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
for page in range(0, size, {PAGESIZE}):
    memory[page] = 1
print("touched", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(size: int) -> Iterator[None]:
    """Touch so many bytes and free them at the end; do nothing if that leaves too little.

    Raises:
        TrialError: it took too long.
    """
    if not size or field(PROC / "meminfo", "MemAvailable") * KIB < size + LEFT:
        yield
        return
    command = (sys.executable, "-c", TOUCH, str(size))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None, "it is a pipe"
            if not select.select((child.stdout,), (), (), LIMIT_S)[0]:
                raise TrialError(f"{size >> 20} MiB of memory were not touched in {LIMIT_S:g} s")
            yield
        finally:
            child.kill()  # awaited where the block ends
