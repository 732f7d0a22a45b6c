"""What the agent and the ranks agree on: environment, messages, wire, paths, status page."""
