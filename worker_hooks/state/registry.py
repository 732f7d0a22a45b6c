"""What the script registered, as pieces: one per object, each under a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from worker_hooks.state.module import ModulePiece
from worker_hooks.state.optimizer import OptimizerPiece
from worker_hooks.state.scaler import ScalerPiece
from worker_hooks.state.scheduler import SchedulerPiece
from worker_hooks.state.snapshot import tensors_in, version
from worker_hooks.state.stateful import ObjectPiece
from worker_hooks.state.tensor import TensorPiece
from worker_hooks.tensors import placements, state_json
from worker_hooks.tensors.part_versions import PartVersions
from worker_hooks.tensors.placements import Box, is_distributed, is_zero, part_of, updating
from worker_hooks.tensors.state_json import Json

WITHIN = (
    "{0} has a DTensor in its state_dict, of which nothing can be put back: give TrainState these "
    "tensors themselves, in a list or a dict, as {0}=[...], and the rest of it as another object"
)


class Piece(Protocol):
    """One registered object. Names of its tensors begin with its own name."""

    name: str

    @property
    def is_compared(self) -> bool:
        """Whether replicas that differ in it are broken."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules in it, without their wrappers."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers whose updates change it."""

    def tensors(self) -> dict[str, Tensor]:
        """Large state in live memory: whole between a commit and the next update."""

    def snapshot(self) -> Any:
        """A copy of the small state; fast enough for every commit."""

    def marks(self) -> Any:
        """A value that differs after the piece was changed."""

    def encode(self, snapshot: Any) -> tuple[Json, dict[str, Tensor]]:
        """A snapshot as JSON and small tensors."""

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:
        """Why this cannot be restored, as text; only names, shapes and dtypes are compared."""

    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put everything back, bit for bit. Each tensor is read once and not kept."""


class CommitPlaces(Protocol):
    """Notes where commits lie in this process's memory, which outlives it."""

    keeper: int
    board: int
    is_over: bool
    """Set by any thread: the next commit is to :meth:`end` it."""

    def end(self) -> None:
        """Nobody will read what this process leaves."""

    def update_begins(self) -> None:
        """Live memory is not as of the newest commit any more."""

    def commit_begins(self, step: int) -> None:
        """Copies of an older commit are about to be overwritten."""

    def note(self, state: Any, commit: Any, private: Any) -> None:
        """A :class:`Commit` of a :class:`CommittedState` is made, or has more copies.

        ``private``: what belongs to it of the private state, as :data:`PrivateParts`.
        """

    def forget(self) -> None:
        """There is no commit any more."""


def pieces_of(objects: Mapping[str, object]) -> tuple[Piece, ...]:
    """Make pieces of registered objects.

    Args:
        objects: by name a module, optimizer, scheduler, scaler, tensor, anything with
            ``state_dict`` and ``load_state_dict``, or a list, tuple or dict of those, which are
            then named ``model.0`` or ``model.gen``. ``None`` is ignored.

    Raises:
        TypeError: an object cannot be saved and restored; the message names it.
        ValueError: two objects would be saved under one name.
    """
    pieces = tuple(piece for name, thing in objects.items() for piece in _pieces(name, thing))
    for each in pieces:
        if isinstance(each, OptimizerPiece):
            each.name_parameters = functools.partial(_parameter_names, pieces)
    seen: set[str] = set()
    for piece in pieces:
        names = {piece.name, *_tried(piece)}
        if shared := seen & names:
            raise ValueError(f"two registered objects would both be saved as {min(shared)}")
        seen |= names
    return pieces


def structures(pieces: Iterable[Piece]) -> dict[str, object]:
    """By piece, what a script may change in training so that a saved state fits no more."""
    found = (each for each in pieces if isinstance(each, ModulePiece | OptimizerPiece))
    return {piece.name: piece.structure() for piece in found}


