"""The script's frames around a loop over batches: which they are, and what consumes the batches.

A generator can see the frames that wait for its next batch, up to the training function that
``run`` has called or to the module itself. What consumes it in between, such as ``enumerate``, is
no frame but an object, which is found among the youngest.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

from worker_hooks.script.library import is_library

_RUN = "worker_hooks.training.run"  # calls the training function
_OLDEST = 2  # the generation of Python's garbage collector
_VARIABLE = re.compile("_(FAST|NAME|DEREF)")
_ACCESS = re.compile("LOAD|STORE|DELETE")  # one instruction may do two
_LEAVES = re.compile("JUMP_(FORWARD|BACKWARD|ABSOLUTE)|RETURN_|RAISE_|RERAISE")
"""No other instruction follows these but the one to which they jump."""
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_PAIRING = (zip, map, itertools.islice)  # they count or pair batches, and their count cannot be set


def frames_of_script(frame: FrameType | None) -> list[FrameType]:
    """The script's own frames from this one outwards; those of libraries are left out."""
    found = []
    while frame is not None and frame.f_globals.get("__name__") != _RUN:
        if not is_library(frame.f_code.co_filename):
            found.append(frame)
        if frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    return found


def suspended(frame: FrameType | None) -> set[FrameType]:
    """Of :func:`frames_of_script` those that no batch wakes: they wait for a function to return."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return set() if frame is None else {*frames_of_script(frame.f_back)}


class LoopNames(NamedTuple):
    """The variables of a loop, as far as the order of its code tells."""

    carried: frozenset[str] = frozenset()  # read in the loop before they are set there
    after: frozenset[str] = frozenset()  # set in the loop, and read behind it
    given: frozenset[str] = frozenset()  # read in the loop, and not set there
    written: frozenset[str] | None = None  # set anywhere from its begin on; ``None``: not known


@cache
def stored_often(code: CodeType) -> frozenset[str]:
    """The variables that a function sets in more than one place, or in a loop."""
    places = [each for each in dis.get_instructions(code) if "STORE_" in each.opname]
    back = [each for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname]
    loops = [(each.argval, each.offset) for each in back]
    count = Counter(each.argval for each in places)
    in_loop = {p.argval for p in places if any(at <= p.offset <= end for at, end in loops)}
    return frozenset(name for name in count if count[name] > 1 or name in in_loop)


def names_of_loop(frame: FrameType) -> LoopNames:
    """The variables of the ``for`` loop at which this frame is."""
    return _names_of_loop(frame.f_code, frame.f_lasti)


@cache
def _names_of_loop(code: CodeType, at: int) -> LoopNames:
    instructions = list(dis.get_instructions(code))
    begin = next((each for each in instructions if each.offset == at), None)
    if begin is None or begin.opname != "FOR_ITER":
        return LoopNames()
    inside = [each for each in instructions if at < each.offset < begin.argval]
    live = _live_names(code)
    read, written = _accesses(inside)
    _, every = _accesses(each for each in instructions if each.offset > at)  # handlers are last
    return LoopNames(
        carried=live[inside[0].offset] & written,
        after=live[begin.argval] & written,
        given=read - written,
        written=every,
    )


@cache
def _live_names(code: CodeType) -> dict[int, frozenset[str]]:
    """The names that may be read before they are set again, by the offset of an instruction.

    What an iteration sets under a condition, and a later one reads, is live where the loop begins
    its next one; so is what an inner loop sets that may have no items.
    """
    instructions = list(dis.get_instructions(code))
    follow = _followers(code, instructions)
    names = sorted({name for each in instructions for name, _ in _names_in(each)})
    bits = {name: 1 << number for number, name in enumerate(names)}  # sets of names as integers
    accesses = [
        [(bits[name], is_read) for name, is_read in reversed(_names_in(each))]
        for each in instructions
    ]
    live, has_changed = [0] * len(instructions), True
    while has_changed:
        has_changed = False
        for number in reversed(range(len(instructions))):
            now = 0
            for later in follow[number]:
                now |= live[later]
            for bit, is_read in accesses[number]:
                now = now | bit if is_read else now & ~bit
            has_changed |= now != live[number]
            live[number] = now
    sets = {each: frozenset(name for name in names if bits[name] & each) for each in {*live}}
    return {each.offset: sets[live[number]] for number, each in enumerate(instructions)}


def _followers(code: CodeType, instructions: list[dis.Instruction]) -> list[list[int]]:
    """For each instruction the places of those that may come next."""
    place = {each.offset: number for number, each in enumerate(instructions)}
    follow = [[number + 1] for number in range(len(instructions))]
    for number, each in enumerate(instructions):
        if _LEAVES.match(each.opname) or number + 1 == len(instructions):
            follow[number] = []
        if each.opcode in _JUMPS:
            follow[number].append(place[each.argval])
    for start, end, target, *_ in getattr(dis.Bytecode(code), "exception_entries", ()):
        for number, each in enumerate(instructions):
            if start <= each.offset < end:
                follow[number].append(place[target])
    return follow


def _accesses(instructions: Iterable[dis.Instruction]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that are read, and those that are written."""
    pairs = [pair for each in instructions for pair in _names_in(each)]
    read = frozenset(name for name, is_read in pairs if is_read)
    return read, frozenset(name for name, is_read in pairs if not is_read)


