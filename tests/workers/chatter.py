"""Writes ``count`` numbered lines of random lengths, flushed at random points, each with its sum.

Arguments: count, seed. A line is ``<rank> <number> <text> <crc32 of what stands before>``.
"""

import os
import random
import sys
import zlib

rank = int(os.environ["RANK"])
count, seed = int(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed * 1000 + rank)
waiting = b""
for number in range(count):
    text = "x" * draw.choice((0, 1, 7, 60, 200, draw.randrange(3000)))
    line = f"{rank} {number} {text}".encode()
    waiting += line + b" %d\n" % zlib.crc32(line)
    while len(waiting) > 5000:
        piece = draw.randrange(1, len(waiting))
        os.write(draw.choice((1, 2)), waiting[:piece])
        waiting = waiting[piece:]
os.write(1, waiting)
os.write(1, b"%d has no end" % rank)
