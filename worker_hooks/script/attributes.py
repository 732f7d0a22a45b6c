"""Plain attributes of modules, classes and functions that the script assigns while it trains.

So are those of parameters and buffers, and what the hooks of all these hold. The source tells which
attributes are assigned outside of constructors, and read. Only these are watched, so that a model
of hundreds of modules costs nothing if it has none of them.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from worker_hooks.distributed.module_flags import Flags
from worker_hooks.script.analysis import MUTATORS
from worker_hooks.script.containers import CONTAINERS, Container, objects_in
from worker_hooks.script.values import FIXED, has_graph, is_generator
from worker_hooks.script.watch import Group, is_object, local_modules

REGISTERED = "TrainState"
"""Names of registered modules' attributes begin so: no value of a script has the name."""

_INITS = {"__init__", "__post_init__", "__setstate__"}
_OF_CLASSES = {"__new__", "__init_subclass__", "__class_getitem__"}
_OF_TENSORS = {"data", "grad", "requires_grad"}
_OF_OPTIMIZERS = {"state", "param_groups"}
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # ``training`` among them
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # by torch.compile, by checkpoint_wrapper
_ROOTS = (torch.nn.Module, torch.optim.Optimizer)
_HOOKS = {
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
}
"""Where torch keeps the hooks of modules, tensors and optimizers."""

_LOOKED_AT = {ast.Attribute, ast.Call, ast.Subscript, ast.Expr, ast.AugAssign, ast.Assign}
_LEAVES = {ast.Name, ast.Constant, ast.Load, ast.Store, *ast.operator.__subclasses__()}
_NOBODY: Any = object()

ClassName = tuple[str, str]
"""A module's name and a class's qualified name."""


class Attributes:
    """A few attributes of one object, as a mapping. A part of a step's graph is no value."""

    def __init__(self, thing: Any, names: frozenset[str]) -> None:
        """Show those of ``names`` that the object has; it may get others of them later."""
        self.attributes = vars(thing)
        self._thing = thing
        self._names = names

    def get(self, key: str, default: Any) -> Any:
        """The value."""
        value = self.attributes.get(key, default)
        return default if _is_of_graph(value) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(self._thing, type):
            setattr(self._thing, key, value)
        else:
            self.attributes[key] = value

    def pop(self, key: str, default: Any) -> Any:
        """Remove it, if it is there."""
        found = self.attributes.get(key, _NOBODY)
        if found is _NOBODY:
            return default
        if isinstance(self._thing, type):
            delattr(self._thing, key)
        else:
            del self.attributes[key]
        return found

    def __len__(self) -> int:
        return len(self._names & self.attributes.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names & self.attributes.keys()))

    def __contains__(self, key: object) -> bool:
        return key in self._names


def _is_of_graph(value: Any) -> bool:
    if type(value) in {list, tuple, dict}:
        items = value.values() if type(value) is dict else value
        return any(isinstance(each, Tensor) and has_graph(each) for each in items)
    return isinstance(value, Tensor) and has_graph(value)


class Assigned(NamedTuple):
    """Names of attributes that a script's sources assign outside of constructors, and read.

    For an object of a library's class, which the library reads, they need not be read.
    """

    of_self: dict[ClassName, frozenset[str]]  # on the object of a method, by its class
    of_classes: dict[ClassName, frozenset[str]]  # on ``cls`` or ``type(self)``, by the class
    of_names: dict[str, frozenset[str]]  # on a variable, a class or a function, by its name
    of_others: frozenset[str]  # on anything else than ``self``
    reads: frozenset[str]


def read(sources: Iterable[tuple[str, str]]) -> Assigned:
    """Read sources. ``sources``: by names of modules; one that is not Python is left out."""
    reader = _Reader()
    for module, text in sources:
        try:
            reader.read(module, ast.parse(text))
        except (SyntaxError, ValueError, RecursionError):
            continue
    return reader.found()


class _Place(NamedTuple):
    """Where a node of a syntax tree is."""

    aliases: dict[str, ast.expr]  # a function's variables that stand for attributes
    name: str = ""  # qualified, with a dot at its end
    owner: ClassName | None = None  # the class around
    first: str = ""  # the argument of a method around that is the object, or the class
    is_class_body: bool = False
    is_classmethod: bool = False
    is_init: bool = False


