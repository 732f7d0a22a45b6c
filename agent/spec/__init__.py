"""The job as the user requested it: specification, timeouts, console."""
