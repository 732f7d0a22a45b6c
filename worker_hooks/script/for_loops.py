"""Finds the ``for`` loops around a question whether to exit that begin anew after a replacement.

Such a loop has its place in its own iterator, which nobody can put back: when the training function
is entered again, it trains what was trained. One that begins at ``state.step``, skips up to it, or
ends at it and uses nothing of its items is right. What is not understood is taken for right.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from worker_hooks.script import source
from worker_hooks.script.analysis import Uses, called, loads, stored, walk
from worker_hooks.script.flow import COUNTS, IN_EPOCH, PLACES, STATE, Assignments, Flow, given
from worker_hooks.script.watch import local_modules

_LONGEST = 60  # characters of a loop's head
_NAMES = frozenset({"step", "batch", "epoch", "own", "shared"})
_For = ast.For | ast.AsyncFor
_Jump = ast.Break | ast.Continue
_Place = tuple[int, int]


class ForLoop(NamedTuple):
    """A loop that begins anew."""

    file: str
    line: int
    text: str  # ``for step in range(100)``
    names: tuple[str, ...]  # of its variables

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} `{self.text}`"


class _Around(NamedTuple):
    """What is around the question: a loop, or a condition."""

    node: ast.For | ast.AsyncFor | ast.While | ast.If
    scope: Any
    file: str


def begin_anew(
    frames: Sequence[FrameType], is_ignored: Callable[[str], bool] = lambda _: False
) -> list[ForLoop]:
    """The loops around a question that begin anew, the outermost first.

    Args:
        frames: the script's own, the innermost first; one of them asks.
        is_ignored: whether the script has said that a loop's variable does not matter.
    """
    try:
        return _found(frames, is_ignored)
    except (OSError, SyntaxError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return []


def _found(frames: Sequence[FrameType], is_ignored: Callable[[str], bool]) -> list[ForLoop]:
    trees: dict[str, ast.Module] = {}
    functions = [source.tree_of(each.f_code, trees) for each in frames]
    paths = [
        list(_around(tree, _place_of(frame))) if tree is not None else []
        for frame, tree in zip(frames, functions, strict=True)
    ]
    if not any(isinstance(each, _For) for path in paths for each in path):
        return []  # as in most scripts: nothing else is read
    for module in local_modules():
        source.read(str(module.__file__), trees)
    script = Assignments(trees.values())
    around = [
        _Around(node, script.scope(tree), frame.f_code.co_filename)
        for frame, tree, path in reversed([*zip(frames, functions, paths, strict=True)])
        for node in path
    ]
    return _Question(script, around, is_ignored).found()


def _place_of(frame: FrameType) -> tuple[_Place, _Place]:
    """Where the instruction that a frame is at begins and ends."""
    line, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line = line or frame.f_lineno
    return (line, begin or 0), (last or line, end or 0)


def _around(tree: ast.AST, place: tuple[_Place, _Place]) -> Iterator[Any]:
    """The loops around a place, the outermost first, and conditions under which it is reached."""
    for node in walk(tree.body):  # type: ignore[attr-defined]
        match node:
            case ast.For() | ast.AsyncFor():
                if _is_in(place, node.body):
                    yield node
            case ast.While():
                if _is_in(place, [node.test]) or _is_in(place, node.body):
                    yield node
            case ast.If():
                if _is_in(place, node.body) or _is_in(place, node.orelse):
                    yield node


def _is_in(place: tuple[_Place, _Place], nodes: Sequence[Any]) -> bool:
    if not nodes:
        return False
    begin = nodes[0].lineno, nodes[0].col_offset
    end = nodes[-1].end_lineno, nodes[-1].end_col_offset
    return begin <= place[0] and place[1] <= end


class _Question:
    """One place in which a script asks, and the loops around it."""

    def __init__(
        self, script: Assignments, around: list[_Around], is_ignored: Callable[[str], bool]
    ) -> None:
        self._script, self._around, self._is_ignored = script, around, is_ignored
        # what an outer loop hands out says nothing of the place in an inner one
        loops = [each.node for each in around]
        self._within_epoch = Flow(script, IN_EPOCH, without=loops)
        self._anywhere = Flow(script, PLACES, without=loops)
        self._exactly = Flow(script, _NAMES, is_exact=True, without=loops)
        self._counted = Flow(script, COUNTS, is_exact=True, without=loops)
        self._counting = Flow(script, _NAMES, is_exact=True, without=loops, known=script.locals)

    def found(self) -> list[ForLoop]:
        right = self._that_continue()
        found: list[ForLoop] = []
        is_guarded = False  # an inner loop does nothing while what is trained comes again
        for place in reversed(range(len(self._around))):
            node, scope, file = each = self._around[place]
            if isinstance(node, ast.If):
                is_guarded |= self._exactly.reaches(node.test, scope)
            elif isinstance(node, ast.While):
                is_guarded |= self._exactly.reaches(node.test, scope) or self._ends(each)
            elif node in right:
                is_guarded |= self._guards(place)
            elif self._skips(each) or (self._ends(each) and not _is_used(node)):
                is_guarded = True
            elif not is_guarded and not self._is_left_alone(place):
                names = tuple(sorted(stored([node.target]), key=ast.unparse(node.target).find))
                found.append(ForLoop(file, node.lineno, _text(node), names))
        return found[::-1]

    def _that_continue(self) -> set[ast.AST]:
        """The loops whose items depend on how far training is."""
        found: set[ast.AST] = set()
        for node, scope, _ in self._around:
            if isinstance(node, _For):
                flow = self._within_epoch if found else self._anywhere
                if flow.reaches(node.iter, scope):
                    found.add(node)
        return found

    def _guards(self, place: int) -> bool:
        """Whether a loop that continues has no items as long as an outer one repeats itself."""
        node, scope, _ = self._around[place]
        assert isinstance(node, _For)
        if self._counted.reaches(node.iter, scope):
            return True
        outer = [each.node for each in self._around[:place] if isinstance(each.node, _For)]
        read = loads([node.iter])
        arguments = (each for call in _calls([node.iter]) for each in given(call))
        asks_state = any(map(self._script.is_state, arguments))
        return asks_state and any(read & stored([each.target]) for each in outer)

    def _skips(self, each: _Around) -> bool:
        """``if number < state.step: continue``."""
        return any(
            _jumps(test.body, ast.Continue)
            for test in _own(each.node.body)
            if isinstance(test, ast.If) and self._exactly.reaches(test.test, each.scope)
        )

    def _ends(self, each: _Around) -> bool:
        """``if state.step >= 100: break``."""
        for test in walk(each.node.body):
            if not isinstance(test, ast.If) or not self._counting.reaches(test.test, each.scope):
                continue
            if any(isinstance(one, ast.Return | ast.Raise) for one in walk(test.body)):
                return True
        return any(
            _jumps(test.body, ast.Break)
            for test in _own(each.node.body)
            if isinstance(test, ast.If) and self._counting.reaches(test.test, each.scope)
        )

    def _is_left_alone(self, place: int) -> bool:
        """The script says so, or the loop is a part of one step, or around the whole training."""
        node, scope, _ = self._around[place]
        assert isinstance(node, _For)
        if any(self._is_ignored(name) for name in stored([node.target])):
            return True
        calls = {called(each) for each in _calls(node.body)}
        makers = {name for name in calls & self._script.functions.keys() if self._makes(name)}
        outer = [each.node for each in self._around[:place] if each.scope is scope]
        is_part = (
            "backward" in calls
            and not _updates(node.body)
            and any(_updates(each.body) for each in outer)
        )
        return STATE in calls or bool(makers) or is_part

    def _makes(self, name: str) -> bool:
        """Whether this function makes a ``TrainState``."""
        return any(
            called(call) == STATE
            for node in self._script.functions[name]
            for call in _calls(node.body)  # type: ignore[attr-defined]
        )


def _is_used(node: _For) -> bool:
    """Whether the items flow into more than what is printed."""
    return not stored([node.target]).isdisjoint(Uses(node.body, ()).steering)


def _text(node: _For) -> str:
    target = ast.unparse(node.target)
    if isinstance(node.target, ast.Tuple):
        target = target[1:-1].rstrip(",") if target.startswith("(") else target
    text = f"for {target} in {ast.unparse(node.iter)}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [each for each in walk(nodes) if isinstance(each, ast.Call)]


def _updates(nodes: Iterable[ast.AST]) -> bool:
    """Whether an optimizer makes its step in these."""
    return any(
        isinstance(each.func, ast.Attribute)
        and each.func.attr == "step"
        and "sched" not in ast.unparse(each.func).lower()
        for each in _calls(nodes)
    )


def _own(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a loop's body, without those of inner loops."""
    for node in nodes:
        yield node
        if not isinstance(
            node, ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.ClassDef
        ):
            yield from _own(ast.iter_child_nodes(node))


def _jumps(nodes: Iterable[ast.AST], kind: type[_Jump]) -> bool:
    return any(isinstance(each, kind) for each in _own(nodes))
