"""Tells which expressions of a script depend on how far its training is, such as ``state.step``.

Values are followed through assignments, arguments and loops of all functions, whenever they are
executed: what is assigned from ``state.step`` anywhere depends on it. So does what the script's own
counters hold in globals and attributes, as these come back. Pure: syntax trees in, answers out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from worker_hooks.script.analysis import EXIT, arguments, assigned, called, stored, walk

STATE = "TrainState"
COUNTS = frozenset({"step", "own", "shared"})
IN_EPOCH = COUNTS | {"batch", "batches"}
PLACES = IN_EPOCH | {"epoch", "epochs"}

_KNOWN = {  # parameters of TrainState that are no source of data
    *("model", "optimizer", "scheduler", "scaler", "callbacks", "ckpt_save_path", "is_recover"),
}
_AROUND = {"enumerate", "tqdm", "track"}  # their other arguments are only shown
_PLAIN = {  # a number that goes in comes out
    *("abs", "count", "divmod", "float", "int", "islice", "max", "min", "range", "round", "trange"),
}
_OBJECT = "*"  # stands for what is in an object of this name; ``self`` is in too many places
_SIMPLE = (ast.Name, ast.Attribute, ast.BinOp)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""A kind or a scope, and a name in it."""


class _Scope:
    """The variables of a function, a class or the top level."""

    def __init__(self, node: ast.AST, outer: _Scope | None) -> None:
        self.outer = outer
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_top = outer is None
        self.is_init = getattr(node, "name", "") == "__init__"
        self._id = "" if outer is None else f"{id(node)}"
        body = getattr(node, "body", [])
        self._names = stored(body)
        self._global: set[str] = set()
        for each in walk(body):
            if isinstance(each, ast.Global | ast.Nonlocal):
                self._global |= set(each.names)
        if isinstance(node, Function):
            self._names |= {each.arg for each in arguments(node)}
        self._names -= self._global

    def key(self, name: str) -> Key:
        """Whose variable this is. The top levels of all modules count as one."""
        if self.outer is None or name in self._names:
            return (self._id, name)
        outer = self.outer
        while outer.is_class and outer.outer is not None:
            outer = outer.outer
        return outer.key(name)

    def is_outside(self, name: str) -> bool:
        """Whether the function declares that it assigns a variable from outside."""
        return name in self._global


class _Edge(NamedTuple):
    targets: frozenset[Key]
    value: ast.AST
    scope: _Scope
    loop: ast.AST | None = None  # whose items these are


_Step = tuple[frozenset[Key], frozenset[Key], ast.AST | None]
"""What is assigned, what it consists of, and the loop whose items these are."""