class _Reader:
    def __init__(self) -> None:
        self._of_self: dict[ClassName, set[str]] = defaultdict(set)
        self._of_classes: dict[ClassName, set[str]] = defaultdict(set)
        self._of_names: dict[str, set[str]] = defaultdict(set)
        self._of_others: set[str] = set()
        self._reads: Counter[str] = Counter()
        self._made_anew: dict[ClassName, Counter[str]] = {}  # in forward; how often it reads them
        self._unread: set[int] = set()  # ids of nodes that are only written to

    def read(self, module: str, tree: ast.Module) -> None:
        self._unread.clear()
        for node in tree.body:
            self._visit(node, _Place({}), module)

    def found(self) -> Assigned:
        for owner, names in self._made_anew.items():
            # none but forward reads it, and after it was assigned
            self._of_self[owner] -= {n for n, count in names.items() if count == self._reads[n]}
        others = frozenset(self._of_others - _OF_TENSORS - _OF_MODULES)
        return Assigned(
            {owner: frozenset(names - _OF_MODULES) for owner, names in self._of_self.items()},
            {owner: frozenset(names) for owner, names in self._of_classes.items()},
            {name: frozenset(names) for name, names in self._of_names.items()},
            others,
            frozenset(self._reads),
        )

    def _visit(self, node: ast.AST, place: _Place, module: str) -> None:
        kind = type(node)
        if kind is ast.ClassDef:
            place = self._enter_class(cast(ast.ClassDef, node), place, module)
        elif kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
            place = _within(cast(ast.FunctionDef, node), place)
        elif kind is ast.Lambda:
            place = place._replace(is_init=False)
        elif kind in _LOOKED_AT:
            self._look_at(node, place)
        for field in node._fields:
            found = getattr(node, field, None)
            for each in found if type(found) is list else (found,):
                if isinstance(each, ast.AST) and type(each) not in _LEAVES:
                    self._visit(each, place, module)

    def _enter_class(self, node: ast.ClassDef, place: _Place, module: str) -> _Place:
        owner = module, f"{place.name}{node.name}"
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "forward":
                self._made_anew[owner] = _made_anew(each)
        return _Place({}, f"{owner[1]}.", owner, is_class_body=True)

    def _look_at(self, node: ast.AST, place: _Place) -> None:
        match node:
            case ast.Attribute():
                self._attribute(node, place)
            case ast.Call():
                self._call(node, place)
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                self._change(node.value, place, is_read=False)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=owner))):
                if _changes_owner(name):
                    self._change(owner, place, is_read=False)
            case ast.AugAssign(target=ast.Name() as target):
                self._change(target, place, is_read=True)
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Attribute() | ast.Subscript() as value
            ):
                place.aliases[name] = value

    def _attribute(self, node: ast.Attribute, place: _Place) -> None:
        if isinstance(node.ctx, ast.Store):
            self._note(node.attr, node.value, place)
        elif isinstance(node.ctx, ast.Load) and id(node) not in self._unread:
            self._reads[node.attr] += 1

    def _call(self, node: ast.Call, place: _Place) -> None:
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[base, ast.Constant(value=str(n)), *_]):
                self._note(n, base, place)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(n)), *_]):
                self._reads[n] += 1
            case ast.Call(func=ast.Attribute(attr=name, value=owner)) if _changes_owner(name):
                self._change(owner, place, is_read=True)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[target, *_]):
                if name[-1:] == "_" or name in {"next", "shuffle", "heappush", "heappop"}:
                    self._change(target, place, is_read=True)
        for each in node.keywords:
            if each.arg == "out":
                self._change(each.value, place, is_read=True)

    def _change(self, node: ast.AST, place: _Place, *, is_read: bool) -> None:
        """The value of a node is changed in place."""
        if isinstance(node, ast.Name):
            node = place.aliases.get(node.id, node)
            is_read = True
        while isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Attribute) and node.attr == "data"
        ):
            node = node.value
        if isinstance(node, ast.Attribute):
            self._note(node.attr, node.value, place)
            if not is_read:
                self._unread.add(id(node))

    def _note(self, attribute: str, base: ast.AST, place: _Place) -> None:
        """An attribute of a base is assigned or changed."""
        owner = place.owner
        match base:
            case ast.Name(id=name) if owner is not None and name == place.first:
                if place.is_classmethod:
                    self._of_classes[owner].add(attribute)
                elif not place.is_init:
                    self._of_self[owner].add(attribute)
                return
            case ast.Name(id=name):
                self._of_names[name].add(attribute)
            case ast.Attribute(attr="__class__") | ast.Call(func=ast.Name(id="type")) if owner:
                self._of_classes[owner].add(attribute)
        self._of_others.add(attribute)


def _within(node: ast.FunctionDef | ast.AsyncFunctionDef, place: _Place) -> _Place:
    """The place of a function's body. A function in a constructor, a hook say, is called later."""
    arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    name = f"{place.name}{node.name}.<locals>."
    if place.is_class_body:
        first = "" if "staticmethod" in decorators else next(iter(arguments), "")
        is_classmethod = "classmethod" in decorators or node.name in _OF_CLASSES
        is_init = node.name in _INITS
        return _Place({}, name, place.owner, first, False, is_classmethod, is_init)
    first = "" if place.first in arguments else place.first
    return place._replace(aliases=dict(place.aliases), name=name, first=first, is_init=False)


