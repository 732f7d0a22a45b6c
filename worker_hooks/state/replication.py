"""Measures what the ranks hold the same: a digest of each registered tensor, each small value.

Nobody says which objects are replicated. The agent compares what all ranks report after their first
commits, when the optimizers' state exists, and after every replacement; a rank never waits for the
answer. What comes into being later is reported when it does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from worker_hooks.contract.fingerprint import PART, UNSEEN, VALUE, bundled
from worker_hooks.device.side_stream import HOST, DeviceAccess
from worker_hooks.script.kept import ScriptValues
from worker_hooks.state.module import ModulePiece
from worker_hooks.state.optimizer import OptimizerPiece
from worker_hooks.state.registry import Piece, boxes_of, labels
from worker_hooks.state.scaler import ScalerPiece
from worker_hooks.state.scheduler import SchedulerPiece
from worker_hooks.tensors import state_json
from worker_hooks.tensors.device_digest import add_tensor
from worker_hooks.tensors.fast_digest import FastDigest
from worker_hooks.tensors.placements import TRAINED_BY_ZERO, Box, is_zero, part_of, updating
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.tensor_bytes import entry_of

log = logging.getLogger("msrun")

COMMITS = 2  # that are compared: with a warm-up from 0, the first update changes no weight
TOO_EARLY = "a large state on an accelerator is not known to be whole in its first steps"
EVERY = 1024  # steps; objects too large for each rank to keep its own are compared so often
LARGE = "large `{}` now, at steps 4, 8, 16 ... again; between them one may begin to differ unseen"
_TEXT = 48  # characters of a value that is sent as it is
_JUMP = 2.0  # a larger factor between two steps is said
_LEAVES = 40  # of a nested value that are sent each by itself

Report = Callable[[int, Mapping[str, str], bool, str, str, bool], None]
"""Takes the step, the fingerprint, whether it is of new parts only, why there is none, of what it
is, as text, and whether all was compared before."""

_KINDS = (
    (ModulePiece, "module"),
    (OptimizerPiece, "optimizer"),
    (SchedulerPiece, "scheduler"),
    (ScalerPiece, "scaler"),
    (object, "other object"),
)


class Replication:
    """Reports one rank's state for comparison, at its commits. For the main thread."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        report: Report,
        distrust: Callable[[str], None],
        own_values: Callable[[], Mapping[str, str]] = dict,
        script: ScriptValues | None = None,
        access: Callable[[], DeviceAccess] = lambda: HOST,
        unseen_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """Nothing is reported before the first commit.

        Args:
            report: sends it to the agent.
            distrust: takes the reason why no save of this state is ever worth anything.
            own_values: returns texts of values of the script's own that would be unknown if this
                rank died before its commit, unless they are equal on all ranks.
            script: what each rank keeps of its own.
            access: returns how accelerators are to be read.
            unseen_steps: returns how many steps more a death is not survived.
        """
        self._access = access
        self._unseen_steps = unseen_steps
        self._has_unseen = False  # and that was reported
        self._objects = [each for each in pieces if not each.is_compared]
        self._pieces = pieces
        self._own_values = own_values
        self._script = script or ScriptValues()
        self._report = report
        self._distrust = distrust
        self._optimizers = [each for piece in pieces for each in piece.optimizers]
        updated = {id(tensor) for tensor in self._updated()}
        self._registered = {
            name: tensor
            for piece in pieces
            if piece.modules
            for name, tensor in piece.tensors().items()
            if id(tensor) in updated
        }
        self._left = COMMITS
        self._size = 0  # how many parts the optimizers have
        self._known: set[str] = set()
        self._resumed_rates: list[float] = []  # until the next commit
        self._schedules = [each for each in pieces if isinstance(each, SchedulerPiece)]
        self._resumed_schedules: list[Any] = []
        self._watch_of_updates: RemovableHandle | None = None

    def resumed(self) -> None:
        """The state of a checkpoint is restored: the next commit shows what the script sets."""
        self._resumed_rates = self._rates()
        self._resumed_schedules = [each.marks() for each in self._schedules]

    def _rates(self) -> list[float]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        rates = [group.get("lr") for group in groups]  # one on a device would have to wait
        return [float(each) if isinstance(each, int | float) else math.nan for each in rates]

    def _look_for_jumps(self, step: int) -> None:
        then, self._resumed_rates = self._resumed_rates, []
        if [each.marks() for each in self._schedules] != self._resumed_schedules:
            return  # a registered schedule has set it, and it continues where it was
        for old, new in zip(then, self._rates(), strict=False):
            is_known = not (math.isnan(old) or math.isnan(new))
            if is_known and not min(old, new) * _JUMP >= max(old, new):
                log.warning(
                    "the learning rate was %g at the checkpoint and is %g at step %d: if the "
                    "script computes it from a count of its own, compute it from state.step",
                    *(old, new, step),
                )
                return

    def begin_again(self) -> None:
        """Another attempt: the next commits are compared in full."""
        self._left = COMMITS

    def training_begins(self, step: int, why: str) -> None:
        """The script has made its wrappers: report at once if they took the state away.

        ``why``: why the state cannot be saved for another reason; empty: there is none.
        """
        if problem := self._why_not_saved() or why:
            self._report(step, {}, False, problem, "", False)
        self._watch_updates(step)

    def _watch_updates(self, step: int) -> None:
        """Report before the first commit if an optimizer that is not saved trains the state.

        It is torch's ZeRO. Ranks look alike all the same, as they exchange what each has
        updated; only what comes after a death would be other weights.
        """
        modules = [module for piece in self._pieces for module in piece.modules]
        held = {id(each) for module in modules for each in module.parameters()}
        known = [each for piece in self._pieces for each in piece.optimizers]

        def updated(optimizer: Optimizer, *_: Any) -> None:
            groups = optimizer.param_groups if is_zero(optimizer) and optimizer not in known else ()
            if any(id(each) in held for group in groups for each in group["params"]):
                self._report(step, {}, False, TRAINED_BY_ZERO, "", False)
                self._distrust(TRAINED_BY_ZERO)

        self._end_watch()
        self._watch_of_updates = register_optimizer_step_post_hook(updated)

    def _end_watch(self) -> None:
        if self._watch_of_updates is not None:
            self._watch_of_updates.remove()
            self._watch_of_updates = None

    def _why_not_saved(self) -> str:
        held = {name: each for piece in self._pieces for name, each in piece.tensors().items()}
        present, updated = set(map(id, held.values())), set(map(id, self._updated()))
        for name, tensor in self._registered.items():
            if id(tensor) not in present and id(tensor) in updated:
                return f"{name} is replaced in the model, but not in the optimizer that was given"
        try:
            for name, tensor in held.items():
                entry_of(name, tensor)
        except TypeError as error:
            return str(error)
        return ""

    def _updated(self) -> list[Tensor]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        return [part_of(tensor) for group in groups for tensor in group["params"]]

    def committed(self, step: int, *, compares: bool = True) -> None:
        """A step is complete: report it if it is one of the first, or if parts are new.

        ``compares``: there are other ranks, and an agent that compares them.
        """
        if self._resumed_rates:
            self._look_for_jumps(step)
        if not compares:
            return
        if self._left or self._has_unseen:
            self._report_unseen(step)
        held = sum([len(updating(each).state) for each in self._optimizers])
        others = [each for each in self._objects if not self._script.keeps(each.name)]
        size = held + sum([len(each.param_groups) for each in self._optimizers]) + len(others)
        is_new = bool(self._left) or size != self._size
        is_again = not is_new and _is_look(step)
        if not (is_new or is_again or (self._objects and _is_sample(step))):
            return
        is_late, self._size = is_new and not self._left, size
        self._left = max(0, self._left - 1)
        if not self._left:
            self._end_watch()
        known = self._known if is_late else frozenset()
        is_all = is_new or is_again
        pieces = [each for each in self._pieces if each.is_compared] if is_all else []
        try:
            texts = fingerprint([*pieces, *others], known, self._access())
        except Exception as error:  # noqa: BLE001  the script's own kinds of tensors and objects
            self._report(step, {}, is_late, str(error) or repr(error), "", False)
            return
        self._known |= texts.keys()
        texts = {**bundled(texts, labels(self._pieces)), **self._own_values()}
        self._report(step, texts, is_late, "", "" if is_late else self._holds(), is_again)

    def _report_unseen(self, step: int) -> None:
        """Say until when a death is not survived, and once it is. Before the ranks are compared."""
        left = self._unseen_steps()
        if bool(left) != self._has_unseen:
            self._has_unseen = bool(left)
            until = str(step + left) if left else ""
            self._report(step, {f"{UNSEEN}{until}": ""}, True, TOO_EARLY, "", False)

    def _holds(self) -> str:
        """What is compared, for people: ``3 modules, 1 optimizer, 2 values of your own``.

        A rank keeps no large object of its own, so what holds of that is said.
        """
        counts: dict[str, int] = {}
        large = [each for each in self._objects if not self._script.keeps(each.name)]
        for piece in self._pieces:
            if piece in large:
                continue
            kind = next(name for kind, name in _KINDS if isinstance(piece, kind))
            counts[kind] = counts.get(kind, 0) + 1
        found = [f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items()]
        if own := self._script.count:
            found.append(f"{own} value{'s' * (own != 1)} of your own")
        found += [LARGE.format(each.name) for each in large]
        return ", ".join(found)


