"""What a training script imports, and the contract between it and the agent.

The contract has three faces: :mod:`worker_hooks.env` (what a worker is told),
:mod:`worker_hooks.protocol` (what it says) and :mod:`worker_hooks.layout` (where it writes).
This package imports nothing of ``agent`` or ``msrun`` and needs only the standard library.
"""
