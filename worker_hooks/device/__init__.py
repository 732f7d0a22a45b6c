"""Accelerators: how far a device has come, behind the thread that orders its work; reading it."""
