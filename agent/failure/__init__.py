"""After a failure: evidence, root cause, hints, reports, what to type now."""
