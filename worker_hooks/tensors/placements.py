"""Where a rank's part of a distributed tensor lies in the whole one: what torch's DTensor and FSDP
know of it. Nothing else in this package knows them, but how DTensor is told to count changes
(:mod:`part_versions`).

A rank's part is a *box*: consecutive indices in each dimension. It follows from the tensor's
placements, so nobody is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LOCAL = attrgetter("_local_tensor")

Spans = list[tuple[int, int]]
"""Indices of one dimension: of each consecutive part the first, and the one behind the last."""


class Box(NamedTuple):
    """The part of a tensor that a rank has."""

    whole: tuple[int, ...]  # the shape of the tensor of which it is a part
    offset: tuple[int, ...]  # of its first element there
    size: tuple[int, ...]  # its own shape


class Distributed(NamedTuple):
    """The distributed tensors among some, and what tells whether their parts are still the same."""

    tensors: list[Any]
    parts: list[Tensor]

    def are_same(self) -> bool:
        """Whether each of them still keeps its part in the same tensor: FSDP may pad it anew."""
        return all(map(is_, map(_LOCAL, self.tensors), self.parts))


class SavedPlacements(NamedTuple):
    """What makes a distributed tensor of a rank's part again; as JSON a list."""

    shape: list[int]  # of the whole tensor
    offset: list[int]  # of the part
    size: list[int]  # its own shape
    stride: list[int]  # of the whole tensor
    placements: list[list[Any]]  # each a kind, its dimension and its split factor


class SavedPart(NamedTuple):
    """The part of a distributed tensor that was saved."""

    tensor: Tensor
    saved: SavedPlacements


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor, of which this rank has a part."""
    api = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return api is not None and isinstance(tensor, api.DTensor)


_flat: Any = None  # by parameter of FSDP's first version: this rank's part; None: there is none


def is_cut(tensor: object) -> bool:
    """Whether this rank's part of it is another tensor, in which torch counts no changes."""
    return is_distributed(tensor) or (_flat is not None and tensor in _flat)


def part_of(tensor: Tensor) -> Tensor:
    """The part that this rank has of a tensor that is cut; any other one as it is."""
    if is_distributed(tensor):
        local: Tensor = _LOCAL(tensor)
        return local
    part: Tensor = tensor if _flat is None else _flat.get(tensor, tensor)
    return part


def distributed(values: Iterable[object]) -> Distributed:
    """Those of some tensors and other values that are distributed."""
    every: list[Any] = [each for each in values if is_distributed(each)]
    found = [each for each in every if not each.is_inference()]  # the others have no version
    return Distributed(found, list(map(_LOCAL, found)))


def cut(values: Iterable[object]) -> Distributed:
    """Those of some tensors and other values that are cut."""
    every: list[Any] = [each for each in values if is_cut(each)]
    found = [each for each in every if not each.is_inference()]
    return Distributed(found, list(map(part_of, found)))


LOCALIZED = (
    "tensor {!r} cannot be saved: torch's _pre_dp_module_transform takes it out of its module in "
    "the first forward, and leaves it out (use torch's replicate() in place of it and of "
    "DistributedDataParallel)"
)


def box_of(name: str, tensor: Tensor) -> Box | None:
    """The part that this rank has; ``None``: the tensor is not distributed.

    Raises:
        TypeError: its elements are not the same on all ranks that have them, or no box; the message
            names it.
    """
    if not is_distributed(tensor):
        if hasattr(tensor, "_st_info"):
            raise TypeError(LOCALIZED.format(name))
        return None
    each: Any = tensor
    coordinate = each.device_mesh.get_coordinate()
    if coordinate is None:
        raise TypeError(f"tensor {name!r} cannot be saved: this rank is outside of its mesh")
    for placement in each.placements:
        if placement.is_partial():
            raise TypeError(f"tensor {name!r} cannot be saved: it is a sum that is not complete")
    shape = tuple(each.shape)
    spans = spans_of(shape, tuple(each.device_mesh.shape), coordinate, each.placements)
    box = _box(shape, spans)
    if box.size != tuple(_LOCAL(each).shape) or any(len(one) != 1 for one in spans):
        raise TypeError(
            f"tensor {name!r} cannot be saved: the placements {tuple(each.placements)} of "
            f"{list(shape)} give this rank no consecutive rows"
        )
    return box


