"""Which content is looked at, and when: all of it in the first steps, then samples within a budget.

Version counters do not see writes through ``.data``, ``vector_to_parameters``, numpy views or
foreign kernels. The main thread looks at the content itself: at a commit, as the next update
begins, behind that update and at its commit. It does so in two intervals of a step in which nothing
but counted changes is expected, and it changes nothing meanwhile, so there is no race.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from time import perf_counter

from torch import Tensor

from worker_hooks.changes.content import digest, sample

FIRST_STEPS = 3  # are audited completely
LOOKS = 4  # at each tensor in a step that is audited

_CHANCE = 0.25  # of a step to be audited once there is budget: no rhythm that a script could have
_MOST_STEP_S = 10.0  # a longer step was none: a validation, for example


class Baseline:
    """The content of some tensors at one moment."""

    def __init__(self, tensors: Mapping[str, Tensor], places: Mapping[str, float] | None) -> None:
        """Look at them.

        Args:
            places: the tensors to look at, and for each the place of its sample; ``None``: look at
                all of every tensor.
        """
        self.places = places
        wanted: Iterable[str] = tensors if places is None else places
        self._found = {name: self._look(name, tensors[name]) for name in wanted if name in tensors}

    def differing(
        self, tensors: Mapping[str, Tensor], wanted: Collection[str] | None = None
    ) -> set[str]:
        """The names of tensors that have other content by now; ``wanted``: look at no others."""
        return {
            name
            for name, found in self._found.items()
            if (wanted is None or name in wanted)
            if name not in tensors or self._look(name, tensors[name]) != found
        }

    def has_all_of(self, names: Collection[str]) -> bool:
        """Whether all of the content of these tensors was looked at."""
        return self.places is None and self._found.keys() >= set(names)

    def _look(self, name: str, tensor: Tensor) -> int | str:
        return digest(tensor) if self.places is None else sample(tensor, self.places[name])


class AuditSchedule:
    """Which steps are audited. The budget is a share of the training's time."""

    def __init__(self, share: float, *, is_known: bool = False) -> None:
        """Begin with complete steps. ``share``: of the time; 0: never."""
        self.share = share
        self.is_first = share > 0 and not is_known
        """Whether no full count of complete steps was audited yet."""
        self._steps = 0  # that were audited completely
        self._budget_s = 0.0
        self._tensor_s = 2e-5  # for one look at one tensor
        # a generator of its own: the script's randomness is none of the audit's business
        self._random = random.Random()  # noqa: S311
        self._queue: list[str] = []  # the tensors that were not looked at for longest are last

    @property
    def first_left(self) -> int:
        """How many steps have yet to be audited completely."""
        return FIRST_STEPS - self._steps if self.is_first else 0

    def note_complete(self) -> bool:
        """A step was audited completely; whether that was the last one."""
        self._steps += 1
        self.is_first = self._steps < FIRST_STEPS
        return self._steps == FIRST_STEPS

    def note_cost(self, began: float, count: int) -> None:
        """So many tensors were looked at since ``began``."""
        if count:
            self._tensor_s = 0.75 * self._tensor_s + 0.25 * (perf_counter() - began) / count

    def is_due(self, step_s: float) -> bool:
        """Whether to audit the step that begins; ``step_s``: how long the step before took."""
        self._budget_s += self.share * min(step_s, _MOST_STEP_S)
        return self._budget_s >= LOOKS * self._tensor_s and self._random.random() <= _CHANCE

    def places(self, names: Iterable[str]) -> dict[str, float]:
        """What to look at in the step that begins: names of tensors, and a place in each.

        ``names``: of all tensors that may be looked at.
        """
        cost_s = LOOKS * self._tensor_s
        there = set(names)
        self._queue = [name for name in self._queue if name in there]
        count = int(self._budget_s / cost_s)
        if len(self._queue) < min(count, len(there)):
            rest = sorted(there - set(self._queue))
            self._random.shuffle(rest)
            self._queue = rest + self._queue
        chosen = [self._queue.pop() for _ in range(min(count, len(self._queue)))]
        self._budget_s = min(self._budget_s - cost_s * len(chosen), cost_s * len(there))
        return self.some_places(chosen)

    def some_places(self, names: Iterable[str]) -> dict[str, float]:
        """A random place in each of these tensors."""
        return {name: self._random.random() for name in names}
