"""Accelerators: how far a device has come, which lags behind the thread that orders its work."""
