"""A new rank alone runs its script up to ``run``: its process groups only pretend to communicate.

Its peers live on and do not run that part of the script again. So each collective returns at once,
with what this rank put in; what is registered is restored from its peers' state afterwards, and the
groups are given real connections (:mod:`kept_groups`). What a collective of *objects* returns is
often a decision of the script's own, and cannot be guessed: it raises here.

A worker does this before its script begins; nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

from worker_hooks.contract.env import REHEARSE

C10D = "torch.distributed.distributed_c10d"

_MARK = "_msrun_rehearsal"  # what was there before, by module and name
_OF_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
)
_PRETEND = "fake"  # torch's own backend for this
_FAKES = "torch.testing._internal.distributed.fake_pg"  # which registers it


def is_wanted(environ: MutableMapping[str, str]) -> bool:
    """Whether this process is to rehearse; it is asked once."""
    return environ.pop(REHEARSE, "") == "1"


def why_not() -> str:
    """Why a new rank could not rehearse with this version of torch; empty: it could."""
    c10d = sys.modules.get(C10D)
    needed = ("_new_process_group_helper", "_store_based_barrier", "rendezvous")
    if not all(hasattr(c10d, name) for name in needed):
        return "makes process groups in a way that a new rank cannot repeat alone with this torch"
    return ""


def install() -> None:
    """Let groups that are made from now on pretend; torch's module is imported already."""
    c10d = sys.modules.get(C10D)
    make = getattr(c10d, "_new_process_group_helper", None)
    if c10d is None or make is None or hasattr(c10d, _MARK):
        return
    before: dict[tuple[str, str], Any] = {}
    setattr(c10d, _MARK, before)

    def put(module: str, name: str, value: Any) -> None:
        before[module, name] = getattr(sys.modules[module], name)
        setattr(sys.modules[module], name, value)

    def pretend(
        size: int, rank: int, ranks: Any, backend: Any, _: Any, *args: Any, **options: Any
    ) -> Any:
        fake_pg = import_module(_FAKES)
        told = fake_pg.FakeProcessGroup.Options()
        if options.get("timeout") is not None:
            told._timeout = options["timeout"]  # noqa: SLF001  the real backend takes it over
        options["backend_options"] = told
        name = c10d.Backend(_PRETEND)
        made = make(size, rank, ranks, name, fake_pg.FakeStore(), *args, **options)
        group, prefixed = made
        if prefixed is not None:  # else this rank is no member of it
            c10d._world.pg_map[group] = backend, prefixed  # noqa: SLF001  what people ask for
            config = str(c10d.BackendConfig(backend))
            c10d._world.pg_backend_config[group] = config  # noqa: SLF001  as well
        return made

    def meet(_: str, rank: int = -1, world_size: int = -1, **__: Any) -> Any:
        fake_pg = import_module(_FAKES)
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
        yield fake_pg.FakeStore(), rank, size

    put(C10D, "_new_process_group_helper", pretend)
    put(C10D, "rendezvous", meet)
    put(C10D, "_store_based_barrier", lambda *_, **__: None)
    for name in _OF_OBJECTS:
        for module in (C10D, "torch.distributed"):
            if hasattr(sys.modules.get(module), name):
                put(module, name, _refused(name))


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"a new rank cannot repeat {name}() alone, before run(train, state)")

    return refuse


def is_on() -> bool:
    """Whether groups of this process pretend."""
    return hasattr(sys.modules.get(C10D), _MARK)


def end() -> None:
    """Groups that are made from now on are real."""
    c10d = sys.modules[C10D]
    for (module, name), value in c10d.__dict__.pop(_MARK).items():
        setattr(sys.modules[module], name, value)
