"""Periodic checkpoints, by MindSpore's names.

``config`` says what is wanted, ``model_checkpoint`` is the callback, ``schedule`` says when a
checkpoint is due, ``context`` is what the callback reads of a training. ``planner`` makes the plan
of one rank for one checkpoint; ``rank_writer`` writes the rank's own part, ``finalize`` does what
only rank 0 does. These two need no torch, so that with ``async_save`` ``writer_process`` can run
them in the background, from a copy of the state in shared memory (``staging``).
"""
