"""Recorded runs: status, logs, stop."""