class Assignments:
    """The assignments of a script's sources."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        """Read them."""
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)  # and classes, by name
        self.counters: set[Key] = set()  # of the script's own, which are kept
        self.locals: set[Key] = set()  # variables that are counted up
        self.registered: set[Key] = set()
        self._scopes: dict[ast.AST, _Scope] = {}
        self._edges: list[_Edge] = []
        self._calls: list[tuple[ast.Call, _Scope]] = []
        self._trees = list(trees)
        self._iterators = set(_iterators(self._trees))
        for tree in self._trees:
            self._enter(tree, None)
        self.states = self._found_states()
        for call, scope in self._calls:
            self._bind(call, scope)
        self._atoms: dict[tuple[int, bool], frozenset[Key]] = {}
        self._steps: dict[bool, list[_Step]] = {}

    def scope(self, node: ast.AST) -> _Scope:
        """Of a function, or of a file's top level."""
        return self._scopes[node]

    def steps(self, *, is_exact: bool) -> list[_Step]:
        """All assignments, with what their values consist of."""
        if is_exact not in self._steps:
            found = [
                (each.targets, self.atoms(each.value, each.scope, is_exact=is_exact), each.loop)
                for each in self._edges
                if each.targets
            ]
            found += [(key, atoms, None) for key, atoms in self._results(is_exact=is_exact)]
            self._steps[is_exact] = [each for each in found if each[1]]
        return self._steps[is_exact]

    def _results(self, *, is_exact: bool) -> Iterator[tuple[frozenset[Key], frozenset[Key]]]:
        """What functions return; not exact: all that they read."""
        for name, nodes in self.functions.items():
            atoms: set[Key] = set()
            for part in (part for node in nodes for part in _with_methods(node)):
                for each in _expressions(part.body, is_exact=is_exact):
                    atoms |= self.atoms(each, self._scopes[part], is_exact=is_exact)
            yield frozenset({("()", name)}), frozenset(atoms)

    def atoms(self, node: ast.AST, scope: _Scope, *, is_exact: bool) -> frozenset[Key]:
        """The variables, attributes, functions and places of the state that it consists of.

        ``is_exact``: follow what is only copied and counted, not what is computed from it.
        """
        key = id(node), is_exact
        if key not in self._atoms:
            self._atoms[key] = frozenset(self._parts(node, scope, is_exact=is_exact))
        return self._atoms[key]

    def is_state(self, node: ast.AST) -> bool:
        """Whether this is the ``TrainState`` itself."""
        return _ident(node) in self.states

    # --- the parts --------------------------------------------------------------------------------

    def _parts(self, node: ast.AST, scope: _Scope, *, is_exact: bool) -> Iterator[Key]:
        inner: list[ast.AST] = []
        match node:
            case ast.Attribute(attr=attr, value=owner):
                if self.is_state(owner):
                    yield ("state", attr)
                    return
                yield (".", attr)
                inner = [owner]
            case ast.Name(id=name):
                if not self.is_state(node):
                    yield scope.key(name)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
                yield (".", name)
                inner = [owner]
            case ast.BinOp(op=ast.Mod()) if is_exact:
                pass
            case ast.Call():
                yield from self._called(node)
                inner = self._passed(node, is_exact=is_exact)
            case _:
                inner = list(ast.iter_child_nodes(node))
        for each in inner:
            yield from self.atoms(each, scope, is_exact=is_exact)

    def _called(self, node: ast.Call) -> Iterator[Key]:
        name = called(node)
        if name in self.functions:
            yield ("()", name)
        elif any(self.is_state(each) for each in given(node)) and name != "ExitByRequest":
            yield ("state", "step")  # who knows what it asks for

    def _passed(self, node: ast.Call, *, is_exact: bool) -> list[ast.AST]:
        """The parts of a call that its value consists of."""
        name = called(node)
        if name in _AROUND:
            first = [each.value for each in node.keywords if each.arg in {"iterable", "sequence"}]
            return [*(node.args[:1] or first)]
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        is_method = owner and self.is_state(owner[0])  # state.batches
        through = [node.func] if is_method or name not in self.functions else owner
        if is_exact and name not in _PLAIN:
            return [*through]
        return [*through, *given(node)]

    # --- reading ----------------------------------------------------------------------------------

    def _enter(self, node: ast.AST, outer: _Scope | None, *, is_loop: bool = False) -> None:
        self._scopes[node] = scope = _Scope(node, outer)
        if isinstance(node, Function | ast.ClassDef):
            self.functions[node.name].append(node)
        for each in getattr(node, "body", []):
            self._visit(each, scope, is_loop=is_loop)

    def _visit(self, node: ast.AST, scope: _Scope, *, is_loop: bool) -> None:
        if isinstance(node, Function | ast.ClassDef):
            self._enter(node, scope)
            return
        match node:
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._add(node.target, node.iter, scope, node)
                if isinstance(node, ast.For):
                    self._advance(node, scope)
            case ast.withitem(optional_vars=ast.expr() as target):
                self._add(target, node.context_expr, scope)
            case ast.Expr(value=ast.Call() as call):
                self._change(call, scope)
            case ast.Call():
                self._calls.append((node, scope))
                if called(node) == STATE:
                    self._register(node, scope)
            case ast.AugAssign() | ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
                self._assign(node, scope, is_loop=is_loop)
        within = is_loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
        for each in ast.iter_child_nodes(node):
            self._visit(each, scope, is_loop=within)

    def _assign(self, node: ast.AST, scope: _Scope, *, is_loop: bool) -> None:
        if isinstance(node, ast.AugAssign | ast.NamedExpr):
            self._add(node.target, node.value, scope)
        if isinstance(node, ast.AugAssign):
            self._count(node.target, scope, is_loop=is_loop)
        for target, value in assigned(node):
            self._add(target, value, scope)
            is_counter = not isinstance(target, ast.Name) or scope.is_outside(target.id)
            if is_loop and is_counter and isinstance(value, _SIMPLE):
                self._count(target, scope, is_loop=True)

    def _add(
        self, target: ast.AST, value: ast.AST, scope: _Scope, loop: ast.AST | None = None
    ) -> None:
        self._edges.append(_Edge(frozenset(self._keys(target, scope)), value, scope, loop))

    @staticmethod
    def _keys(target: ast.AST, scope: _Scope) -> Iterator[Key]:
        for each in walk([target]):
            match each:
                case ast.Name(ctx=ast.Store()):
                    yield scope.key(each.id)
                case ast.Attribute(ctx=ast.Store()):
                    yield (".", each.attr)
                    yield (_OBJECT, _ident(each.value))
                case ast.Subscript(ctx=ast.Store(), slice=ast.Constant(value=str(name))):
                    yield (".", name)

    def _change(self, call: ast.Call, scope: _Scope) -> None:
        """``stream.seek(state.step)`` and ``consume(items, state.step)``."""
        values = given(call)
        found = {each.id for each in walk(values) if isinstance(each, ast.Name)} & self._iterators
        if isinstance(call.func, ast.Attribute):
            found |= {_ident(call.func.value)}
        keys = frozenset((_OBJECT, name) for name in found)
        self._edges += [_Edge(keys, each, scope) for each in values if keys]

    def _advance(self, loop: ast.For, scope: _Scope) -> None:
        """``for _ in range(state.step): next(items)``."""
        calls = [each for each in walk(loop.body) if isinstance(each, ast.Call)]
        drawn = [each.args[0] for each in calls if called(each) == "next" and each.args]
        keys = frozenset((_OBJECT, _ident(each)) for each in drawn)
        self._edges.append(_Edge(keys, loop.iter, scope, loop))

    def _count(self, target: ast.AST, scope: _Scope, *, is_loop: bool) -> None:
        keys = {each for each in self._keys(target, scope) if each[0] != _OBJECT}
        self.locals |= keys
        if isinstance(target, ast.Name):
            is_kept = scope.is_outside(target.id) or (scope.is_top and is_loop)
        else:
            is_kept = not scope.is_init
        self.counters |= keys if is_kept else set()

    def _register(self, node: ast.Call, scope: _Scope) -> None:
        for each in node.keywords:
            if each.arg not in _KNOWN and isinstance(each.value, ast.Name):
                self.registered.add(scope.key(each.value.id))
            elif each.arg not in _KNOWN and isinstance(each.value, ast.Attribute):
                self.registered.add((".", each.value.attr))

    def _found_states(self) -> set[str]:
        """The names that the ``TrainState`` has in the script."""
        found = {f"{STATE}()"} | self._asked()
        aliases = [(_idents(each.value), _idents_of(each)) for each in self._edges]
        for call, _ in self._calls:
            aliases += [(_idents(value), {name}) for name, value in self._bound(call)]
            if called(call) == "run" and len(call.args) == 2:  # noqa: PLR2004  run(train, state)
                for function in self.functions.get(_ident(call.args[0]), []):
                    mine = [each.arg for each in _parameters(function)][:1]
                    aliases.append((_idents(call.args[1]), set(mine)))
        size = -1
        while size != len(found):
            size = len(found)
            for names, targets in aliases:
                found |= targets if names & found else set()
        return found

    def _asked(self) -> set[str]:
        """Names of what is asked whether to exit, without the script's own objects."""
        found, own = set[str](), {"", *(["self"] if EXIT in self.functions else [])}
        for tree in self._trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr == EXIT:
                    (own if isinstance(node.ctx, ast.Store) else found).add(_ident(node.value))
        for call, _ in self._calls:
            if called(call) == "ExitByRequest":
                found |= {_ident(each) for each in call.args[:1]}
        return found - own

    def _bind(self, call: ast.Call, scope: _Scope) -> None:
        """Arguments are assigned to parameters."""
        for function in self._targets(call):
            inner = self._scopes[function]
            for name, value in _pairs(call, function):
                self._edges.append(_Edge(frozenset({inner.key(name)}), value, scope))

    def _bound(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        for function in self._targets(call):
            yield from _pairs(call, function)

    def _targets(self, call: ast.Call) -> Iterator[Function]:
        for node in self.functions.get(called(call), []):
            if isinstance(node, Function):
                yield node
            for each in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
                if isinstance(each, Function) and each.name == "__init__":
                    yield each


class Flow:
    """What depends on some places of the state."""

    def __init__(
        self,
        script: Assignments,
        places: Collection[str],
        *,
        is_exact: bool = False,
        without: Collection[ast.AST] = (),
        known: Iterable[Key] = (),
    ) -> None:
        """Follow all assignments.

        Args:
            is_exact: as in :meth:`Assignments.atoms`.
            without: loops whose items are not followed.
            known: more that depends on how far training is.
        """
        self._script, self._is_exact = script, is_exact
        self._found = {("state", each) for each in places}
        self._found |= script.counters | script.registered | set(known)
        steps = [each for each in script.steps(is_exact=is_exact) if each[2] not in without]
        size = -1
        while size != len(self._found):
            size = len(self._found)
            for targets, atoms, _ in steps:
                if not self._found.isdisjoint(atoms):
                    self._found |= targets

    def reaches(self, node: ast.AST, scope: _Scope) -> bool:
        """Whether this expression depends on them; of ``zip`` all parts have to."""
        if isinstance(node, ast.Call) and called(node) in _AROUND and node.args:
            return self.reaches(node.args[0], scope)
        if isinstance(node, ast.Call) and called(node) == "zip" and node.args:
            return all(self.reaches(each, scope) for each in node.args)
        if _ident(node) not in {"", "self"} and (_OBJECT, _ident(node)) in self._found:
            return True
        atoms = self._script.atoms(node, scope, is_exact=self._is_exact)
        return not self._found.isdisjoint(atoms)


def _with_methods(node: Any) -> Iterator[Any]:
    """A function, or a class and its methods."""
    yield node
    if isinstance(node, ast.ClassDef):
        yield from (each for each in node.body if isinstance(each, Function))


def _expressions(nodes: Iterable[ast.AST], *, is_exact: bool) -> Iterator[ast.AST]:
    """The expressions in a function; exact: of what it returns."""
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            continue
        is_result = isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
        if is_result or (not is_exact and isinstance(node, ast.expr)):
            yield node
        else:
            yield from _expressions(ast.iter_child_nodes(node), is_exact=is_exact)


def _iterators(trees: Iterable[ast.AST]) -> Iterator[str]:
    """Names of what ``iter()`` has made."""
    for tree in trees:
        for node in ast.walk(tree):
            for target, value in assigned(node):
                if isinstance(value, ast.Call) and called(value) == "iter":
                    yield _ident(target)


def given(node: ast.Call) -> list[ast.AST]:
    """The arguments of a call."""
    return [*node.args, *(each.value for each in node.keywords)]


def _ident(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _idents(node: ast.AST) -> set[str]:
    """The name of what is assigned as it is, or that a ``TrainState`` is made."""
    if isinstance(node, ast.Call) and called(node) == STATE:
        return {f"{STATE}()"}
    return {_ident(node)} - {""}


def _idents_of(edge: _Edge) -> set[str]:
    names = {name for kind, name in edge.targets if kind != _OBJECT}
    return names if edge.loop is None else set()


def _parameters(function: ast.AST) -> list[ast.arg]:
    """Those that may be given by place, without ``self``."""
    if not isinstance(function, Function):
        return []
    found = [*function.args.posonlyargs, *function.args.args]
    return found[1:] if found and found[0].arg in {"self", "cls"} else found


def _pairs(call: ast.Call, function: Function) -> Iterator[tuple[str, ast.expr]]:
    places = [each.arg for each in _parameters(function)]
    yield from zip(places, call.args, strict=False)
    names = {each.arg for each in arguments(function)}
    for each in call.keywords:
        if each.arg in names:
            yield each.arg, each.value
