"""``run(train, state)``: the training function, called so that it can be held and re-entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from worker_hooks.hold import describe
from worker_hooks.state import TrainState

Result = TypeVar("Result")


def run(train: Callable[[TrainState], Result], state: TrainState) -> Result:
    """Train; ``train`` must make its DDP wrapper itself, and may be called again.

    An exception is held here while the state is saved, before anything is unwound further.

    Raises:
        TypeError: these are not a function and a TrainState, in this order.
        Exception: what ``train`` raised.
    """
    if not callable(train) or not isinstance(state, TrainState):
        raise TypeError("run(train, state) takes your training function and its TrainState")
    try:
        result = train(state)
    except Exception as error:
        state.hold(describe(error))
        raise
    state.finish()
    return result
