"""The listener thread of a rank: its line to the agent, the gate, saving on order, signals."""
