"""Reads the faults of drills from options or YAML.

One ``--kill``, ``--stop``, ``--graceful``, ``--preempt``, ``--cut`` or ``--poweroff`` is one drill;
``+`` joins several faults into one. A kill strikes a rank, msrun itself, or a node; a stop strikes
a rank or msrun; a graceful exit and a preemption start with a signal to msrun, which rank 0 sends
at the given moment, or on several nodes the drill itself. A cut and a poweroff strike nodes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.spec.job_spec import UsageError
from msrun.drill.random_faults import RandomFaults, check_kinds, read_kinds
from msrun.options.config_file import read_yaml
from msrun.trials.node_fault import AnyFault, NodeDeed, NodeFault
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault, Moment

_WHEN = ("step", "phase", "attempt", "delay")
_KEYS = {
    "kill": ("rank", *_WHEN, "signal", "exit", "raise"),
    "stop": ("rank", *_WHEN, "for"),
    "graceful": (*_WHEN, "signal", "node"),
    "preempt": (*_WHEN, "grace"),
    "cut": ("node", "step", "delay", "for"),
    "poweroff": ("node", "step", "delay"),
}
_OF_NODES = {  # how a kill names what is not a rank, and what befalls it
    "node": NodeDeed.KILL,
    "agent": NodeDeed.KILL_MSRUN,
    "controller": NodeDeed.KILL_MSRUN,
}
_NODE_KEYS = ("step", "delay")
_REQUESTS = {Deed.REQUEST: NodeDeed.REQUEST, Deed.PREEMPT: NodeDeed.PREEMPT}
_BARE = frozenset({"raise", "controller"})  # words without a value
_CUT_S = "8"
_SHORTEST_S = 0.01
_BYTE = 255


class FaultOrder(NamedTuple):
    """One drill with its faults."""

    faults: tuple[AnyFault, ...]  # those of ranks first

    @property
    def words(self) -> str:
        """The faults as text."""
        return " + ".join(fault.words for fault in self.faults)


def read_words(words: str, deed: str) -> FaultOrder:
    """The drill that an option describes: ``rank=3,step=50,phase=backward``.

    Args:
        deed: the option: ``kill``, ``stop``, ``graceful``, ``preempt``, ``cut`` or ``poweroff``.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    return _order(_fault(_fields(part, deed), deed) for part in words.split("+"))


