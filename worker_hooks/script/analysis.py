"""Finds the local variables that a training loop carries from one step to the next.

After a replacement or a resume the training function is entered again, and its locals begin anew if
nothing keeps them. A variable is *carried* if it is written in a loop with commits, and an
iteration reads, or what follows the loop reads, what an earlier iteration wrote. Pure: syntax trees
in, findings out. What it does not understand it takes for harmless, so it never stands in the way
of a training.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

BATCHES = "batches"
LOOPS = frozenset({BATCHES, "epochs"})
EXIT = "should_exit"

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.Module
_Loop = ast.For | ast.AsyncFor | ast.While
_Quiet = ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONTAINERS = {
    *("list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict", "bytearray"),
    *("zeros", "ones", "full", "empty", "tensor", "array"),
    *("zeros_like", "ones_like", "full_like", "empty_like"),
}
MUTATORS = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"),
    *("pop", "popleft", "popitem", "remove", "discard", "clear", "subtract", "sort", "reverse"),
}
_OF_OTHERS = {"clip_grad_norm_", "clip_grad_value_"}  # a framework's: they change gradients
_PRINTERS = {
    *("print", "pprint", "write", "info", "warning", "debug", "error"),
    *("log", "log_metrics", "log_metric", "add_scalar", "add_scalars", "add_histogram"),
    *("set_postfix", "set_postfix_str", "set_description"),
}
_CALCULATORS = {
    *("abs", "bool", "dict", "float", "format", "int", "join", "len", "list", "max", "min", "repr"),
    *("round", "sorted", "str", "sum", "tuple", "item", "tolist", "mean", "get", "time"),
    *("perf_counter", "exp", "sqrt"),
}
_LOGGERS = {"logging", "logger", "wandb", "mlflow", "writer", "tensorboard", "pbar", "tqdm"}


class Carried(NamedTuple):
    """A variable that a loop carries."""

    name: str
    line: int  # where the loop writes it
    is_only_printed: bool  # it flows into nothing but output
    is_result: bool = False  # into nothing else but what the training function returns
    into: tuple[str, ...] = ()  # other variables into which it flows


class LoopFindings(NamedTuple):
    """What the loops of one function, or of a script's top level, do to its variables."""

    carried: tuple[Carried, ...]
    temporary: frozenset[str]  # written in each iteration before they are read
    calls: frozenset[str]  # functions, and methods of ``self``, that are called in it


def analyse(
    scope: _Scope,
    commits: Collection[str] = (),
    classes: Collection[str] = (),
    *,
    is_entry: bool = False,
) -> LoopFindings:
    """Look at one function or at a script's top level.

    Args:
        commits: names of functions with a loop of commits in them.
        classes: names of the script's own classes, whose objects have methods that change them.
        is_entry: training is over when the function returns.
    """
    return _Analysis(scope, commits, classes).findings(is_entry=is_entry)


def asks_for_batches(tree: ast.AST) -> bool:
    """Whether ``batches()`` is called in it: around that loop variables are kept."""
    return any(isinstance(each, ast.Attribute) and each.attr == BATCHES for each in ast.walk(tree))


def has_commits(scope: _Scope) -> bool:
    """Whether the loop over the training's data, or one that asks whether to exit, is in it."""
    made_of = _made_of_batches(scope.body)
    return any(_is_commit(node, (), made_of) for node in walk(scope.body))


def _made_of_batches(body: Iterable[ast.stmt]) -> set[str]:
    """Names of what hands out batches: ``bar = tqdm(state.batches(loader))``."""
    found: set[str] = set()
    pairs = [pair for node in walk(body) for pair in assigned(node)]
    size = -1
    while size != len(found):
        size = len(found)
        for target, value in pairs:
            calls = {called(each) for each in walk([value]) if isinstance(each, ast.Call)}
            if calls & LOOPS or loads([value]) & found:
                found |= stored([target]) if isinstance(value, ast.Call) else set()
    return found


