"""Carries out a dump: to disk, to memory, from memory to disk."""
