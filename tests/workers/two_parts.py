"""A line on stdout; after the file of the first argument is there more on stdout, and a word on stderr."""

import os
import sys
import time

print("first line", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(50_000 * "more\n", flush=True)
print("last word", file=sys.stderr, flush=True)
