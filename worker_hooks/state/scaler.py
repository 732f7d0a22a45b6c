"""A registered gradient scaler: copied without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from worker_hooks.state.mismatch import missing
from worker_hooks.state.snapshot import version
from worker_hooks.tensors import state_json
from worker_hooks.tensors.state_json import Json


class ScalerPiece:
    """A gradient scaler of torch. A disabled one has no state."""

    is_compared = True
    modules: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, name: str, scaler: GradScaler) -> None:
        self.name = name
        # Any: its tensors are private, and state_dict() would wait for the device
        self._scaler: Any = scaler

    def tensors(self) -> dict[str, Tensor]:
        """None is live state: the scaler changes them even when it skips an update."""
        return {}

    def snapshot(self) -> Any:
        """Its values; tensors are copied on their device."""
        scaler = self._scaler
        if not scaler.is_enabled():
            return {}
        scale, tracker = scaler._scale, scaler._growth_tracker  # noqa: SLF001
        return {
            "scale": scaler._init_scale if scale is None else scale.clone(),  # noqa: SLF001
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": (
                scaler._init_growth_tracker if tracker is None else tracker.clone()  # noqa: SLF001
            ),
        }

    def marks(self) -> Any:
        """How often the scale was set."""
        scale = self._scaler._scale if self._scaler.is_enabled() else None  # noqa: SLF001
        return 0 if scale is None else version(scale)

    def encode(self, snapshot: Any) -> tuple[Json, dict[str, Tensor]]:
        """As ``state_dict()``, but with tensors: reading a number could wait for a dead peer."""
        return state_json.encode(snapshot, self.name)

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:
        """Why this cannot be restored."""
        return missing(value, like)

    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put the values back, unless the scaler is or was disabled."""
        scaler = self._scaler
        states = getattr(scaler, "_per_optimizer_states", None)
        if states is not None:
            states.clear()  # a step may have been interrupted between unscaling and updating
        if not value:
            return
        then = state_json.decode(value, tensors)
        was_used = isinstance(then["scale"], Tensor)
        for key in ("scale", "_growth_tracker"):
            if isinstance(then[key], Tensor):
                then[key] = then[key].item()
        scaler.load_state_dict(then)
        if was_used and scaler.is_enabled() and scaler._scale is None:  # noqa: SLF001
            # as in a scaler that was in use all the time
            scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))  # noqa: SLF001
