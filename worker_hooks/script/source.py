"""Reads the source of a training function, and of what it calls, for the analysis of its loops."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from worker_hooks.script import analysis
from worker_hooks.script.analysis import Carried, LoopFindings
from worker_hooks.script.watch import local_modules

_OURS = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"


_UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, AttributeError, RecursionError)


class Named(NamedTuple):
    """A local variable that the training loop carries."""

    name: str
    file: str
    line: int
    is_only_printed: bool
    function: int = 0  # the first line of its function; 0: of a script's top level
    kind: str = ""  # its type, if that is none for ``state.own``
    is_result: bool = False  # it flows into nothing but output and what training returns
    into: tuple[str, ...] = ()  # other variables into which it flows

    @property
    def place(self) -> str:
        """``train.py:41``."""
        return f"{os.path.basename(self.file)}:{self.line}"

    def is_in(self, code: CodeType) -> bool:
        """Whether it is a variable of this function, or of this top level."""
        return (self.file, self.function) == _scope(code)


class SourceFindings(NamedTuple):
    """What the script's source says of its variables."""

    carried: tuple[Named, ...] = ()
    temporary: frozenset[str] = frozenset()  # global, and hold nothing from one step to the next
    has_batches: bool = False  # it loops over ``state.batches``
    scopes: frozenset[tuple[str, int]] = frozenset()
    """The file and the first line of each function that was looked at; 0: of a top level."""


class _Part(NamedTuple):
    """A function that training consists of, or the script's top level."""

    file: str
    tree: Any
    names: dict[str, Any]  # what its calls may mean
    owner: Any  # of a method


def look_at(entry: Callable[..., Any] | FrameType | None) -> SourceFindings:
    """Find what loops carry, in the training function and in what it calls.

    ``entry``: the training function, or the frame in which the script trains.

    Returns:
        Nothing if the source cannot be read.
    """
    try:
        return _looked_at(entry)
    except _UNREADABLE:
        return SourceFindings()


def with_frames(found: SourceFindings, frames: Sequence[FrameType]) -> SourceFindings:
    """The findings, and those of frames that :func:`look_at` has not found: of other objects, say.

    ``frames``: around a loop with commits, the innermost first.
    """
    for index, frame in enumerate(frames):
        scope = _scope(frame.f_code)
        if scope in found.scopes:
            continue
        found = found._replace(scopes=found.scopes | {scope})
        with contextlib.suppress(*_UNREADABLE):
            tree = tree_of(frame.f_code, {})
            inner = {each.f_code.co_name for each in frames[:index]}
            more = analysis.analyse(tree, inner, _classes(local_modules())).carried
            named = tuple(_named(each, frame.f_code.co_filename, scope[1]) for each in more)
            found = found._replace(carried=(*found.carried, *named))
    return found


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the script's."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _looked_at(entry: Any) -> SourceFindings:
    modules = local_modules()
    parts = list(_parts(entry, {module.__name__ for module in modules}))
    classes = _classes(modules)
    commits = _with_commits(parts)
    named, temporary = dict[tuple[str, str, int], Named](), frozenset[str]()
    for part in parts:
        is_entry = part is parts[0] and not isinstance(entry, FrameType)
        found = analysis.analyse(part.tree, commits, classes, is_entry=is_entry)
        if isinstance(part.tree, ast.Module):
            temporary |= found.temporary
        first = _first_line(part.tree)
        for each in found.carried:
            named[part.file, each.name, each.line] = _named(each, part.file, first)
    has_batches = any(analysis.asks_for_batches(part.tree) for part in parts)
    scopes = frozenset((part.file, _first_line(part.tree)) for part in parts)
    return SourceFindings(tuple(named.values()), temporary, has_batches, scopes)


def _named(carried: Carried, file: str, first: int) -> Named:
    """``first``: the first line of the function; 0: it is a script's top level."""
    return Named(
        carried.name,
        file,
        carried.line,
        carried.is_only_printed,
        first,
        is_result=carried.is_result,
        into=carried.into,
    )


