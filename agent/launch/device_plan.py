"""Which of this node's devices each rank has; one that failed is not used again. Pure.

Ranks count their devices from 0 among those that CUDA_VISIBLE_DEVICES lists (ROCm reads it, too).
The successor of a rank whose device failed sees a list in which that device and a spare one have
changed places, so its script need not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.spec.job_spec import JobSpec, UsageError
from worker_hooks.contract.env import visible_devices

_FAULT = re.compile(  # of the device itself, as CUDA, HIP, Level Zero and their drivers name them
    r"uncorrectable (?:ECC|NVLink) error|hardware stack error|fallen off the bus"
    r"|no CUDA-capable device|device\(s\) is/are busy or unavailable|hipErrorECCNotCorrectable"
    r"|RESULT_ERROR_DEVICE_LOST|GPU is lost|a hardware error"
)


def device_fault(text: str) -> str:
    """The part of an error's text that says that a device has failed; empty: it does not.

    Errors of a program, such as an illegal memory access, are none.
    """
    found = _FAULT.search(text)
    return "" if found is None else found[0]


class DevicePlan:
    """The devices of one node's ranks, as it is known at present."""

    def __init__(self, spec: JobSpec, inherited: Mapping[str, str]) -> None:
        """Give each rank the device of its number.

        Raises:
            UsageError: fewer devices are visible than are needed.
        """
        self._places = list(range(spec.nproc))
        self._spare = list(range(spec.nproc, spec.nproc + spec.spare_devices))
        self._is_virtual = spec.virtual_local_rank
        self._names: tuple[str, ...] = ()
        if spec.virtual_local_rank or spec.spare_devices:
            try:
                self._names = visible_devices(spec.nproc, inherited, spec.spare_devices)
            except ValueError as error:
                raise UsageError(str(error)) from error

    @property
    def has_spare(self) -> bool:
        """Whether there is a device left that no rank has or had."""
        return bool(self._spare)

    def only(self, local_rank: int) -> str | None:
        """With ``--virtual-local-rank``: the one device that a rank sees."""
        return self._names[self._places[local_rank]] if self._is_virtual else None

    def order(self, local_rank: int) -> str:
        """All devices as a rank is to count them; empty: as it would anyway."""
        place = self._places[local_rank]
        if self._is_virtual or place == local_rank:
            return ""
        names = [*self._names]
        names[local_rank], names[place] = names[place], names[local_rank]
        return ",".join(names)

    def give_up(self, local_rank: int, rank: int, fault: str) -> str:
        """A rank's device failed: give its successor a spare one. What is done, as a sentence.

        Only while :attr:`has_spare`.

        Args:
            local_rank: whose device.
            rank: the same rank's number in the job.
            fault: what the driver said.
        """
        failed = self._names[self._places[local_rank]]
        place = self._places[local_rank] = self._spare.pop(0)
        left = f"{len(self._spare)} spare left" if self._spare else "the last spare one"
        return (
            f"device {failed} of rank {rank} failed ({fault}): its successor gets device "
            f"{self._names[place]}, {left}"
        )
