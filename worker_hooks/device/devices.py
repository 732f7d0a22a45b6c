"""The accelerators of a process, through torch's interface that is the same for all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from worker_hooks.device.timeline import DeviceTimeline, Mark


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether its bytes change as the main thread changes them, not as a device comes to it."""
    return tensor.device.type in {"cpu", "meta"}


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Those that these tensors are on; the host is none."""
    return tuple(dict.fromkeys(each.device for each in tensors if not is_on_host(each)))


def are_idle(devices: Iterable[torch.device]) -> bool:
    """Whether these devices have done all that is queued on this thread's streams."""
    return all(torch.accelerator.current_stream(each).query() for each in devices)


def timeline_of(devices: Sequence[torch.device]) -> DeviceTimeline:
    """How far these devices have come."""
    return DeviceTimeline(lambda: tuple(map(_mark, devices)))


def _mark(device: torch.device) -> Mark:
    """A mark behind all that this thread has queued on the device's present stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
