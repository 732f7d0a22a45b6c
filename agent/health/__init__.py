"""Hangs and stragglers."""