def read_file(path: str) -> tuple[FaultOrder | RandomFaults, ...]:
    """The drills of a YAML file: a list of mappings, whose keys are the options' names.

    ``- kill: {rank: 3, step: 50}`` is a drill, ``- {graceful: {step: 40}, kill: {rank: 1, step:
    40}}`` one with two faults, ``- {random: 20, seed: 1, of: "kill,graceful"}`` twenty.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    content = read_yaml("--faults", path)
    if not isinstance(content, list) or not content:
        raise UsageError(f"--faults {path} must be a list of drills: - kill: {{rank: 3, step: 50}}")
    return tuple(_entry(entry, path) for entry in content)


def on_nodes(order: FaultOrder | RandomFaults) -> FaultOrder | RandomFaults:
    """The same drill of a job on several nodes: what asks msrun to exit asks it from outside.

    Raises:
        UsageError: it is to ask from within a step.
    """
    if isinstance(order, RandomFaults):
        return order
    return _order(_asked_from_outside(fault) for fault in order.faults)


def _asked_from_outside(fault: AnyFault) -> AnyFault:
    if isinstance(fault, NodeFault) or fault.deed not in _REQUESTS:
        return fault
    if fault.moment is not Moment.ANY or fault.attempt is not None:
        raise UsageError(f"{fault.words}: with --nodes give no phase and no attempt")
    return NodeFault(
        node=0,
        step=fault.step,
        deed=_REQUESTS[fault.deed],
        delay=fault.delay,
        number=fault.number,
        grace_s=fault.grace_s,
    )


def check(orders: Sequence[FaultOrder | RandomFaults], world_size: int, nodes: int = 1) -> None:
    """Refuse faults of ranks and nodes that the job does not have.

    ``nodes``: number of nodes; 1: the drill is on this machine itself.

    Raises:
        UsageError: it names the rank or the node.
    """
    for order in orders:
        if isinstance(order, RandomFaults):
            check_kinds(order.kinds, nodes)
            continue
        for fault in order.faults:
            if isinstance(fault, NodeFault):
                _check_node(fault, nodes)
            elif fault.rank >= world_size:
                raise UsageError(
                    f"a fault is for rank {fault.rank}, the ranks are 0 to {world_size - 1}"
                )
            elif fault.rank == LAUNCHER and nodes > 1:
                is_kill = fault.deed is Deed.SIGNAL
                raise UsageError(
                    f"{fault.words}: the job has an msrun on each node: "
                    + ("give controller or agent=N" if is_kill else "leave out --nodes")
                )


def _check_node(fault: NodeFault, nodes: int) -> None:
    if nodes == 1:
        raise UsageError(f"{fault.words}: give --nodes, as the job of this drill has one node")
    if fault.node >= nodes:
        raise UsageError(f"a fault is for node {fault.node}, the nodes are 0 to {nodes - 1}")


def _order(faults: Iterable[AnyFault]) -> FaultOrder:
    """Ranks find their faults by the place in the plan, which has no others."""
    return FaultOrder(tuple(sorted(faults, key=lambda fault: isinstance(fault, NodeFault))))


def _entry(entry: Any, path: str) -> FaultOrder | RandomFaults:
    try:
        match entry:
            case {"random": number, **rest} if not rest.keys() - {"seed", "of"}:
                seed = whole("seed", rest.get("seed", "0"), 0)
                kinds = read_kinds(str(rest.get("of", "kill")))
                return RandomFaults(whole("random", number, 1), seed, kinds)
            case dict() if entry and entry.keys() <= _KEYS.keys():
                return _order(one for deed in entry for one in _joined(entry[deed], deed))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    raise UsageError(f"{path}: {entry!r} is not a drill: {', '.join(_KEYS)}; or random, on its own")


def _joined(faults: Any, deed: str) -> tuple[AnyFault, ...]:
    """One mapping, or a list of them for several faults in one drill."""
    several = faults if isinstance(faults, list) else [faults]
    if not several or not all(isinstance(fields, dict) for fields in several):
        raise UsageError(f"{deed} needs {' and '.join(_needed(deed))}")
    return tuple(_fault(fields, deed) for fields in several)


def _fields(part: str, deed: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in part.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals and name not in _BARE:
            raise UsageError(f"--{deed} {part}: {word!r} is not of the form NAME=VALUE")
        if name in fields:
            raise UsageError(f"--{deed} {part} says {name} twice")
        fields[name] = value
    return fields


def _needed(deed: str) -> tuple[str, ...]:
    optional = {"node"} if deed == "graceful" else set[str]()
    return tuple(
        name for name in ("rank", "node", "step") if name in _KEYS[deed] and name not in optional
    )


def _fault(fields: Mapping[str, Any], deed: str) -> AnyFault:
    struck = [name for name in _OF_NODES if deed == "kill" and name in fields]
    if struck:
        return _node_fault(fields, deed, struck[0], _OF_NODES[struck[0]])
    if deed in {"cut", "poweroff"}:
        return _node_fault(fields, deed, "node", NodeDeed(deed))
    if deed == "graceful" and "node" in fields:
        rest = {name: value for name, value in fields.items() if name != "node"}
        asked = _asked_from_outside(_rank_fault(rest, deed))
        assert isinstance(asked, NodeFault)
        return asked._replace(node=whole("node", fields["node"], 0))
    return _rank_fault(fields, deed)


def _node_fault(fields: Mapping[str, Any], deed: str, target: str, what: NodeDeed) -> NodeFault:
    known = (target, *_NODE_KEYS) if deed == "kill" else _KEYS[deed]
    if unknown := [name for name in fields if name not in known]:
        raise UsageError(f"{deed}: {unknown[0]!r} is unknown, choose from {', '.join(known)}")
    for needed in (target, "step"):
        if needed not in fields:
            raise UsageError(f"{deed}: {needed} is missing")
    return NodeFault(
        node=0 if target == "controller" else whole(target, fields[target], 0),
        step=whole("step", fields["step"], 1),
        deed=what,
        delay=fraction("delay", fields.get("delay", "0.5")),
        for_s=max(_SHORTEST_S, positive("for", fields.get("for", _CUT_S))),
    )


def _rank_fault(fields: Mapping[str, Any], deed: str) -> Fault:
    known = _KEYS[deed]
    if unknown := [name for name in fields if name not in known]:
        raise UsageError(f"{deed}: {unknown[0]!r} is unknown, choose from {', '.join(known)}")
    when = moment(deed, fields.get("phase", "any"))
    for needed in _needed(deed):
        if needed not in fields and (needed, when) != ("step", Moment.DUMP):
            raise UsageError(f"{deed}: {needed} is missing")
    rank = fields.get("rank", "launcher")
    what, number = _deed(fields, deed)
    fault = Fault(
        rank=LAUNCHER if rank == "launcher" else whole("rank", rank, 0),
        step=whole("step", fields.get("step", "1"), 1),
        moment=when,
        deed=what,
        number=number,
        attempt=whole("attempt", fields["attempt"], 0) if "attempt" in fields else None,
        delay=fraction("delay", fields.get("delay", "0.5")),
        for_s=max(_SHORTEST_S, positive("for", fields.get("for", "2"))),
        grace_s=max(_SHORTEST_S, positive("grace", fields.get("grace", "30"))),
    )
    _check(fault)
    return fault


def _check(fault: Fault) -> None:
    if fault.rank == LAUNCHER and fault.deed in {Deed.EXIT, Deed.RAISE}:
        raise UsageError("kill: msrun itself can only get a signal or be stopped")
    if fault.moment is Moment.DUMP and fault.deed is Deed.RAISE:
        raise UsageError(
            "kill: raise needs the main thread, and a dump runs in another: give a signal or exit"
        )
    if fault.deed is Deed.REQUEST and fault.number in {signal.SIGKILL, signal.SIGSTOP}:
        raise UsageError("graceful: no process can catch that signal: give another one")


def _deed(fields: Mapping[str, Any], deed: str) -> tuple[Deed, int]:
    """The kind of fault, and its signal or exit code."""
    match deed:
        case "stop":
            return Deed.STOP, signal.SIGSTOP
        case "graceful":
            return Deed.REQUEST, signum(deed, str(fields.get("signal", "TERM")))
        case "preempt":
            return Deed.PREEMPT, signal.SIGTERM
    given = [name for name in ("signal", "exit", "raise") if name in fields]
    if len(given) > 1:
        raise UsageError(f"kill: {given[0]} and {given[1]} exclude each other")
    match given:
        case ["exit"]:
            code = whole("exit", fields["exit"], 0)
            if code > _BYTE:
                raise UsageError(f"kill: exit={code} is above {_BYTE}")
            return Deed.EXIT, code
        case ["raise"]:
            return Deed.RAISE, 0
        case _:
            return Deed.SIGNAL, signum(deed, str(fields.get("signal", "KILL")))


def whole(name: str, text: Any, low: int) -> int:
    """A whole number.

    Raises:
        UsageError: it is not one, or below ``low``.
    """
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and int(text) >= low):
        raise UsageError(f"{name}={text} must be a whole number, at least {low}")
    return int(text)


def positive(name: str, text: Any) -> float:
    """A number above 0.

    Raises:
        UsageError: it is not one.
    """
    number = _number(text)
    if not 0 < number < float("inf"):
        raise UsageError(f"{name}={text} must be a number above 0")
    return number


def fraction(name: str, text: Any) -> float:
    """A number from 0 to 1.

    Raises:
        UsageError: it is not one.
    """
    number = _number(text)
    if not 0 <= number <= 1:
        raise UsageError(f"{name}={text} must be a number from 0 to 1")
    return number


def signum(deed: str, text: str) -> int:
    """A signal by name or number; ``OOM``: the one that the kernel's OOM killer sends.

    Raises:
        UsageError: there is no such signal.
    """
    name = text.upper().removeprefix("SIG")
    if name == "OOM":
        return signal.SIGKILL
    known = signal.Signals.__members__
    if f"SIG{name}" in known:
        return known[f"SIG{name}"]
    if name.isdigit() and int(name) in {member.value for member in signal.Signals}:
        return int(name)
    raise UsageError(f"{deed}: signal={text} is not a signal")


def moment(deed: str, text: Any) -> Moment:
    """The moment within a step.

    Raises:
        UsageError: there is no such moment.
    """
    if text not in {one.value for one in Moment}:
        named = ", ".join(one.value for one in Moment)
        raise UsageError(f"{deed}: phase={text} is unknown, choose from {named}")
    return Moment(text)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return -1.0
