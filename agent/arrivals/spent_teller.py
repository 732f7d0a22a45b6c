"""What the job has used up of its budgets is told to all nodes, whenever that has become more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from agent.nodes.run_messages import BudgetKnown
from agent.spec.spent_budget import SpentBudget


class ToldNode(Protocol):
    """Another node, as far as it is told."""

    def pass_on(self, message: BudgetKnown) -> None:
        """Send it, unless the node is lost."""


class SpentTeller:
    """Tells it before the orders that use it up: who has obeyed these knows of it."""

    def __init__(
        self,
        spent: Callable[[], SpentBudget],
        nodes: Iterable[ToldNode],
        clock: Callable[[], float],
    ) -> None:
        """No node knows of anything yet.

        Args:
            spent: by the job so far.
            nodes: all others.
            clock: of this process, monotonic.
        """
        self._spent = spent
        self._nodes = tuple(nodes)
        self._clock = clock
        self._told = SpentBudget()

    def tell(self) -> None:
        """Tell all nodes, if they do not know it."""
        spent = self._spent()
        if spent.is_newer_than(self._told):
            self._told = spent
            known = BudgetKnown(spent.told(self._clock()))
            for node in self._nodes:
                node.pass_on(known)

    def came(self, node: ToldNode) -> None:
        """Another node has the place of a lost one."""
        if self._told != SpentBudget():
            node.pass_on(BudgetKnown(self._spent().told(self._clock())))
