"""A rank's line on the board of ``scripts/bench recover``; the lines lie by attempt, then rank."""

import struct

SPAN = struct.Struct("=qq")  # the step an attempt begins from, the newest it has finished
