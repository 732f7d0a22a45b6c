"""All randomness of a process as bytes, read in microseconds."""
