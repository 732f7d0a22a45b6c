"""The job as it was asked for: specification, timeouts, console."""
