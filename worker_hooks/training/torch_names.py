"""The names inside torch that nothing here can do without, and whether this torch has them.

Names inside torch come and go with its versions. Without some of them training would go on with
other weights, and nobody would notice. So they are looked for when a training begins; where one is
missing, nothing is promised on that version of torch, and the first line of the run says so.

An attribute that a constructor sets is looked for in its code: there is no object yet.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed

NEEDED = {  # a module of torch, and what in it has the names
    "torch Tensor": "_version _is_view",
    "torch": "_foreach_copy_",
    "torch._C": "DisableTorchFunctionSubclass",
    # the start of each backward is seen there
    "torch Tensor.backward": "autograd backward",
    "torch.nn Module": "_parameters _buffers _modules _non_persistent_buffers_set",
    "torch.nn.modules.batchnorm": "_NormBase",
    "torch.utils": "_pytree",
    "torch.optim Optimizer": "_optimizer_step_pre_hooks register_step_post_hook",
    "torch.amp GradScaler": (
        "_scale _growth_tracker _init_scale _init_growth_tracker _per_optimizer_states _device "
        "_lazy_init_scale_growth_tracker"
    ),
    "torch.utils.data DataLoader": "_iterator _get_iterator _index_sampler",
    "torch.utils.data.dataloader _BaseDataLoaderIter": (
        "_sampler_iter _index_sampler _num_yielded _IterableDataset_len_called"
    ),
    "torch.utils.data.dataloader _MultiProcessingDataLoaderIter": "_workers _shutdown_workers",
    "torch.utils.data._utils.fetch": "_MapDatasetFetcher _IterableDatasetFetcher",
    "torch.distributed.distributed_c10d": "_world _get_default_store",
    "torch.distributed.distributed_c10d _World": "pg_map pg_backend_config group_count",
    "torch.distributed ProcessGroup": "_get_backend bound_device_id",
    "torch.distributed.tensor DTensor": "_local_tensor",
    "torch.distributed": "_compute_bucket_assignment_by_size _DEFAULT_FIRST_BUCKET_BYTES",
    "torch.distributed Reducer": (
        "_push_all_rebuilt_params _rebuild_buckets _update_process_group get_backward_stats"
    ),
    "torch.nn.parallel DistributedDataParallel": (
        "_has_rebuilt_buckets _build_params_for_reducer _get_ddp_logging_data _use_python_reducer "
        "_join_config _delay_all_reduce_all_params bucket_bytes_cap bucket_bytes_cap_default "
        "reducer static_graph"
    ),
}


@functools.cache
def lacking() -> tuple[str, ...]:
    """The names that this torch lacks, such as ``Tensor._version``."""
    return tuple(
        f"{holder.split()[-1]}.{name}"
        for holder, names in NEEDED.items()
        for name in names.split()
        if _is_present(holder) and not _has(_held(holder), name)
    )


def why_nothing_is_promised() -> str:
    """What this torch lacks, as a part of a sentence; empty: nothing."""
    names = lacking()
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else ""


def _is_present(holder: str) -> bool:
    """Some builds of torch have nothing distributed; then nothing is made of it."""
    return torch.distributed.is_available() or not holder.startswith(
        ("torch.distributed", "torch.nn.parallel")
    )


def _held(holder: str) -> Any:
    """What has the names; ``None``: torch lacks that, too."""
    module, _, path = holder.partition(" ")
    try:
        found: Any = sys.modules.get(module) or import_module(module)
    except ImportError:
        return None
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
    return found


def _has(thing: Any, name: str) -> bool:
    return hasattr(thing, name) or any(
        name in code.co_names or name in code.co_consts for code in _codes(thing)
    )


def _codes(thing: Any) -> Iterator[CodeType]:
    """The code that may set attributes: first the constructors, where most are set."""
    kinds = thing.__mro__ if isinstance(thing, type) else ()
    functions = [vars(kind).get("__init__") for kind in kinds]
    functions += [each for kind in kinds for each in vars(kind).values()] or [thing]
    return (each.__code__ for each in functions if isinstance(each, FunctionType))
