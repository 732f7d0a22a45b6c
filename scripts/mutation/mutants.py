"""Makes mutants: copies of a source file with one small mistake each. Pure."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

_OPPOSITES = (
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
COMPARISONS = {**dict(_OPPOSITES), **{other: one for one, other in _OPPOSITES}}
SWAPPED = {"all": "any", "any": "all", "min": "max", "max": "min"}


class Mutant(NamedTuple):
    """One mistake."""

    line: int  # of the file, from 1
    was: str
    becomes: str
    text: str  # of the whole file


class Change(NamedTuple):
    """A node of the source, and what stands there instead."""

    node: ast.expr | ast.stmt
    code: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a source file, in the order of its lines; none is there twice."""
    found = {}
    for change in _changes(ast.parse(source)):
        mutant = _applied(source, change)
        found.setdefault(mutant.text, mutant)
    return sorted(found.values())


def _applied(source: str, change: Change) -> Mutant:
    lines, node = source.encode().splitlines(keepends=True), change.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    new = head + change.code.encode() + tail
    text = b"".join([*lines[:first], new, *lines[last + 1 :]]).decode()
    was = b" ".join(line.strip() for line in lines[first : last + 1])
    return Mutant(node.lineno, was.decode(), new.decode().strip(), text)


def _changes(node: ast.AST) -> Iterator[Change]:  # noqa: C901  a rule for each kind of place
    """What may be mistaken in a node and below it."""
    if isinstance(node, ast.JoinedStr | ast.Assert) or _is_log(node):
        return  # messages are no decisions; an assertion narrows a type
    if isinstance(node, ast.stmt):
        yield from _removed(node)
    if isinstance(node, ast.expr):
        yield from (Change(node, _code(new)) for new in _mistaken(node))
    test = getattr(node, "test", None) or getattr(node, "guard", None)
    for condition in ([test] if test is not None else []) + getattr(node, "ifs", []):
        if not isinstance(condition, ast.Compare | ast.UnaryOp):  # these are negated in any place
            yield Change(condition, f"(not {_code(condition)})")
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "format_spec"}:
            continue
        children = value if isinstance(value, list) else [value]
        if isinstance(node, ast.FunctionDef) and name == "body":
            *children, last = children  # without its last return a function is too broken
            yield from _changes(last.value if isinstance(last, ast.Return) and last.value else last)
        for child in children:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _code(node: ast.expr) -> str:
    """It, to stand in for any other expression."""
    is_one = isinstance(node, ast.Constant | ast.Call | ast.Name | ast.Attribute)
    return ast.unparse(node) if is_one else f"({ast.unparse(node)})"


def _removed(node: ast.stmt) -> Iterator[Change]:
    """A statement is left out, unless its absence is an undefined name or nothing."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield Change(node, "pass")
        case ast.Raise() | ast.Return():
            yield Change(node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield Change(node, "pass")
        case _:
            pass


def _mistaken(node: ast.expr) -> Iterator[ast.expr]:  # noqa: C901  a row for each kind of node
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                new = copy.deepcopy(node)
                new.ops[index] = COMPARISONS[type(op)]()
                yield new
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for index in range(len(values)):
                left = [*values[:index], *values[index + 1 :]]
                yield ast.BoolOp(op, left) if len(left) > 1 else left[0]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=named) if name in SWAPPED:
            yield ast.Call(ast.Name(SWAPPED[name]), args, named)
        case ast.Call(func=func, args=args, keywords=named):
            for index in range(len(named)):
                yield ast.Call(func, args, [*named[:index], *named[index + 1 :]])
            if args[1:] and not isinstance(args[-1], ast.Starred) and not _is_type_check(node):
                yield ast.Call(func, args[:-1], named)
        case _:
            pass


def _is_type_check(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "isinstance"  # which must have both arguments


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.")
