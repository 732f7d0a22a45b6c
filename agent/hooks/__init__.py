"""The agent's end of the lines to the ranks' hooks, and the ranks' status pages."""
