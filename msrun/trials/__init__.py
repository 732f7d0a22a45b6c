"""Trials of a job for a drill: one run with its faults, what it left, and whether that is right."""