def _classes(modules: Iterable[ModuleType]) -> set[str]:
    """Names of the script's own classes whose objects hold values and nothing else."""
    return {
        name
        for module in modules
        for name, each in vars(module).items()
        if isinstance(each, type) and not issubclass(each, torch.nn.Module | torch.optim.Optimizer)
    }


def _scope(code: CodeType) -> tuple[str, int]:
    """The file and the first line of a function; 0: of a script's top level."""
    return code.co_filename, 0 if code.co_name == "<module>" else code.co_firstlineno


def _with_commits(parts: list[_Part]) -> set[str]:
    found = {_name(part) for part in parts if analysis.has_commits(part.tree)}
    known: dict[str, LoopFindings] = {_name(part): analysis.analyse(part.tree) for part in parts}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {
            name
            for name, each in known.items()
            if found & {call.removeprefix("self.") for call in each.calls}
        }
    return found


def _name(part: _Part) -> str:
    return getattr(part.tree, "name", "")


def _parts(entry: Any, modules: Collection[str]) -> Iterator[_Part]:
    """The entry, and whatever it calls of these modules."""
    trees: dict[str, ast.Module] = {}  # by file: a file of many functions is parsed once
    owner = entry.f_locals.get("self") if isinstance(entry, FrameType) else None
    waiting: list[tuple[Any, Any]] = [(entry, owner)]
    seen: set[CodeType] = set()
    for thing, owner in waiting:  # which grows
        if isinstance(thing, partial):
            waiting.append((thing.func, owner))
        elif isinstance(thing, MethodType):
            waiting.append((thing.__func__, thing.__self__))
        is_outside = isinstance(thing, FunctionType) and thing.__module__ not in modules
        code, scope = _code_of(thing)
        tree = None if code is None or code in seen else tree_of(code, trees)
        if code is None or tree is None or (is_outside and thing is not entry):
            continue
        seen.add(code)
        for each in _with_inner(tree, is_deep=code.co_name != "<module>"):
            yield _Part(code.co_filename, each, scope, owner)
        for name in analysis.calls(tree.body):
            method = name.removeprefix("self.")
            if method == name:
                waiting.append((scope.get(name), None))
            elif owner is not None:
                waiting.append((getattr(type(owner), method, None), owner))


def _with_inner(tree: Any, *, is_deep: bool) -> Iterator[Any]:
    yield tree
    if is_deep:
        for node in ast.walk(tree):
            if node is not tree and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _code_of(thing: Any) -> tuple[CodeType | None, dict[str, Any]]:
    """A function's code, or a frame's, and the names that it knows."""
    if isinstance(thing, FunctionType):
        return thing.__code__, {**thing.__globals__, **_closure(thing)}
    if isinstance(thing, FrameType):
        return thing.f_code, {**thing.f_globals, **thing.f_locals}
    return None, {}


def _closure(function: FunctionType) -> dict[str, Any]:
    found = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def tree_of(code: CodeType, trees: dict[str, ast.Module]) -> Any:
    """The syntax tree of a function, or of the script's top level; ``None``: not found.

    ``trees``: of whole files, which are looked up and kept here.
    """
    whole = read(code.co_filename, trees)
    if code.co_name == "<module>":
        return whole
    for node in ast.walk(whole):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_named = is_function and getattr(node, "name", "") == code.co_name
        if is_named and code.co_firstlineno in {_first_line(node), getattr(node, "lineno", 0)}:
            return node
    return None


def read(file: str, trees: dict[str, ast.Module]) -> ast.Module:
    """The syntax tree of a file, which is kept in ``trees``."""
    if file not in trees:
        trees[file] = ast.parse("".join(linecache.getlines(file)))
    return trees[file]


def _first_line(tree: Any) -> int:
    """As ``co_firstlineno`` of its code; 0: a script's top level."""
    lines: list[int] = [each.lineno for each in getattr(tree, "decorator_list", ())]
    return min([getattr(tree, "lineno", 0), *lines])
