"""MindSpore's name for leaving on request where the script makes each training step itself."""

from __future__ import annotations

from worker_hooks.training.train_state import TrainState


class ExitByRequest:
    """Two lines for code that overrides the train step, or has a loop of its own.

        exit_by_request = ExitByRequest(state)      # once, before the first step
        while True:
            ...                                     # one step, its update included
            if exit_by_request():
                break

    Each call is the end of a step, as the return for the next batch of ``state.batches`` is. Like
    there it costs no exchange between ranks.
    """

    def __init__(self, state: TrainState) -> None:
        """Begin: the state is guarded from now on, and as it was saved if this run resumes.

        Raises:
            TypeError: this is no TrainState.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"ExitByRequest() takes your TrainState, not {type(state).__name__}")
        self._state = state
        self._is_due = state.should_exit

    def __call__(self) -> bool:
        """Whether to leave now: all ranks do at the same step, and it is saved."""
        self._is_due = self._is_due or self._state.should_exit
        return self._is_due