class _Analysis:
    def __init__(self, scope: _Scope, commits: Collection[str], classes: Collection[str]) -> None:
        self._scope = scope
        self._commits = commits
        self._inner: dict[str, set[str]] = {}  # inner functions, and what they read from outside
        self._inner_writes: dict[str, set[str]] = {}  # and what they assign outside
        self._found: dict[str, int] = {}
        self._written: set[str] = set()
        self._validations = 0  # blocks around, in which no step is made
        self._locals = stored(scope.body)
        if not isinstance(scope, ast.Module):
            self._locals |= {each.arg for each in arguments(scope)}
            for node in walk(scope.body):
                if isinstance(node, ast.Global | ast.Nonlocal):
                    self._locals -= set(node.names)
        for node in walk(scope.body):
            if isinstance(node, _Function):
                self._inner[node.name] = _read_outside(node)
                self._inner_writes[node.name] = _outer(node) & stored(node.body)
            elif isinstance(node, ast.ClassDef):
                self._inner[node.name] = loads(node.body)
        self._made_of = _made_of_batches(scope.body)
        self._changeable = _changeable(scope.body, {*_CONTAINERS, *classes})

    def findings(self, *, is_entry: bool) -> LoopFindings:
        if not _without_gradients(getattr(self._scope, "decorator_list", ())):
            self._block(self._scope.body, frozenset(), _Exits(frozenset(), frozenset()))
        uses = Uses(self._scope.body, self._changeable)
        used = steering = uses.steering
        if is_entry:
            steering = Uses(self._scope.body, self._changeable, returns=False).steering
        carried = tuple(
            Carried(
                name,
                line,
                name not in used,
                name in used - steering,
                tuple(sorted(uses.reached(name) & self._locals)),
            )
            for name, line in sorted(self._found.items(), key=itemgetter(1, 0))
        )
        temporary = frozenset(self._written - self._found.keys()) - frozenset(
            *[set().union(*self._inner.values())]
        )
        return LoopFindings(carried, temporary, frozenset(calls(self._scope.body)))

    # --- liveness: what is read later before it is written, from the end to the begin -------------

    def _block(self, body: Iterable[ast.stmt], live: frozenset[str], to: _Exits) -> frozenset[str]:
        for statement in reversed(list(body)):
            live = self._statement(statement, live, to)
        return live

    def _statement(self, node: ast.stmt, live: frozenset[str], to: _Exits) -> frozenset[str]:
        match node:
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, live, to)
            case ast.If():
                either = self._block(node.body, live, to) | self._block(node.orelse, live, to)
                return either | self._reads([node.test])
            case ast.Try() | ast.TryStar():
                after = self._block(node.finalbody, live, to)
                caught = [self._block(each.body, after, to) for each in node.handlers]
                through = self._block([*node.body, *node.orelse], after, to)
                return through.union(*caught)
            case ast.With() | ast.AsyncWith():
                is_validation = _without_gradients(node.items)
                self._validations += is_validation
                inside = self._block(node.body, live, to)
                self._validations -= is_validation
                return (inside - stored(node.items)) | self._reads(node.items)
            case ast.Match():
                cases = [self._block(each.body, live, to) for each in node.cases]
                return live.union(*cases) | self._reads([node.subject])
            case ast.Break():
                return to.after
            case ast.Continue():
                return to.again
            case ast.Return() | ast.Raise():
                return self._reads([node])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return live - {node.name}
        return (live - stored([node])) | self._reads([node])

    def _loop(self, node: _Loop, live: frozenset[str], to: _Exits) -> frozenset[str]:
        after = self._block(node.orelse, live, to)
        head = [node.test] if isinstance(node, ast.While) else []
        targets = frozenset() if isinstance(node, ast.While) else stored([node.target])
        again, known = after, None
        while again != known:
            known = again
            begin = self._block(node.body, known, _Exits(live, known)) | self._reads(head)
            again = after | (begin - targets)
        begin -= targets
        if _is_commit(node, self._commits, self._made_of) and not self._validations:
            self._note(node, begin)
        # a loop is taken to run at least once: what it always sets is there behind it
        return begin if isinstance(node, ast.While) else begin | self._reads([node.iter])

    def _note(self, loop: _Loop, begin: frozenset[str]) -> None:
        written = _places(loop.body, self._changeable)
        if isinstance(loop, ast.While):
            written |= _places([loop.test], {})
        for node in walk(loop.body):
            if isinstance(node, ast.Name):
                for name in self._inner_writes.get(node.id, ()):
                    written.setdefault(name, node.lineno)
        targets = set() if isinstance(loop, ast.While) else stored([loop.target])
        self._written |= (written.keys() | targets) & self._locals
        for name in written.keys() & begin & self._locals:
            self._found.setdefault(name, written[name])

    def _reads(self, nodes: Iterable[ast.AST]) -> frozenset[str]:
        found = loads(nodes)
        for name in found & self._inner.keys():
            found |= self._inner[name]
        return frozenset(found)


