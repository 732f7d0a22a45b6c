"""Fault injection for drills: the plan, the faults, the trace of a training."""
