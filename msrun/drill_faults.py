"""What drills are asked for, in words or in YAML, and the faults that makes.

One ``--kill`` or ``--stop`` is one drill; ``+`` joins several faults into one. Random drills are
drawn once the reference run has said how many steps there are.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent.spec import UsageError
from worker_hooks.fault import LAUNCHER, Deed, Fault, Moment

_KILL_KEYS = ("rank", "step", "phase", "signal", "exit", "raise", "attempt", "delay")
_STOP_KEYS = ("rank", "step", "phase", "for", "attempt", "delay")
_SHORTEST_STOP_S = 0.01


class Order(NamedTuple):
    """One drill that was asked for by name."""

    faults: tuple[Fault, ...]

    @property
    def words(self) -> str:
        """For people."""
        return " + ".join(fault.words for fault in self.faults)


class Lots(NamedTuple):
    """So many drills at random moments of random ranks; the same seed draws the same."""

    number: int
    seed: int


def read_words(words: str, deed: str) -> Order:
    """The drill that ``--kill`` or ``--stop`` asks for: ``rank=3,step=50,phase=backward``.

    Args:
        words: what was typed.
        deed: ``kill`` or ``stop``.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    return Order(tuple(_fault(_fields(part, deed), deed) for part in words.split("+")))


def read_file(path: str) -> tuple[Order | Lots, ...]:
    """The drills of a YAML file: a list of ``kill:``, ``stop:`` and ``random:`` mappings.

    Raises:
        UsageError: one sentence on what is wrong.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # noqa: S506 - builds text only
    except OSError as error:
        raise UsageError(f"--faults {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--faults {path} is malformed YAML: {reason}") from None
    if not isinstance(content, list) or not content:
        raise UsageError(f"--faults {path} must be a list of drills: - kill: {{rank: 3, step: 50}}")
    return tuple(_entry(entry, path) for entry in content)


def _entry(entry: Any, path: str) -> Order | Lots:
    try:
        match entry:
            case {"random": number, **rest} if not rest.keys() - {"seed"}:
                return Lots(_whole("random", number, 1), _whole("seed", rest.get("seed", "0"), 0))
            case {"kill": faults, **rest} if not rest:
                return _order(faults, "kill")
            case {"stop": faults, **rest} if not rest:
                return _order(faults, "stop")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    raise UsageError(f"{path}: {entry!r} is no drill: kill, stop or random, each on its own")


def _order(faults: Any, deed: str) -> Order:
    """One mapping, or a list of them for several faults in one drill."""
    several = faults if isinstance(faults, list) else [faults]
    if not several or not all(isinstance(fields, dict) for fields in several):
        raise UsageError(f"{deed} needs rank and step")
    return Order(tuple(_fault(fields, deed) for fields in several))


def _fields(part: str, deed: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in part.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals and name != "raise":
            raise UsageError(f"--{deed} {part}: {word!r} is not of the form NAME=VALUE")
        if name in fields:
            raise UsageError(f"--{deed} {part} says {name} twice")
        fields[name] = value
    return fields


def _fault(fields: Mapping[str, Any], deed: str) -> Fault:
    known = _KILL_KEYS if deed == "kill" else _STOP_KEYS
    if unknown := [name for name in fields if name not in known]:
        raise UsageError(f"{deed}: {unknown[0]!r} is unknown, choose from {', '.join(known)}")
    phase = fields.get("phase", "any")
    if phase not in {moment.value for moment in Moment}:
        named = ", ".join(moment.value for moment in Moment)
        raise UsageError(f"{deed}: phase={phase} is unknown, choose from {named}")
    moment = Moment(phase)
    for needed in ("rank", "step"):
        if needed not in fields and (needed, moment) != ("step", Moment.DUMP):
            raise UsageError(f"{deed}: {needed} is missing")
    rank = fields["rank"]
    what, number = _deed(fields, deed)
    fault = Fault(
        rank=LAUNCHER if rank == "launcher" else _whole("rank", rank, 0),
        step=_whole("step", fields.get("step", "1"), 1),
        moment=moment,
        deed=what,
        number=number,
        attempt=_whole("attempt", fields["attempt"], 0) if "attempt" in fields else None,
        delay=_fraction("delay", fields.get("delay", "0.5")),
        for_s=max(_SHORTEST_STOP_S, _positive("for", fields.get("for", "2"))),
    )
    _check(fault)
    return fault


def _check(fault: Fault) -> None:
    if fault.rank == LAUNCHER and fault.deed in {Deed.EXIT, Deed.RAISE}:
        raise UsageError("kill: msrun itself can only be signalled or stopped")
    if fault.moment is Moment.DUMP and fault.deed is Deed.RAISE:
        raise UsageError("kill: a dump has no main thread to raise in: give a signal or exit")


def _deed(fields: Mapping[str, Any], deed: str) -> tuple[Deed, int]:
    """What is done, and its signal or exit code."""
    if deed == "stop":
        return Deed.STOP, signal.SIGSTOP
    given = [name for name in ("signal", "exit", "raise") if name in fields]
    if len(given) > 1:
        raise UsageError(f"kill: {given[0]} and {given[1]} exclude each other")
    match given:
        case ["exit"]:
            code = _whole("exit", fields["exit"], 1)
            if code > 255:  # noqa: PLR2004  a byte
                raise UsageError(f"kill: exit={code} is above 255")
            return Deed.EXIT, code
        case ["raise"]:
            return Deed.RAISE, 0
        case _:
            return Deed.SIGNAL, _signal(str(fields.get("signal", "KILL")))


def _signal(text: str) -> int:
    """A signal by name or number; ``OOM`` is what the kernel's killer sends."""
    name = text.upper().removeprefix("SIG")
    if name == "OOM":
        return signal.SIGKILL
    known = signal.Signals.__members__
    if f"SIG{name}" in known:
        return known[f"SIG{name}"]
    if name.isdigit() and int(name) in {member.value for member in signal.Signals}:
        return int(name)
    raise UsageError(f"kill: signal={text} is no signal")


def _whole(name: str, text: Any, low: int) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and int(text) >= low):
        raise UsageError(f"{name}={text} must be a whole number, at least {low}")
    return int(text)


def _positive(name: str, text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"{name}={text} must be a number above 0")
    return number


def _fraction(name: str, text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1:
        raise UsageError(f"{name}={text} must be a number from 0 to 1")
    return number


def check_ranks(orders: Sequence[Order | Lots], world_size: int) -> None:
    """Refuse faults of ranks the job does not have.

    Raises:
        UsageError: the rank is named.
    """
    for order in orders:
        for fault in order.faults if isinstance(order, Order) else ():
            if fault.rank >= world_size:
                raise UsageError(
                    f"rank {fault.rank} is to fail, the ranks are 0 to {world_size - 1}"
                )


def draw(lots: Lots, world_size: int, steps: int) -> tuple[Order, ...]:
    """The drills of a lot: any rank, any step but the last, any fraction of it.

    The last step is left out: a moment late in it may be after the end of training.
    """
    chance = random.Random(lots.seed)  # noqa: S311  reproducible is what it must be
    return tuple(
        Order(
            (
                Fault(
                    rank=chance.randrange(world_size),
                    step=chance.randint(1, max(1, steps - 1)),
                    delay=round(chance.random(), 3),
                ),
            )
        )
        for _ in range(lots.number)
    )
