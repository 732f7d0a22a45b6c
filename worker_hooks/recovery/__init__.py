"""Load a checkpoint, resume from it, rejoin a new group, save without an agent."""
