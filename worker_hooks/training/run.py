"""``run(train, state)``: calls the training function so that it can be held and entered again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from worker_hooks.contract.peer_lost import says_peer_lost
from worker_hooks.contract.rank_lines import LOST_A_PEER
from worker_hooks.guard.exit_hooks import describe
from worker_hooks.guard.gate import EjectedError
from worker_hooks.training.train_state import TrainState

log = logging.getLogger("msrun")
Result = TypeVar("Result")


def run(train: Callable[[TrainState], Result], state: TrainState) -> Result:
    """Train, and enter ``train`` again when a dead rank was replaced.

    Then the process group is new, and ``state`` and the registered objects are as of the newest
    commit. What ``train`` makes, it makes anew: DDP, ``torch.compile``, sub-groups and device
    meshes. What was made outside stays: the model, the optimizer, the loader with its workers. An
    exception is held here while the state is saved, before the stack is unwound further.

    Raises:
        GracefulExit: the job exits on request, and ``train`` has returned because of that: what
            follows ``run`` is for a training that came to its end.
        TypeError: the arguments are not a function and a TrainState, in this order.
        Exception: what ``train`` raised.
    """
    if not callable(train) or not isinstance(state, TrainState):
        raise TypeError("run(train, state) takes your training function and its TrainState")
    state.begin_run(train)
    is_again = False
    while True:
        try:
            if is_again:
                state.rejoin()
            result = train(state)
            state.end_run()
        except EjectedError:
            is_again = True
        except Exception as error:
            is_again = state.hold(error)
            if not is_again:
                raise
            _say_why(state.rank, describe(error))
        else:
            return result


def _say_why(rank: int, error: str) -> None:
    """What it raised, unless that only follows from the death; msrun's journal has every text."""
    if says_peer_lost(error):
        log.warning(LOST_A_PEER)
    else:
        log.warning("rank %d repeats its step after: %s", rank, error[:200])
