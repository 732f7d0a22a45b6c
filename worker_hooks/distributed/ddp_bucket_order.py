"""DistributedDataParallel after a resume: gradients are summed in the same order, bit for bit.

DDP reduces gradients in flat buckets, and in which order gloo and NCCL add up an element depends on
where it stands in its bucket. DDP learns in its first backward in which order gradients become
ready and lays its buckets out anew, once, before the forward that follows. So an undisturbed run
reduces with the new layout from its second step on, and a resumed process would reduce its first
step with the old one: other sums in the last bits.

The solution has two parts. During training, :func:`learn` reads the order from which the layout was
made; it is saved in the dump. After a resume, :func:`rehearse` makes the reducer lay its buckets
out from that order before its first step. Nothing is computed, reduced or hooked: the reducer is
made to believe that all gradients have been ready, and called to rebuild. As always it then takes
the layout that rank 0 broadcasts, and rank 0 broadcasts the recorded one.

The reducer's interface is private to torch. Where it is missing or does something else, which
:func:`learn` sees, nothing is promised. Not covered, each for one step after the resume:

* ``static_graph=True`` when resumed after step 1, or 2 with unused parameters (torch itself knows
  the order a step later);
* ``gradient_as_bucket_view=True`` with gradients that ``zero_grad(set_to_none=False)`` keeps, on a
  number of ranks that is no power of two (torch then divides instead of multiplying);
* a communication hook with a state of its own that the script does not save.
"""

# ruff: noqa: SLF001  this needs private parts of torch

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.distributed.module_flags import REDUCED

log = logging.getLogger("msrun")

_orders: WeakKeyDictionary[DistributedDataParallel, list[int]] = WeakKeyDictionary()
_settled: WeakSet[DistributedDataParallel] = WeakSet()  # those whose order is final
_warned: set[str] = set()


def find_all(
    modules: Iterable[nn.Module],
    among: Iterable[DistributedDataParallel] | None = None,
    *,
    is_over: bool = False,
) -> list[DistributedDataParallel]:
    """Every DDP that reduces gradients of these modules, in the order of their parameters.

    A DDP belongs to a module if they share a parameter: it may be the module, wrap it, or be a part
    of it, with any wrapper of ``torch.compile`` in between.

    Args:
        among: all DDPs; ``None``: search all objects of the process, which takes up to 20 ms.
        is_over: include those whose process group is gone.
    """
    places: dict[int, int] = {}  # by identity
    for module in modules:
        for parameter in module.parameters():
            places.setdefault(id(parameter), len(places))
    found: list[tuple[int, DistributedDataParallel]] = []
    for one in _living() if among is None else among:
        if is_over or (_is_alive(one) and not REDUCED.is_superseded(one)):
            shared = [places[id(p)] for p in one.parameters() if id(p) in places]
            if shared:
                found.append((min(shared), one))
    return [one for _, one in sorted(found, key=lambda each: each[0])]


def _living() -> Iterator[DistributedDataParallel]:
    kinds = _kinds(DistributedDataParallel)
    for thing in gc.get_referrers(*kinds):  # an object refers to its class
        if type(thing) in kinds:
            yield thing


def unhook(ddp: DistributedDataParallel) -> None:
    """Keep a DDP whose group is gone from reducing gradients, even if it is still referred to."""
    try:
        reducer: Any = ddp.reducer
        reducer._remove_autograd_hooks()
    except AttributeError as error:  # of a Python reducer, or of another version of torch
        log.warning("an earlier DDP stays hooked to its parameters: %s", error)


def learn(ddp: DistributedDataParallel) -> str:
    """See in which order gradients become ready. The main thread calls this at every commit.

    Once the order is final, usually after the third step, this costs a look-up (0.3 us). No other
    thread may call it: the reducer is locked while backward waits for a peer.

    Returns:
        Why the buckets could not be laid out so again, said once; empty: they can.
    """
    if ddp in _settled:
        return ""
    try:
        if _rebuilds(ddp):
            order = _rebuilt_order(ddp) if ddp._has_rebuilt_buckets else _first_order(ddp)
            if order is not None:
                _orders[ddp] = order
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _orders.pop(ddp, None)
        _settled.add(ddp)
        return f"DDP's buckets cannot be laid out again as they are ({error})"
    return ""


def is_settled(ddp: DistributedDataParallel) -> bool:
    """Whether the order is final, and nothing is left to :func:`learn`."""
    return ddp in _settled


def ready_order(ddp: DistributedDataParallel) -> list[int] | None:
    """Indices of the reducer's parameters in the order from which its next layout follows.

    As of the last :func:`learn`; any thread may call this. ``None``: the next step uses the layout
    that DDP starts with, or torch does not tell.
    """
    return _orders.get(ddp)


def rehearse(ddp: DistributedDataParallel, order: Sequence[int] | None) -> bool:
    """Lay the buckets out as they were; return whether that was done.

    A collective of the DDP's group: every rank calls it with the same order, before the first step
    after a resume. Parameters, gradients, buffers, generators and hooks are not touched.

    Args:
        ddp: not trained yet in this process.
        order: what :func:`ready_order` returned at the step from which training resumes.

    Raises:
        RuntimeError: a peer is gone, as in any collective.
    """
    try:
        if not _rebuilds(ddp) or ddp._has_rebuilt_buckets:
            return False
        if order is None:
            return _give_up("no order of gradients was recorded")
        reducer: Any = ddp.reducer
        push, rebuild = reducer._push_all_rebuilt_params, reducer._rebuild_buckets
        enter = reducer._update_process_group
        prompter = _prompter(ddp.process_group, _layout(ddp, order))
    except (AttributeError, TypeError, ValueError) as error:
        return _give_up(str(error))
    push()
    enter(prompter)
    try:
        done = bool(rebuild())
    finally:
        enter(ddp.process_group)
    if done:
        ddp._has_rebuilt_buckets = True  # as DDP itself sets it
        _orders[ddp] = list(order)
        _settled.add(ddp)
    return done