def boxes_by_rank(tensor: Any) -> dict[int, Box]:
    """The parts of a distributed tensor that all ranks of its mesh have, by rank.

    If the mesh is a part of another one, along some of its dimensions, those of all ranks there.
    """
    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    root, dims = mesh, [*range(mesh.ndim)]
    if names := mesh.mesh_dim_names:
        larger = getattr(mesh, "_get_root_mesh", lambda: mesh)()
        if {*names} <= {*(larger.mesh_dim_names or ())}:
            root, dims = larger, [larger.mesh_dim_names.index(name) for name in names]
    found = {}
    for place in product(*map(range, root.mesh.shape)):
        coordinate = [place[dim] for dim in dims]
        spans = spans_of(whole, tuple(mesh.shape), coordinate, tensor.placements)
        found[int(root.mesh[place])] = _box(whole, spans)
    return found


def _box(whole: tuple[int, ...], spans: list[Spans]) -> Box:
    size = tuple(sum(stop - start for start, stop in one) for one in spans)
    return Box(whole, tuple(one[0][0] for one in spans), size)


def spans_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> list[Spans]:
    """Which indices of a tensor's dimensions a place in a mesh has. Pure.

    Args:
        mesh_shape: how many ranks each dimension of the mesh has.
        placements: what torch's DTensor says of each dimension of the mesh.

    Returns:
        For each dimension of the tensor at least one span, which may be empty.
    """
    found: list[Spans] = [[(0, size)] for size in shape]
    for count, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is None:  # replicated
            continue
        # FSDP over tensor parallelism cuts each part of the latter, which comes first
        parts = _chunks(found[dim], getattr(placement, "split_factor", 1))
        found[dim] = _joined([span for part in parts for span in _chunks(part, count)[at]])
    return found