def _changes_owner(method: str) -> bool:
    return method in MUTATORS or (method[-1:] == "_" and method[:1] != "_")


def _made_anew(forward: ast.FunctionDef) -> Counter[str]:
    """Attributes of ``self`` that each call assigns before it reads them; how often it does."""
    if not forward.args.args:
        return Counter()
    first, seen, found = forward.args.args[0].arg, set[str](), set[str]()
    reads: Counter[str] = Counter()
    for statement in forward.body:
        value = statement.value if isinstance(statement, ast.Assign) else statement
        read = _attributes_of(value, first)
        reads.update(read)
        seen |= read.keys()
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            more = _attributes_of(target, first, is_stored=False)
            reads.update(more)
            seen |= more.keys()
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                if target.value.id == first and target.attr not in seen:
                    found.add(target.attr)
                seen.add(target.attr)
    return Counter({name: reads[name] for name in found})


def _attributes_of(node: ast.AST, first: str, *, is_stored: bool = True) -> Counter[str]:
    """The attributes of the first argument that are used in it.

    ``is_stored``: whether those count that are assigned.
    """
    return Counter(
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == first
        and (is_stored or not isinstance(each.ctx, ast.Store))
    )


class AttributeFinder:
    """Finds the holders of such attributes."""

    def __init__(self, registered: Callable[[], Iterable[tuple[str, object]]]) -> None:
        """``registered`` returns modules and optimizers with names."""
        self._registered = registered
        self._assigned: Assigned | None = None
        self.is_in_loop = False
        """Values are restored for a loop, before which the script has made its DDPs."""

    def plain(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """What registered modules and their tensors hold: names, where it is, and its key there.

        Numbers and texts; on tensors also what the sources assign by that name, and read.
        """
        found = self._assigned
        assigned = frozenset[str]() if found is None else found.of_others & found.reads
        for name, thing in self._registered():
            inside = thing.named_modules() if isinstance(thing, torch.nn.Module) else ()
            for path, each in inside:
                parts = [name, *(part for part in path.split(".") if part not in {"", *_WRAPPED})]
                for key, value in vars(each).items():
                    if type(value) in FIXED and key[0] != "_" and key not in _OF_MODULES:
                        yield ".".join([*parts, key]), vars(each), key
                for tensor_name, tensor in _tensors_of(each):
                    for key, value in vars(tensor).items():
                        if key[0] != "_" and (type(value) in FIXED or key in assigned):
                            yield ".".join([*parts, tensor_name, key]), vars(tensor), key

    def walk(self) -> Walk:
        """Begin with what is registered."""
        modules = local_modules()
        if self._assigned is None:
            files = [(each.__name__, str(each.__file__)) for each in modules]
            self._assigned = read((name, "".join(linecache.getlines(file))) for name, file in files)
        walk = Walk(self._assigned, {each.__name__ for each in modules})
        for name, thing in self._registered():
            walk.things += walk.look_into(f"{REGISTERED}.{name}", thing)
            walk.hooks += _hooks_of(f"{REGISTERED}.{name}", thing)
            if isinstance(thing, torch.nn.Module):
                flags = Flags(thing, lambda: self.is_in_loop)
                walk.groups.append(Group(f"{REGISTERED}.{name}.flags.", flags))
        return walk


class Walk:
    """What one walk through the script's values finds beside values and objects."""

    def __init__(self, assigned: Assigned, modules: Collection[str]) -> None:
        """``modules``: the names of the script's own."""
        self.groups: list[Group] = []
        self.containers: list[Container] = []
        self.iterators: list[str] = []
        """Names of modules' attributes that the script advances, and that nobody can put back."""
        self.things: list[tuple[str, Any]] = []
        """What registered modules hold, with names: perhaps objects of the script's own."""
        self.hooks: list[tuple[str, Any]] = []
        """Hooks of what is registered, with names. Where the script has a name for one, or for
        what it holds, that name is the better one."""
        self.modules = modules
        self._assigned = assigned
        self._seen: set[int] = set()
        self._of_classes: dict[type, _OfClass] = {}

    def meet(self, name: str, thing: Any) -> list[tuple[str, Any]]:
        """A value of the script; what is in it that may be an object or hold some."""
        return [*self.look_into(name, thing), *_hooks_of(name, thing)]

    def look_into(self, name: str, thing: Any) -> list[tuple[str, Any]]:
        """The same without its hooks."""
        if isinstance(thing, torch.nn.Module):
            found = []
            for path, each in thing.named_modules():
                # a wrapper; the keys of a ScriptModule's are a list
                if not {*each._modules.keys()}.isdisjoint(_WRAPPED):  # noqa: SLF001
                    continue
                parts = [name, *(part for part in path.split(".") if part not in {"", *_WRAPPED})]
                found += self._take(".".join(parts), each, is_top=not path)
                for key, tensor in _tensors_of(each):
                    self._take_tensor(".".join([*parts, key]), tensor)
            return found
        if isinstance(thing, torch.optim.Optimizer):
            return self._take(name, thing, is_top=True)
        if isinstance(thing, type | FunctionType):
            if thing.__module__ in self.modules:
                self._take_code(thing)
            return []
        container, found = objects_in(name, thing, self.modules)
        if container is not None:
            self.containers.append(container)
        return found

    def _take(self, name: str, thing: Any, *, is_top: bool) -> list[tuple[str, Any]]:
        """A module or an optimizer; ``is_top``: the script may give it new attributes."""
        if id(thing) in self._seen:
            return []
        self._seen.add(id(thing))
        held = vars(thing)
        of_class = self._names_of(type(thing))
        names = of_class.mine | (of_class.others & held.keys())
        if is_top:
            names |= of_class.others & self._assigned.reads
        if isinstance(thing, torch.optim.Optimizer):
            names -= _OF_OPTIMIZERS
        # who draws from one changes it, and assigns nothing
        others = {key for key in held.keys() - _OF_MODULES if type(held[key]) not in FIXED}
        names |= {key for key in others if is_generator(held[key])}
        self.iterators += [f"{name}.{key}" for key in names if _is_iterator(held.get(key))]
        if names:
            self.groups.append(Group(f"{name}.", Attributes(thing, names)))
        return [
            (f"{name}.{key}", each)
            for key, each in held.items()
            if key not in _OF_MODULES
            and (type(each) in CONTAINERS or is_object(each, self.modules))
        ]

    def _take_tensor(self, name: str, tensor: Tensor) -> None:
        """A parameter or a buffer; most have no attributes, and then this costs nothing later."""
        names = self._assigned.of_others & self._assigned.reads & vars(tensor).keys()
        if names and id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self.groups.append(Group(f"{name}.", Attributes(tensor, names)))

    def _names_of(self, kind: type) -> _OfClass:
        if kind not in self._of_classes:
            assigned, others = self._assigned, self._assigned.of_others
            own = [each for each in kind.__mro__ if each.__module__ in self.modules]
            mine = set[str]()
            for each in own:
                mine |= assigned.of_self.get(_key(each), set())
                mine |= others & vars(each).keys()  # a default
            is_read_elsewhere = not own or any(map(self._is_library, kind.__mro__))
            if not is_read_elsewhere:
                mine, others = mine & assigned.reads, others & assigned.reads
            self._of_classes[kind] = _OfClass(frozenset(mine), others)
        return self._of_classes[kind]

    def _is_library(self, base: type) -> bool:
        """Whether its methods may read what the script's sources do not."""
        is_plain = base in _ROOTS or base.__module__ in {"abc", "builtins", "typing"}
        return not is_plain and base.__module__ not in self.modules

    def _take_code(self, thing: Any) -> None:
        """A class or a function of the script's own."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        assigned = self._assigned
        names = set(assigned.of_names.get(thing.__name__, ()))
        names |= assigned.of_others & vars(thing).keys()
        for base in thing.__mro__ if isinstance(thing, type) else ():
            names |= assigned.of_classes.get(_key(base), set())
        names &= assigned.reads
        if names:
            module = "" if thing.__module__ == "__main__" else f"{thing.__module__}."
            # the variables of its closure have names without this
            inner = "" if isinstance(thing, type) else "__dict__."
            holder = Attributes(thing, frozenset(names))
            self.groups.append(Group(f"{module}{thing.__qualname__}.{inner}", holder))


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own, which have names within it."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _hooks_of(name: str, thing: Any) -> list[tuple[str, Any]]:
    """The hooks of a module and of all in it, or of an optimizer, with names."""
    holders = list[tuple[str, object]]()
    if isinstance(thing, torch.optim.Optimizer):
        holders.append((name, thing))
    for path, each in thing.named_modules() if isinstance(thing, torch.nn.Module) else ():
        inside = f"{name}.{path}" if path else name
        holders.append((inside, each))
        holders += [(f"{inside}.{key}", tensor) for key, tensor in _tensors_of(each)]
    return [
        (f"{holder_name}.{kind}[{place}]", getattr(hook, "__self__", hook))
        for holder_name, holder in holders
        for kind in sorted(_HOOKS)
        for place, hook in enumerate((getattr(holder, kind, None) or {}).values())
    ]


class _OfClass(NamedTuple):
    """Attributes of the objects of a class."""

    mine: frozenset[str]  # assigned by methods, or a default of the class is changed for an object
    others: frozenset[str]  # assigned from outside, if an object has them


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _key(kind: type) -> ClassName:
    return kind.__module__, kind.__qualname__
