"""`many_files.py N PROGRAM ARGS`: becomes the program, with N more inherited descriptors."""

import os
import resource
import sys

count = int(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
for _ in range(count):
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
os.execv(sys.argv[2], sys.argv[2:])
