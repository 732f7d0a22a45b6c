"""The forkserver's own process, and what a worker does between its fork and the user's first line.

Runs inside a fresh interpreter, never inside the agent. Imports the standard library and the
contract only; what it preloads is what the agent found in the user's script.
"""