def restore_alike(
    piece: Piece, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], value: Json
) -> None:
    """Put back what a piece has already, as the script has yet to make the rest.

    Args:
        piece: one that does not fit.
        tensors: the saved ones, of all pieces.
        like: those of this piece, without data.
    """
    match piece:
        case ModulePiece():
            piece.restore_alike(tensors, like)
        case OptimizerPiece():
            piece.restore_alike(tensors, value)


def live_tensors(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """All registered tensors in live memory by name, in a fixed order.

    Parameters, tensors of optimizers' states (none before the first update), registered tensors,
    and the tensors of large registered objects. Not modules' buffers, which are the rank's own.
    """
    return {name: each for piece in pieces for name, each in piece.tensors().items()}


def as_now(piece: Piece, value: Json, shape_of: Callable[[str], tuple[int, ...]]) -> Json:
    """A piece's saved value: an optimizer's with its parameters in the order of this process, and
    with this rank's parts of distributed tensors.

    Args:
        value: its state as JSON, as another rank saved it, perhaps.
        shape_of: returns the shape of a whole saved tensor.
    """
    return piece.as_now(value, shape_of) if isinstance(piece, OptimizerPiece) else value


def scripts_tensors(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The same as the script has them: a distributed parameter, not this rank's part of it."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        match piece:
            case ModulePiece():
                found |= piece.parameters()
            case TensorPiece():
                found[piece.name] = piece.tensor
            case _:
                found |= piece.tensors()
    return found


def is_told_by_tensors(piece: Piece) -> bool:
    """Whether its tensors and a snapshot are all that its state depends on."""
    return not isinstance(piece, OptimizerPiece) or piece.is_all_tensors


def boxes_of(piece: Piece, value: Json) -> dict[str, Box]:
    """Of a piece's tensors that are this rank's part of a distributed one: which part.

    Raises:
        TypeError: such a part cannot be saved.
    """
    if isinstance(piece, TensorPiece):
        return piece.boxes()
    parameters = piece.boxes() if isinstance(piece, ModulePiece) else {}
    return parameters | state_json.boxes_in(value)


def updated_tensors(pieces: Iterable[Piece]) -> Iterator[Tensor]:
    """What the updates of the registered optimizers change: parameters, and their states."""
    for optimizer in (each for piece in pieces for each in piece.optimizers):
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from tensors_in(list(updating(optimizer).state.values()))


def cut_of(pieces: Sequence[Piece]) -> tuple[dict[int, list[Tensor]], PartVersions]:
    """The parts of distributed tensors that updates change, by the index of the piece that makes
    these, and all registered such tensors.
    """
    updated = [list(updated_tensors([piece])) for piece in pieces]
    every = [*scripts_tensors(pieces).values(), *chain.from_iterable(updated)]
    parts = {index: placements.cut(each).parts for index, each in enumerate(updated)}
    found = {index: each for index, each in parts.items() if each}
    return found, PartVersions(placements.cut(every))


def named_objects(pieces: Iterable[Piece]) -> Iterator[tuple[str, object]]:
    """All registered modules and optimizers, with the names of their pieces."""
    for piece in pieces:
        found = [*piece.modules, *piece.optimizers]
        for number, each in enumerate(found):
            yield (f"{piece.name}.{number}" if len(found) > 1 else piece.name), each


def saved_state(pieces: Iterable[Piece], name: str) -> Any:
    """What is saved of a registered object; ``None``: nothing is registered under this name.

    Modules, tensors and scalers are read where they lie, so there is nothing to look into.
    """
    piece = next((each for each in pieces if each.name == name), None)
    match piece:
        case ObjectPiece():
            return piece.held.state
        case OptimizerPiece():
            return [piece.tensors(), piece.snapshot()]
        case SchedulerPiece():
            return piece.snapshot()
    return None if piece is None else {}


def labels(pieces: Iterable[Piece]) -> dict[str, str]:
    """Names of optimizers' tensors with the names of their parameters in place of an index."""
    found: dict[str, str] = {}
    for piece in pieces:
        if isinstance(piece, OptimizerPiece):
            names, prefix = piece.names(), f"{piece.name}.state."
            for name in piece.tensors():
                index, _, key = name.removeprefix(prefix).partition(".")
                if name.startswith(prefix) and index.isdecimal() and int(index) < len(names):
                    found[name] = f"{prefix}{names[int(index)]}.{key}"
    return found


def names_between_loops(pieces: Iterable[Piece]) -> tuple[set[str], set[str]]:
    """The names of all tensors that may be saved from copies, and those of weights and averages.

    An optimizer's state that has more than tensors is read as it is, and must fit these.
    """
    names: set[str] = set()
    weights: set[str] = set()
    for piece in pieces:
        if not isinstance(piece, OptimizerPiece):
            weights.update(piece.tensors())
        elif piece.is_all_tensors:
            names.update(piece.tensors())
    return names | weights, weights


def gradients_of(piece: Piece) -> list[int]:
    """What differs once a backward has added to the gradients that a piece's optimizer uses."""
    found: list[int] = []
    for optimizer in piece.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found += id(parameter.grad), version(part_of(parameter.grad))
    return found


def _parameter_names(pieces: Iterable[Piece]) -> dict[int, str]:
    """The names of registered parameters and tensors by their ``id``; of a shared one the first."""
    found: dict[int, str] = {}
    named = (each for each in pieces if isinstance(each, ModulePiece | TensorPiece))
    for name, tensor in scripts_tensors(named).items():
        found.setdefault(id(tensor), name)
    return found


def _pieces(name: str, thing: object) -> Iterator[Piece]:
    match thing:
        case None:
            pass
        case dict():
            for key, each in thing.items():
                yield from _pieces(f"{name}.{key}", each)
        case list() | tuple():
            for index, each in enumerate(thing):
                yield from _pieces(f"{name}.{index}", each)
        case _:
            yield _piece(name, thing)


def _piece(name: str, thing: Any) -> Piece:
    match thing:
        case nn.Module():
            return ModulePiece(name, thing)
        case Tensor():
            return TensorPiece(name, thing)
        case Optimizer() if _is_torchs(thing, Optimizer) or is_zero(thing):
            return _optimizer(name, thing)
        case LRScheduler():
            return SchedulerPiece(name, thing)
        case GradScaler() if _is_torchs(thing, GradScaler):
            return ScalerPiece(name, thing)
    ways = (getattr(thing, each, None) for each in ("state_dict", "load_state_dict"))
    if not isinstance(thing, type) and all(map(callable, ways)):
        return ObjectPiece(name, thing)
    raise TypeError(
        f"{name} is of type {type(thing).__qualname__} and cannot be saved: give a module, an "
        "optimizer, a tensor, what has state_dict and load_state_dict, or a list or dict of those"
    )


def _optimizer(name: str, optimizer: Optimizer) -> OptimizerPiece:
    try:
        return OptimizerPiece(name, optimizer)
    except TypeError as error:
        raise TypeError(f"{name} cannot be saved: {error}") from None


def _is_torchs(thing: Any, kind: type) -> bool:
    """Whether the object's class does not override how torch saves its state."""
    mine: Any = type(thing)
    ours: Any = kind
    return (mine.state_dict, mine.load_state_dict) == (ours.state_dict, ours.load_state_dict)


def _tried(piece: Piece) -> dict[str, Tensor]:
    """The tensors of the piece's present state: what cannot be saved is refused now.

    Raises:
        TypeError: something cannot be saved.
    """
    try:
        snapshot = piece.snapshot()
        is_object = isinstance(piece, ObjectPiece) and not piece.optimizers
        if not (is_object and any(map(is_distributed, tensors_in(snapshot.state)))):
            return piece.encode(snapshot)[1] | piece.tensors()
    except TypeError:
        raise
    except Exception as error:
        raise TypeError(f"{piece.name} cannot be saved: reading its state: {error!r}") from error
    raise TypeError(WITHIN.format(piece.name))
