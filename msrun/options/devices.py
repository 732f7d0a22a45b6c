"""``--spare-devices``: which device each rank has at the start, and which ones wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.spec.device_plan import DevicePlan
from agent.spec.job_spec import UsageError
from worker_hooks.contract.env import CUDA_VISIBLE_DEVICES, OVERRULING_DEVICES, listed_devices


def plan_devices(
    ranks: Sequence[int], spares: int, environ: Mapping[str, str], given_up: Sequence[str] = ()
) -> DevicePlan:
    """The plan at the start of a run.

    Args:
        ranks: of this node, by local rank.
        spares: how many devices are to wait for successors; 0: nothing is planned.
        given_up: devices that failed in the runs that this one resumes.

    Raises:
        UsageError: it cannot be kept.
    """
    if not spares:
        return DevicePlan()
    option, needed = f"--spare-devices={spares}", len(ranks) + spares
    for name in OVERRULING_DEVICES:
        if name in environ:
            raise UsageError(
                f"{option} is for CUDA, and {name} is set, which ROCm prefers to "
                f"{CUDA_VISIBLE_DEVICES}: unset it, or leave the option out"
            )
    text = environ.get(CUDA_VISIBLE_DEVICES, "").strip()
    example = ",".join(map(str, range(needed)))
    if not text:
        raise UsageError(
            f"{option} needs the list of the devices that this job may use: set "
            f"{CUDA_VISIBLE_DEVICES} to {needed} devices, as in {CUDA_VISIBLE_DEVICES}={example}"
        )
    listed = listed_devices(environ)
    for device in listed:
        if not device.isdecimal() and not device.startswith("GPU-"):
            raise UsageError(
                f"{option}: {CUDA_VISIBLE_DEVICES}={text} must list whole devices by number or "
                f"GPU-UUID, and {device!r} is none"
            )
    if len(set(listed)) < len(listed):
        raise UsageError(
            f"{option}: {CUDA_VISIBLE_DEVICES}={text} lists a device twice: name each once"
        )
    known = dict.fromkeys((*listed, *given_up))  # one that failed may have been left out by now
    if len(known) < needed:
        raise UsageError(
            f"{option} and {len(ranks)} workers need {needed} devices, and "
            f"{CUDA_VISIBLE_DEVICES}={text} lists {len(listed)}: list more, or ask for fewer"
        )
    usable = [device for device in listed if device not in given_up]
    if len(usable) < len(ranks):
        raise UsageError(
            f"of {CUDA_VISIBLE_DEVICES}={text}, {','.join(given_up)} failed in the run that is "
            f"resumed, so {len(usable)} remain for {len(ranks)} workers: list others, or give "
            "--spare-devices=0 to use them again"
        )
    count = needed - (len(listed) - len(usable))
    return DevicePlan(
        slots=dict(zip(ranks, usable, strict=False)),
        spare=tuple(usable[len(ranks) : count]),
        others=tuple(usable[count:]),
        given_up=tuple(given_up),
    )
