"""Which collectives in front of ``run`` a new rank can repeat alone: torch cuts whole tensors.

``distribute_tensor``, and ``parallelize_module`` by it, send a rank its part of the tensor that the
first rank of the mesh has. Where all ranks made the same tensor, a rank's own has the same part: it
is compared as it comes. A new rank takes it from its own.

Whatever else is sent in front of ``run`` may stay in a variable of the script, and nobody knows
what a new rank would have to put there.

This is done as a script imports the hooks, before it cuts anything. Where torch's module is
imported later, nothing is compared, and so nothing is taken to be repeatable.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from worker_hooks.distributed import rehearsal

MODULE = "torch.distributed.tensor.placement_types"  # its ``Shard`` and ``Replicate`` send

_MARK = "_msrun_cut_tensors"  # the counter, and what was there before


def install() -> None:
    """Look at what torch's module sends, which is imported already; else nothing is done."""
    module: Any = sys.modules.get(MODULE)
    if module is None or hasattr(module, _MARK):
        return
    scatter = getattr(module, "mesh_scatter", None)
    broadcast = getattr(module, "mesh_broadcast", None)
    if scatter is None or broadcast is None:
        return
    repeatable: Counter[str] = Counter()

    def scattered(output: Any, parts: Any, mesh: Any, *args: Any, **options: Any) -> Any:
        group = _group(mesh, args, options)
        own = parts[group.rank()]
        if rehearsal.is_on():
            output.copy_(own)
            return None
        work = scatter(output, parts, mesh, *args, **options)
        _note(repeatable, group, own, output)
        return work

    def broadcasted(tensor: Any, mesh: Any, *args: Any, **options: Any) -> Any:
        if rehearsal.is_on():
            return None
        own = tensor.clone()
        work = broadcast(tensor, mesh, *args, **options)
        _note(repeatable, _group(mesh, args, options), own, tensor)
        return work

    setattr(module, _MARK, (repeatable, scatter, broadcast))
    module.mesh_scatter, module.mesh_broadcast = scattered, broadcasted


def _group(mesh: Any, args: Any, options: Any) -> Any:
    return mesh.get_group(args[0] if args else options.get("mesh_dim", 0))


def _note(repeatable: Counter[str], group: Any, own: Any, came: Any) -> None:
    """Whether what came is what this rank had. No tensor but a plain one can be asked."""
    torch: Any = sys.modules["torch"]
    is_plain = type(came) in {torch.Tensor, torch.nn.Parameter} and came.device.type == "cpu"
    if is_plain and torch.equal(own, came):
        repeatable[group.group_name] += 1


def end() -> Counter[str]:
    """Look no more.

    Returns:
        How many collectives a new rank could repeat, by the name of their group.
    """
    module: Any = sys.modules.get(MODULE)
    repeatable: Counter[str]
    if module is None or not hasattr(module, _MARK):
        return Counter()
    repeatable, module.mesh_scatter, module.mesh_broadcast = module.__dict__.pop(_MARK)
    return repeatable
