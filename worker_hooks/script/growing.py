"""Encodes values that grow, such as a history of losses, without encoding what they had before.

At each commit a script's values are encoded. A list that gets an item in every step would otherwise
make each step longer than the one before.
"""

from __future__ import annotations

import marshal
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from worker_hooks.tensors import state_json

LONG = 16
"""Items; what has fewer is encoded anew."""

FIXED = frozenset({float, int, bool, str, bytes, complex, type(None)})
"""Types whose values never change in place."""

MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})
PLAIN = 2
"""Marshal's format in which the bytes do not depend on who else refers to the value."""

_HEAD = 5  # bytes of a marshalled list in front of its items: its kind and their count


def is_growing(value: Any) -> bool:
    """Whether this is a long list or mapping, or a mapping that has one."""
    if type(value) in MAPPINGS and len(value) < LONG:
        return any(type(each) in {list, *MAPPINGS} and len(each) >= LONG for each in value.values())
    return type(value) in {list, *MAPPINGS} and len(value) >= LONG


class GrowingText:
    """The JSON of one value, as of each time that it was asked for."""

    def __init__(self) -> None:
        # by path: the items, marshalled, and the text
        self._known: dict[str, tuple[bytes, str]] = {}

    def text(self, value: Any, path: str) -> str | None:
        """As :func:`state_json.encode` and :func:`state_json.dumps`.

        Returns:
            ``None``: there are tensors in it, or objects; or it cannot be encoded.
        """
        try:
            return self._text(value, path)
        except (TypeError, ValueError):  # the latter: marshal has no such kind
            return None

    def _text(self, value: Any, path: str) -> str:
        if type(value) is list and len(value) >= LONG:
            return self._joined(value, path, "[]", _plain)
        if type(value) not in MAPPINGS:
            return _plain(value, path)
        is_object = type(value) is dict and "$" not in value and {*map(type, value)} <= {str}
        ends = "{}" if is_object else "[]"
        if len(value) >= LONG and FIXED.issuperset(map(type, value.values())):
            text = self._joined([*value.items()], path, ends, _field if is_object else _pair)
        else:
            pairs = [(_plain(k, path), self._text(v, f"{path}.{k}")) for k, v in value.items()]
            parts = [f"{k}:{v}" if is_object else f"[{k},{v}]" for k, v in pairs]
            text = f"{ends[0]}{','.join(parts)}{ends[1]}"
        if is_object:
            return text
        none: dict[Any, Any] = value.copy()
        none.clear()
        kind = _plain(none, path) if type(value) is not dict else '{"$":"dict","v":[]}'
        return kind.replace('"v":[]', f'"v":{text}', 1)

    def _joined(
        self, items: list[Any], path: str, ends: str, encode: Callable[[Any, str], str]
    ) -> str:
        now = marshal.dumps(items, PLAIN)
        was, text = self._known.get(path, (b"", ""))
        if now == was:
            return text
        begin, count = ends[0], 0
        if len(was) > _HEAD and now.startswith(was[_HEAD:], _HEAD):  # all that it had, and more
            begin, count = f"{text[:-1]},", int.from_bytes(was[1:_HEAD], "little")
        text = f"{begin}{','.join([encode(each, path) for each in items[count:]])}{ends[1]}"
        self._known[path] = now, text
        return text


def _field(pair: tuple[Any, Any], path: str) -> str:
    return f"{_plain(pair[0], path)}:{_plain(pair[1], path)}"


def _pair(pair: tuple[Any, Any], path: str) -> str:
    return f"[{_plain(pair[0], path)},{_plain(pair[1], path)}]"


def _plain(value: Any, path: str) -> str:
    encoded, tensors = state_json.encode(value, path)
    if tensors:
        raise ValueError(f"{path} has tensors")
    return state_json.dumps(encoded)