class _Exits(NamedTuple):
    """What is read later where a statement leaves its block."""

    after: frozenset[str]  # behind the loop
    again: frozenset[str]  # in its next iteration


def _is_commit(node: ast.AST, commits: Collection[str], made_of: Collection[str]) -> bool:
    """Whether this is a loop in which steps are committed.

    Args:
        commits: names of functions with such a loop.
        made_of: names of what hands out batches.
    """
    if not isinstance(node, _Loop):
        return False
    if not isinstance(node, ast.While) and _base(node.iter) in made_of:
        return True
    for each in walk([node]):
        if isinstance(each, ast.Attribute) and each.attr == EXIT:
            return True
        if isinstance(each, ast.Call):
            name = called(each)
            if name == "next" and each.args and _base(each.args[0]) in made_of:
                return True
            if name in commits or (isinstance(each.func, ast.Attribute) and name in LOOPS):
                return True
    return False


def _without_gradients(nodes: Iterable[ast.AST]) -> bool:
    names = {called(each) for each in walk(nodes) if isinstance(each, ast.Call)}
    return not names.isdisjoint({"no_grad", "inference_mode"})


def _read_outside(function: _Function) -> set[str]:
    """The variables of the outer function that an inner one reads."""
    mine = stored(function.body) | {each.arg for each in arguments(function)}
    return loads(function.body) - (mine - _outer(function))


def _outer(function: _Function) -> set[str]:
    """The variables that a function declares to be from outside."""
    return {
        name
        for node in walk(function.body)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }


def walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes, in order, without the bodies of inner functions."""
    for node in nodes:
        yield node
        if not isinstance(node, _INNER):
            yield from walk(ast.iter_child_nodes(node))


def loads(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are read, also in comprehensions and lambdas, without their own variables."""
    found: set[str] = set()
    for node in nodes:
        mine: set[str] = set()
        match node:
            case ast.Name(ctx=ast.Load()):
                found.add(node.id)
            case ast.AugAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Lambda():
                mine = {each.arg for each in arguments(node)}
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                mine = set().union(*(stored([each.target]) for each in node.generators))
        found |= loads(ast.iter_child_nodes(node)) - mine
    return found


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are assigned, in any way, in this scope."""
    found: set[str] = set()
    for node in walk(nodes):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                found.add(node.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.alias():
                found.add((node.asname or node.name).partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    theirs = [n for n in walk(nodes) if isinstance(n, comprehensions)] if found else []
    inside = {name for each in theirs for g in each.generators for name in _targets(g.target)}
    outside = {
        each.id
        for each in _outside(nodes, comprehensions)
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
    }
    return found - (inside - outside)


def _outside(nodes: Iterable[ast.AST], kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    for node in nodes:
        yield node
        if not isinstance(node, (*_INNER, *kinds)):
            yield from _outside(ast.iter_child_nodes(node), kinds)


def _targets(target: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


def _places(nodes: Iterable[ast.AST], changeable: Collection[str]) -> dict[str, int]:
    """The names that are written, and those in ``changeable`` that are changed, with a line."""
    nodes, found = list(nodes), dict[str, int]()
    names = stored(nodes)
    for node in walk(nodes):
        name = ""
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()) if node.id in names:
                name = node.id
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store()):
                name = _base(node)
            case ast.Call(func=ast.Name(id="next"), args=[ast.Name(id=iterator), *_]):
                name = iterator
            case ast.Call(func=ast.Attribute(attr=attr, value=owner)):
                is_in_place = attr.endswith("_") and attr[:1] != "_" and attr not in _OF_OTHERS
                is_change = attr in MUTATORS or is_in_place
                name = _base(owner) if is_change else ""
        line = getattr(node, "lineno", 0)
        if name and (name in names or name in changeable):
            found.setdefault(name, line)
    return found


def _changeable(nodes: Iterable[ast.AST], makers: Collection[str]) -> set[str]:
    """The names that are given a container, an object of the script's own, or an iterator."""
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.BinOp)
    found, iterators = set(), set()
    for node in walk(nodes):
        for target, value in assigned(node):
            is_made = isinstance(value, ast.Call) and called(value) in makers
            if is_made or isinstance(value, literals):
                found |= stored([target])
            elif isinstance(value, ast.Call) and not asks_for_batches(value):
                iterators |= stored([target])
    drawn = {
        _base(node.args[0])
        for node in walk(nodes)
        if isinstance(node, ast.Call) and called(node) == "next" and node.args
    }
    return found | (iterators & drawn)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what, tuples one by one."""
    match node:
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.Assign(targets=targets, value=value):
            for each in targets:
                if isinstance(each, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(each.elts, value.elts, strict=False)
                else:
                    yield each, value


def _base(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def calls(nodes: Iterable[ast.AST]) -> set[str]:
    """Functions that are called by their plain names, and methods of the first argument."""
    found = set()
    for node in walk(nodes):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                found.add(f"self.{name}")
    return found


def arguments(node: _Function | ast.Lambda) -> list[ast.arg]:
    """All parameters of a function."""
    told = node.args
    rest = [each for each in (told.vararg, told.kwarg) if each is not None]
    return [*told.posonlyargs, *told.args, *told.kwonlyargs, *rest]


# --- what a variable steers ---------------------------------------------------------------------


class Uses:
    """Where the names of a function flow to."""

    def __init__(
        self, body: Iterable[ast.stmt], containers: Collection[str], *, returns: bool = True
    ) -> None:
        """Read a function. ``containers``: names of those that are made in it."""
        self._containers = containers
        self._returns = returns
        self.steering: set[str] = set()  # flow into more than what is printed
        self.flows: set[tuple[str, str]] = set()
        self._block(body)
        self.steering |= self._closed(self.steering, [(to, name) for name, to in self.flows])

    def reached(self, name: str) -> set[str]:
        """The names that this one flows into."""
        return self._closed({name}, self.flows) - {name}

    @staticmethod
    def _closed(names: set[str], steps: Collection[tuple[str, str]]) -> set[str]:
        """These names, and those that a step leads to from one of them."""
        found, size = set(names), -1
        while size != len(found):
            size = len(found)
            found |= {to for name, to in steps if name in found}
        return found

    def _block(self, body: Iterable[ast.stmt], tests: frozenset[str] = frozenset()) -> bool:
        """Note all uses; whether the block does no more than to print and to assign.

        ``tests``: what decides whether they are executed.
        """
        quiet = [self._statement(each, tests) for each in body]
        return all(quiet)

    def _statement(self, node: ast.stmt, tests: frozenset[str]) -> bool:
        if isinstance(node, _Quiet):
            return True
        match node:
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Expr(value=ast.Call() as call):
                return self._call(call, tests)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assign(node, tests)
            case ast.If():
                mine = frozenset(loads([node.test]))
                is_quiet = self._block([*node.body, *node.orelse], tests | mine)
                if not is_quiet:
                    self.steering |= mine
                return is_quiet
            case ast.For() | ast.AsyncFor() | ast.While():
                self.steering |= loads([node.test if isinstance(node, ast.While) else node.iter])
                self._block([*node.body, *node.orelse], tests)
                return False
            case ast.With() | ast.AsyncWith():
                self.steering |= loads(node.items)
                return self._block(node.body, tests)
            case ast.Try() | ast.TryStar():
                caught = [each for handler in node.handlers for each in handler.body]
                return self._block([*node.body, *node.orelse, *node.finalbody, *caught], tests)
        return self._other(node, tests)

    def _other(self, node: ast.stmt, tests: frozenset[str]) -> bool:
        self._calculated([node])
        if self._returns or not isinstance(node, ast.Return):
            self.steering |= loads([node])
        self.steering |= tests
        return False

    def _calculated(self, nodes: Iterable[ast.AST]) -> None:
        """Calls in these may do more than to calculate."""
        for each in walk(nodes):
            if isinstance(each, ast.Call) and called(each) not in _CALCULATORS:
                self.steering |= loads([*each.args, *each.keywords])

    def _call(self, call: ast.Call, tests: frozenset[str]) -> bool:
        name, owner = called(call), _base(call.func)
        if name in _PRINTERS or owner in _LOGGERS:
            self._calculated([*call.args, *call.keywords])
            return True
        read = loads([*call.args, *call.keywords]) | tests
        if name in MUTATORS and owner in self._containers:
            self.flows |= {(each, owner) for each in read}
            return True
        self.steering |= read | loads([call.func])
        return False

    def _assign(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, tests: frozenset[str]
    ) -> bool:
        read = (loads([node.value]) if node.value is not None else set()) | tests
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                name = _base(each.value if isinstance(each, ast.Starred) else each)
                if not isinstance(each, ast.Name) and name not in self._containers:
                    self.steering |= read  # an object that may be used anywhere
                else:
                    self.flows |= {(source, name) for source in read}
        return True