def _prompter(group: dist.ProcessGroup, layout: list[list[int]]) -> dist.ProcessGroup:
    """A process group that broadcasts ``layout`` when the reducer broadcasts one.

    The reducer broadcasts two tensors from rank 0: all indices and then the count of buckets; and
    the buckets' sizes.
    """
    indices = [index for bucket in layout for index in bucket]
    said = iter(([*indices, len(layout)], [len(bucket) for bucket in layout]))

    class Prompter(dist.ProcessGroup):  # the only way to implement one in torch
        def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
            if group.rank() == 0:
                tensors[0].copy_(tensors[0].new_tensor(next(said)))
            return group.broadcast(tensors, options)

    return Prompter(group.rank(), group.size())  # type: ignore[call-arg]  # its stub lacks this signature


def _layout(ddp: DistributedDataParallel, order: Sequence[int]) -> list[list[int]]:
    """The buckets that the reducer makes of gradients that become ready in this order."""
    private: Any = ddp
    parameters, is_sparse = _reduced(ddp, len(order))
    if sorted(order) != list(range(len(parameters))):
        raise ValueError(f"it reduces {len(parameters)} parameters, {len(order)} were recorded")
    has_default = private.bucket_bytes_cap_default  # then the first bucket is smaller
    small: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    first = small if has_default else private.bucket_bytes_cap
    # the list is new in torch 2.13
    limits = getattr(private, "bucket_bytes_cap_list", ()) or (first, private.bucket_bytes_cap)
    is_last_small = _is_last_small()
    order = order[::-1] if is_last_small else order
    buckets: list[list[int]] = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        [parameters[index] for index in order], list(limits), is_sparse, list(order)
    )[0]
    return buckets[::-1] if is_last_small else buckets


def _reduced(ddp: DistributedDataParallel, count: int) -> tuple[list[Tensor], list[bool]]:
    """The parameters that the reducer has, and of each whether its gradient is sparse.

    DDP chose those that wanted a gradient when it was made. If that is another count by now, all of
    them may want none for a while: a GAN's discriminator, while the generator is trained.
    """
    private: Any = ddp
    found: tuple[list[Tensor], list[bool]] = private._build_params_for_reducer()
    if len(found[0]) == count:
        return found
    idle = [
        p for p in ddp.module.parameters() if not p.requires_grad and REDUCED.wanted(p) is not False
    ]
    try:
        for each in idle:
            each.requires_grad_(True)
        found = private._build_params_for_reducer()
    finally:
        for each in idle:
            each.requires_grad_(False)
    return found


def _first_order(ddp: DistributedDataParallel) -> list[int] | None:
    """By the times of the first backward; ``None``: there was none that reduced everything."""
    times: list[int] = ddp.reducer.get_backward_stats()
    if not times or min(times) <= 0:
        return None
    if ddp.static_graph and _facts(ddp)["unused_parameter_size"]:
        return None  # they were reduced first and will be last, and torch does not name them
    return sorted(range(len(times)), key=times.__getitem__)


def _rebuilt_order(ddp: DistributedDataParallel) -> list[int] | None:
    """By torch's log, which has the layout after the forward that follows its making."""
    facts = _facts(ddp)
    text = facts.get("rebuilt_per_bucket_param_indices")
    if text:
        buckets = [[int(word) for word in bucket.split()] for bucket in text.split(",")]
        layout = buckets
        if _is_last_small():
            buckets = [bucket[::-1] for bucket in buckets]
        order = [index for bucket in buckets for index in bucket]
        if sorted(_layout(ddp, order)) != sorted(layout):
            raise ValueError("this torch lays them out by another rule")
        _settled.add(ddp)
        return order
    text = facts["prev_iteration_grad_ready_order_indices"]
    # Of a parameter that was ready several times (in a static graph) the last time counts.
    order = list(dict.fromkeys(int(word) for word in reversed(text.split(","))))[::-1]
    missing = set(range(int(facts["num_parameter_tensors"]))).difference(order)
    return order + sorted(missing)


def _facts(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What torch logs of a DDP; its forward updates it."""
    facts: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return facts


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether this DDP rebuilds its buckets at all, and all ranks make the same steps."""
    if ddp._use_python_reducer or ddp._join_config.enable or ddp._delay_all_reduce_all_params:
        return False
    return ddp.static_graph or not ddp.find_unused_parameters


def _is_last_small() -> bool:
    """Torch's switch: fill the buckets from the end of the order, so that the last one is small."""
    return os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"


def _kinds(kind: type) -> set[type]:
    """A class and all its subclasses."""
    kinds: Iterable[set[type]] = map(_kinds, kind.__subclasses__())
    return {kind}.union(*kinds)


def _is_alive(ddp: DistributedDataParallel) -> bool:
    """Whether its group still exists; an earlier DDP may await garbage collection."""
    try:
        dist.get_process_group_ranks(ddp.process_group)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return False
    return True


def _give_up(reason: str) -> bool:
    """Warn once for each reason that the promise is not kept; always false."""
    if reason not in _warned:
        _warned.add(reason)
        log.warning(
            "DDP's buckets cannot be laid out as before the resume (%s): results may differ from "
            "an undisturbed run's in the last bits",
            reason,
        )
    return False
