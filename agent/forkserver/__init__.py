"""The forkserver's process, and what a worker does between its fork and the user's first line.

This code runs inside a fresh interpreter, never inside the agent. It imports only the standard
library and the contract, and preloads what the agent found in the user's script.
"""
