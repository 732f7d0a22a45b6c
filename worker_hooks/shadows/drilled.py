"""What a drill injects into a script that knows nothing of msrun, and records of it.

Without a ``TrainState`` an optimizer step counts as the step, and what the optimizers and modules
hold when the process ends as the result. Hooks of torch tell the moments.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.observer import StepObserver
from worker_hooks.drill.plan import DrillPlan, Moment
from worker_hooks.drill.trace import TrainingTrace

_OPTIMIZER = "torch.optim.optimizer"
_MODULE = "torch.nn.modules.module"


class Drilled:
    """The optimizer steps of one rank; nothing is written before the first."""

    def __init__(self, is_guarded: Callable[[], bool]) -> None:
        """``is_guarded`` tells of a script that a drill knows without this."""
        self._is_guarded = is_guarded
        self._plan = DrillPlan.decode(RankEnv.read(os.environ).drill)
        self._attempt = 0
        self._step = 0  # complete
        self._is_in_step = False
        self._injector: FaultInjector | None = None
        self._trace: TrainingTrace | None = None
        self._optimizers: dict[int, Any] = {}
        self._modules: list[Any] = []
        self._unused: dict[str, str] = {}  # random numbers when training began

    def begin(self) -> None:
        """See the moments before a copy of the process is made."""
        import_module(_OPTIMIZER).register_optimizer_step_pre_hook(self._updating)
        import_module(_OPTIMIZER).register_optimizer_step_post_hook(self._updated)
        if self._plan and any(fault.moment is Moment.FORWARD for fault in self._plan.faults):
            import_module(_MODULE).register_module_forward_pre_hook(self._forward)

    def go_on(self) -> None:
        """See that a copy was made, or woken."""
        import_module(_OPTIMIZER).register_optimizer_step_post_hook(self._committed)

    def _known(self) -> bool:
        """Begin with the first moment of a step; false: this is no training of such a script."""
        if self._plan is None or self._is_guarded():
            return False
        if self._trace is None:
            env = RankEnv.read(os.environ)
            self._attempt = env.attempt
            self._injector = FaultInjector.of(self._plan, env, is_threaded=False)
            self._trace = TrainingTrace(self._plan, env)
            atexit.register(self._ended)
        return True

    def _tell(self, phase: Phase, step: int) -> None:
        if self._injector is not None:
            self._injector.phase_begins(phase, step)

    def _forward(self, _module: Any, _args: Any) -> None:
        if not self._is_in_step and self._known():
            self._is_in_step = True
            self._tell(Phase.FORWARD, self._step + 1)

    def _updating(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._known():
            return
        if not self._modules:
            kind = sys.modules["torch"].nn.Module
            self._modules = [each for each in gc.get_objects() if issubclass(type(each), kind)]
            self._unused = _drawn()
        self._optimizers[id(optimizer)] = optimizer
        self._tell(Phase.BACKWARD, self._step + 1)  # it is just over
        self._tell(Phase.UPDATE, self._step + 1)

    def _updated(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._known():
            self._tell(Phase.UPDATED, self._step + 1)
            self._step += 1

    def _committed(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._known():
            return
        attempt = RankEnv.read(os.environ).attempt
        observers: tuple[StepObserver | None, ...] = (self._injector, self._trace)
        if attempt != self._attempt:  # this is a copy that was woken
            self._attempt = attempt
            if self._injector is not None:
                self._injector.attempt_begins(attempt)
            if self._trace is not None:
                self._trace.woken(attempt)
        else:
            for observer in observers:
                if observer is not None:
                    observer.committed(self._step)
        self._is_in_step = False
        self._tell(Phase.DATA, self._step + 1)

    def _ended(self) -> None:
        if self._trace is not None:
            self._trace.training_ended(self._step, self._weights(), self._private())

    def _weights(self) -> str:
        """Parameters and the optimizers' state."""
        digest = hashlib.sha256()
        for optimizer in self._optimizers.values():
            for each in (each for group in optimizer.param_groups for each in group["params"]):
                digest.update(_bytes(each))
                for name, value in sorted(optimizer.state.get(each, {}).items()):
                    digest.update(name.encode())
                    digest.update(_bytes(value))
        return digest.hexdigest()

    def _private(self) -> str:
        """Buffers, in no order of their own, and random numbers."""
        found = {
            hashlib.sha256(_bytes(each)).hexdigest()
            for module in self._modules
            for each in getattr(module, "_buffers", {}).values()
            if each is not None
        }
        digest = hashlib.sha256("".join(sorted(found)).encode())
        digest.update(_bytes(sys.modules["torch"].get_rng_state()))
        for name, state in _drawn().items():
            if state != self._unused.get(name):  # else nobody has seeded or used it
                digest.update(state.encode())
        return digest.hexdigest()


def _drawn() -> dict[str, str]:
    """How far the generators are that Python and numpy seed anew in each process."""
    kinds = {"random": "getstate", "numpy.random": "get_state"}
    known = {name: call for name, call in kinds.items() if name in sys.modules}
    return {name: repr(getattr(sys.modules[name], call)()) for name, call in known.items()}


def _bytes(value: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())