def _names_in(instruction: dis.Instruction) -> list[tuple[str, bool]]:
    """The variables that an instruction uses, in order, and whether it reads them."""
    name = instruction.opname
    if not _VARIABLE.search(name) or name == "LOAD_FAST_AND_CLEAR":  # which a comprehension saves
        return []
    told = instruction.argval
    names = told if isinstance(told, tuple) else (told,)
    return [(e, what == "LOAD") for e, what in zip(names, _ACCESS.findall(name), strict=False)]


def consumers(frame: FrameType) -> list[Any]:
    """What asks this generator for its items: objects of Python's own that keep a count.

    ``frame``: of the generator, which has just been asked for its first item.
    """
    chain = {id(each) for each in _generators(frame)}

    def is_one(thing: Any) -> bool:
        inner = gc.get_referents(thing)  # zip and map have their iterators in a tuple
        inner += [each for some in inner if type(some) is tuple for each in some]
        return any(
            id(each.gi_frame if isinstance(each, GeneratorType) else each) in chain
            for each in inner
        )

    kinds = {enumerate, *_PAIRING}
    may_be_old = any("enumerate" in each.f_code.co_names for each in _outside(frame))
    found: list[Any] = []
    for generation in range(_OLDEST + may_be_old):
        if not found:  # no list may hold this one, which holds the generator: it would not end
            objects = gc.get_objects(generation=generation)
            candidates = [each for each in objects if type(each) in kinds]
            objects.clear()
            while news := [each for each in candidates if id(each) not in chain and is_one(each)]:
                found += news
                chain |= set(map(id, news))  # one may be around another one
    return [each for each in found if not _is_alone(each)]


def _is_alone(thing: Any) -> bool:
    """Whether this hands batches on, and pairs them with nothing."""
    if not isinstance(thing, zip | map):
        return False
    arguments: Any = thing.__reduce__()[1]
    return len(arguments) - isinstance(thing, map) == 1


def _generators(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame of a generator, and of the generators that ask it for items, as tqdm does."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        yield frame
        frame = frame.f_back


def _outside(frame: FrameType) -> list[FrameType]:
    return frames_of_script(frame.f_back)[:2]


def advance(counter: enumerate[Any], by: int) -> bool:
    """Let an ``enumerate`` count on as if it had handed out so many items before.

    Python has no way to set its count, which it keeps as the first thing in the object. That is
    checked before the count is written, and after.

    Returns:
        Whether it was possible.
    """
    count = _count(counter)
    place = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if sys.implementation.name != "cpython" or place.value != count:
        return False
    place.value = count + by
    return _count(counter) == count + by


def _count(counter: enumerate[Any]) -> int:
    parts: Any = counter.__reduce__()  # its type, and its iterator with the count
    return int(parts[1][1])
