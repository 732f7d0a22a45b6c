"""Puts the wanted kind of junk where its error file belongs, then fails.

Arguments: kind, rank that does so; the others wait.
"""

import os
import signal
import sys

kind, rank = sys.argv[1], sys.argv[2]
path = os.environ["TORCHELASTIC_ERROR_FILE"]
if os.environ["RANK"] != rank:
    signal.pause()
match kind:
    case "folder":
        os.mkdir(path)
    case "pipe":
        os.mkfifo(path)
    case "loop":
        os.symlink(path, path)
    case "device":
        os.symlink("/dev/zero", path)
    case "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    case _:
        with open(path, "wb") as file:
            file.write(kind.encode().decode("unicode_escape").encode("latin-1"))
raise ValueError("what the log says")