def _is_look(step: int) -> bool:
    """Whether all of the state is compared again: ranks may train apart behind a warm-up.

    Those that average what they hold do so at every eighth step, or every hundredth: these are
    steps of any remainder, 6, 11, 20, 37 and so on.
    """
    power = step.bit_length() - 1
    return power > 1 and step == (1 << power) + power


def _is_sample(step: int) -> bool:
    """Whether what may begin to differ by rank at any time is compared at this step."""
    return step & (step - 1) == 0 or step % EVERY == 0


def fingerprint(
    pieces: Sequence[Piece], known: Collection[str] = frozenset(), access: DeviceAccess = HOST
) -> dict[str, str]:
    """A text for each tensor and small value, but for those that are known already.

    ``access``: how accelerators are to be read.

    Raises:
        TypeError: a tensor cannot be saved, such as one that became a DTensor.
    """
    found: dict[str, str] = {}
    reader = Reader(access)
    for piece in pieces:
        value, small = piece.encode(piece.snapshot())
        boxes = boxes_of(piece, value)
        for name, tensor in {**piece.tensors(), **small}.items():
            if name not in known:
                found[name] = _digest(name, tensor, reader, boxes.get(name))
        if not known or piece.optimizers or not piece.is_compared:  # a group may be new
            value = state_json.without_places(value)  # the digests of parts cover theirs
            found = _values(piece.name, value) | found  # a tensor may have its piece's name
    return found


