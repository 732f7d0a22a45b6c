"""Checkpoints that training saves now and then, by MindSpore's names.

``config`` says what is wanted, ``model_checkpoint`` is the callback, ``policy`` says when it is
time. What one rank does for one checkpoint is an ``order``; ``writing`` carries out its own share
and ``commit`` what only rank 0 does: these need no torch, so that with ``async_save`` a process
beside training, ``writer``, can do it, from a copy of the state in shared memory, ``room``.
"""
