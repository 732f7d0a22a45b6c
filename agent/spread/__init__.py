"""Checkpoints in memory on several nodes: what is sent, who keeps it, who wrote it."""