def _digest(name: str, tensor: Tensor, reader: Reader, box: Box | None) -> str:
    entry = entry_of(name, tensor)
    digest = FastDigest([entry.nbytes])
    add_tensor(digest, tensor, reader, lambda _: None)
    seed = hashlib.sha256(json.dumps([*entry[1:], *(box or ())]).encode()).hexdigest()
    return f"{PART if box else ''}{digest.digest(seed)[6:]}"


def _values(name: str, value: Any) -> dict[str, str]:
    """The leaves of a nested value, or of each of its parts that is too large a digest."""
    leaves = dict(_leaves(name, value))
    if len(leaves) <= _LEAVES:
        return {path: _text(leaf) for path, leaf in leaves.items()}
    if isinstance(value, dict) and name.count(".") < 3:  # noqa: PLR2004  levels
        found: dict[str, str] = {}
        for key, each in value.items():
            found |= _values(f"{name}.{key}", each)
        return found
    return {name: f"{VALUE}{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"}


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        pairs = [(f"{path}.{key}", each) for key, each in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{path}.{index}", each) for index, each in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for pair in pairs for leaf in _leaves(*pair)]


def _text(value: Any) -> str:
    text = json.dumps(value)
    return f"={text}" if len(text) <= _TEXT else f"{VALUE}{zlib.crc32(text.encode()):08x}"
