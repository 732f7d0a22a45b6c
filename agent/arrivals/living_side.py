"""What a node brings along whose ranks train on though node 0 is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from agent.launch.doors import Address
from agent.launch.meeting import Met, OwnSide, own_side, program_digest
from agent.launch.past import adopted_job
from agent.nodes.join import JoinedNode, join
from agent.nodes.messages import LivingRanks
from agent.nodes.tls import Security
from agent.spec.job_spec import AdoptedJob, UsageError
from agent.spec.spent_budget import ToldBudget, newer_of

Opened = Callable[[socket.socket], object]
"""Takes a connection; who shuts it down ends the try to join."""


class LivingSide:
    """What one such node tells when it meets the others again, and how it dials them."""

    def __init__(self, met: Met, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Take the parts.

        Args:
            met: how this node has met the others.
            environ: msrun's environment.
            say: prints one sentence for people.
        """
        assert met.asked.master_port is not None
        self.home = Address(met.asked.master_addr, met.asked.master_port)
        self._met = met
        self._environ = environ
        self._say = say
        self._first: OwnSide | None = None
        self.spent = met.prepared.spec.spent
        """What the job has used up of its budgets, as far as this node knows."""

    def hear(self, told: ToldBudget) -> None:
        """The controller, or a node that has lost it, says what the job has used up."""
        self.spent = newer_of(self.spent, told.heard(time.monotonic()))

    def read(self) -> None:
        """Take in now what is read from files.

        Raises:
            UsageError: one of them is unfit.
        """
        self._first = self._side(is_first=False)

    def _side(self, *, is_first: bool) -> OwnSide:
        met = self._met
        return own_side(
            met.asked,
            self._environ,
            met.version,
            self._say,
            met.door,
            is_first=is_first,
            known=met.token,
        )

    def living(self, attempt: int, resume: str) -> LivingRanks:
        """What it tells of its ranks.

        Args:
            attempt: that they are in.
            resume: the checkpoint that this has resumed from.
        """
        spec = self._met.prepared.spec
        return LivingRanks(
            job=spec.saves_as,
            node_rank=spec.node_rank,
            attempt=attempt,
            attempt_resume=resume,
            resume=str(spec.dump.resume or ""),
            resume_step=spec.dump.resume_step,
            lineage=spec.dump.lineage,
            program=program_digest(spec),
            world=spec.world_size,
            local_first=spec.local_first,
        )

    def adopted(self, living: LivingRanks) -> AdoptedJob:
        """What a controller here has to know of them."""
        return adopted_job(living)

    def security(self) -> Security:
        """Of the connections of others to this node.

        Raises:
            UsageError: a file that it takes is unfit.
        """
        return self._side(is_first=True).security

    def dials(self, living: LivingRanks) -> Callable[[Address, Opened], JoinedNode]:
        """What dials a node that decides, or will, once, and waits until it does.

        Raises:
            UsageError: a file that it takes is unfit, and always was; it is said.
        """
        try:  # its certificate may have been renewed since
            side = self._side(is_first=False)
        except UsageError as error:
            self._say(str(error))
            if self._first is None:
                raise
            side = self._first
        own = side.own._replace(node_rank=living.node_rank, living=living, spent=self.spent)

        def dial(address: Address, opened: Opened) -> JoinedNode:
            return join(
                *address,
                own,
                side.token.read,
                None,
                lambda _: None,
                security=side.security,
                is_once=True,
                opened=opened,
            )

        return dial