def _chunks(spans: Spans, count: int) -> list[Spans]:
    """As ``torch.chunk``; those that it leaves out are empty."""
    total = sum(stop - start for start, stop in spans)
    size = -(-total // count)
    edges = [min(size * index, total) for index in range(count + 1)]
    return [_between(spans, start, stop) for start, stop in pairwise(edges)]


def _between(spans: Spans, start: int, stop: int) -> Spans:
    """A part of what these spans are, one after the other."""
    found, at = [], 0
    for first, last in spans:
        begin, end = max(first, first + start - at), min(last, first + stop - at)
        if begin < end:
            found.append((begin, end))
        at += last - first
    if not found:  # as torch says where nothing is
        end = spans[-1][1]
        found = [(end, end)]
    return found


def _joined(spans: Spans) -> Spans:
    """Adjacent ones as one; without those that are empty, unless all are."""
    full = [span for span in spans if span[0] < span[1]] or spans[:1]
    found = full[:1]
    for start, stop in full[1:]:
        if start == found[-1][1]:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


class ManagedParameter(NamedTuple):
    """A parameter that FSDP takes out of its module for the time of a step."""

    holder: dict[str, Any]  # in which FSDP keeps it itself, or this rank's part of it,
    key: str  # under this key
    held: Any  # and what was there; ``None``: nothing yet
    tensor: Tensor
    mesh_dims: int = 0  # how many dimensions of its mesh are FSDP's; 0: it is no DTensor

    @property
    def is_taken_out(self) -> bool:
        """Whether it may be in no module at all within a step."""
        return not self.mesh_dims


def _of_fsdp(kind: str, modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The modules inside of these that are of a class of FSDP's; none, if nobody imported it."""
    api = sys.modules.get("torch.distributed.fsdp")
    if api is not None:
        for module in modules:
            yield from (one for one in module.modules() if isinstance(one, getattr(api, kind)))


def managed(module: nn.Module) -> Mapping[tuple[int, str], ManagedParameter]:
    """What FSDP has taken over, by the module's ``id`` and the parameter's name there.

    Inside a step the modules hold the whole parameters instead, or those of another step.

    Raises:
        TypeError: this version of torch keeps them elsewhere.
    """
    found: dict[tuple[int, str], ManagedParameter] = {}
    for inside in _of_fsdp("FullyShardedDataParallel", [module]):
        found.update(_flattened_by(inside))
    try:
        for inside in _of_fsdp("FSDPModule", [module]):
            found.update(_taken_by(inside))
    except AttributeError as error:
        raise TypeError(
            f"what FSDP has cut cannot be saved with torch {torch.__version__}: {error}"
        ) from error
    return found


def _taken_by(inside: Any) -> Iterator[tuple[tuple[int, str], ManagedParameter]]:
    for group in inside._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001  torch has no public ones
        for each in group.fsdp_params:
            info = each._module_info  # noqa: SLF001  the same
            held, ndim = each.sharded_param, each.mesh_info.mesh.ndim
            one = ManagedParameter(vars(each), "sharded_param", held, held, ndim)
            owners = [info.module, *info.shared_modules]
            keys = [info.param_name, *info.shared_param_names]
            for owner, key in zip(owners, keys, strict=True):
                yield (id(owner), key), one


def _flattened_by(inside: Any) -> dict[tuple[int, str], ManagedParameter]:
    """What FSDP's first version has taken over; nothing, if this torch keeps it elsewhere.

    Within a step it gives each parameter the memory of the whole one, or takes it out of its
    module. The rank's part stays where it was: a second tensor there is made at rest, and kept.
    """
    handle = getattr(inside, "_handle", None)
    try:
        if handle is None or not handle.uses_sharded_strategy:
            return {}
        flat = handle.flat_param
        local = getattr(flat, "_local_shard", None)  # none before the first step, which makes it
        places = _places_of(handle)
        at_rest = local is None or handle.is_sharded(flat)
        if not all(_keep_part(one, local, at_rest=at_rest) for one in places.values()):
            return {}
    except (AttributeError, KeyError):
        return {}
    held = vars(flat), "_local_shard", local
    return {place: ManagedParameter(*held, one) for place, one in places.items()}


def _places_of(handle: Any) -> dict[tuple[int, str], Tensor]:
    """The parameters of one of FSDP's flat parameters, or that one, by module and name there."""
    flat = handle.flat_param
    if not handle._use_orig_params:  # noqa: SLF001  torch has no public ones
        owner = handle._fully_sharded_module  # noqa: SLF001
        return {(id(owner), key): one for key, one in owner._parameters.items() if one is flat}  # noqa: SLF001
    pairs = zip(flat._param_infos, flat._params, strict=True)  # noqa: SLF001
    found = {(id(info.module), info.param_name): one for info, one in pairs}
    for one in flat._shared_param_infos:  # noqa: SLF001
        first = id(one.prim_module), one.prim_param_name
        found[id(one.module), one.param_name] = found[first]
    return found


def _keep_part(parameter: Any, local: Tensor | None, *, at_rest: bool) -> bool:
    """Whether the rank's part of a parameter is known; it is found at rest, where it is all."""
    global _flat  # noqa: PLW0603
    if _flat is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _flat = WeakIdKeyDictionary()
    part = _flat.get(parameter)
    if part is not None and (local is None or _share(part, local)):
        return True
    if at_rest:
        _flat[parameter] = parameter.data
    return at_rest


def _share(part: Tensor, local: Tensor) -> bool:
    """Whether a part is one of this memory; the empty one is of none."""
    there = local.untyped_storage().data_ptr()
    return not part.numel() or part.untyped_storage().data_ptr() == there


def fsdp_dims(module: nn.Module) -> dict[int, int]:
    """How many dimensions of its mesh are FSDP's, by the ``id`` of each parameter that it has cut.

    They come first; those behind them cut the parameter for its layer.
    """
    return {id(one.tensor): one.mesh_dims for one in managed(module).values() if one.mesh_dims}


GATHERED = (
    "the script uses FullyShardedDataParallel, whose parameters cannot be read within a step with "
    "this version of torch (those of fully_shard can)"
)

HELD_GROUP = "uses FullyShardedDataParallel, which keeps the process group that it was made with"


def why_gathered(modules: Iterable[nn.Module]) -> str:
    """Why the parameters can be read between steps only; empty: at any time.

    FSDP's first version exchanges the memory of a parameter, or the parameter itself, for that of
    the whole one, and back, as a forward or backward comes to it.
    """
    for each in _of_fsdp("FullyShardedDataParallel", modules):
        handle = getattr(each, "_handle", each)  # none: it has no parameters of its own
        is_cut_there = handle is not None and getattr(handle, "uses_sharded_strategy", True)
        if is_cut_there and not _flattened_by(each):
            return GATHERED
    return ""


def why_group_held(modules: Iterable[nn.Module]) -> str:
    """Why the process group of these cannot be exchanged for another one; empty: it can."""
    return HELD_GROUP if any(_of_fsdp("FullyShardedDataParallel", modules)) else ""


ZERO_IN_BACKWARD = (
    "ZeroRedundancyOptimizer with overlap_with_ddp=True updates amid backward, where msrun cannot "
    "tell whole state from torn: leave overlap_with_ddp out"
)

TRAINED_BY_ZERO = (
    "the model is trained by a ZeroRedundancyOptimizer that is not registered, and other ranks "
    "lack what each keeps in it (register it: TrainState(optimizer=...))"
)


def is_zero(optimizer: object) -> bool:
    """Whether it is torch's optimizer that cuts its state over the ranks."""
    api = sys.modules.get("torch.distributed.optim")
    return isinstance(optimizer, getattr(api, "ZeroRedundancyOptimizer", ()))


def updating(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: the one inside of ZeroRedundancyOptimizer.

    Raises:
        TypeError: it updates amid backward.
    """
    if not is_zero(optimizer):
        return optimizer
    inside = getattr(optimizer, "optim", None)
    if not isinstance(inside, Optimizer):  # a functional one, made later
        raise TypeError(ZERO_IN_BACKWARD)
    return inside


def why_no_iteration_drop(modules: Iterable[nn.Module]) -> str:
    """Why :func:`drop_iteration` cannot be called; empty: it can."""
    for each in _of_fsdp("FSDPModule", modules):
        state = each._get_fsdp_state()  # noqa: SLF001  torch has no public ones
        is_known = hasattr(state, "_is_root") and hasattr(state, "_fsdp_param_groups")
        if not (is_known and hasattr(each, "reset_iter_state")):
            return f"uses FSDP of torch {torch.__version__}, which cannot forget a step"
    return ""


def drop_iteration(modules: Iterable[nn.Module]) -> None:
    """Have FSDP forget a step that was interrupted, and whatever gradients it has kept of it."""
    for each in dict.fromkeys(_of_fsdp("FSDPModule", modules)):
        state = each._get_fsdp_state()  # noqa: SLF001  torch has no public ones
        if state._is_root:  # noqa: SLF001  the only ones that can be asked
            each.reset_iter_state()
        for group in state._fsdp_param_groups:  # noqa: SLF001
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None


def save_placements(name: str, tensor: Any) -> SavedPlacements:
    """What :func:`restored` needs besides the rank's part.

    Raises:
        TypeError: as :func:`box_of`.
    """
    box = box_of(name, tensor)
    assert box is not None
    kinds = [
        [type(one).__name__, getattr(one, "dim", None), getattr(one, "split_factor", None)]
        for one in tensor.placements
    ]
    whole, offset, size = map(list, box)
    return SavedPlacements(whole, offset, size, list(tensor.stride()), kinds)


def is_of_mesh(saved: SavedPlacements, like: Any) -> bool:
    """Whether a saved part is what its placements give this rank on another tensor's mesh."""
    mesh = like.device_mesh
    if len(saved.placements) != mesh.ndim:
        return False
    spans = spans_of(saved.shape, mesh.shape, mesh.get_coordinate(), _placements(saved))
    found = [(one[0][0], one[0][1] - one[0][0]) for one in spans]
    return found == list(zip(saved.offset, saved.size, strict=True))


def restored(part: SavedPart, like: Any) -> Tensor:
    """A distributed tensor again. ``like``: a distributed tensor of the same mesh.

    Raises:
        ValueError: this version of torch does not know these placements.
    """
    from torch.distributed.tensor import DTensor

    tensor, saved = part
    whole: Tensor = DTensor.from_local(
        tensor,
        like.device_mesh,
        _placements(saved),
        run_check=False,
        shape=torch.Size(saved.shape),
        stride=tuple(saved.stride),
    )
    return whole


def _placements(saved: SavedPlacements) -> list[Any]:
    from torch.distributed.tensor import placement_types

    found = []
    for kind, dim, factor in saved.placements:
        make = getattr(placement_types, kind, None)
        if make is None:
            raise ValueError(f"torch knows no placement {kind}")
        named = {"dim": dim, "split_factor": factor}
        found.append(make(**{key: each for key, each in named.items() if each is not None}))
    return found
