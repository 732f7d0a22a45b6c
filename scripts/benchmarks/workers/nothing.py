"""A script that imports nothing (``os``, ``sys`` and ``time`` are loaded in any interpreter)."""

from stamp import stamp

stamp("first")
stamp("last")
