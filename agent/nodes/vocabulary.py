"""Named tuples and frozen dataclasses as JSON objects, checked against what they declare. Pure.

A receiver uses fields unchecked, so a value of another type than declared is refused here: a bool
is no int, a missing or unknown field is an error. ``tuple[int, ...]`` travels as ``0-7,9`` where
its numbers increase: a message about 16,384 ranks is then as short as one about two.
Bytes are left to ``frames``, which carries them beside the object, and says there how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from agent.nodes.frames import OCTETS
from agent.text.ranges import MAX_NUMBER, format_ranges, parse_increasing

T = TypeVar("T")

MOST_NUMBERS = MAX_NUMBER  # that the ranges of one message may stand for, together


class CodecError(Exception):
    """A message is not one that this version knows."""


class _Room:
    """How many numbers a message's ranges may still stand for: a short text can mean millions.

    And the bytes beside it that no field has taken yet.
    """

    def __init__(self, octets: bytes) -> None:
        self.numbers = MOST_NUMBERS
        self.octets, self.at = octets, 0


class _Form(NamedTuple):
    """How values of one declared type become JSON and come back."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any, _Room], Any]
    exact: type | None = None  # values of this type are unpacked already


class Vocabulary(Generic[T]):
    """The kinds of messages that may travel; each is known by its class's name."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._forms: dict[type, dict[str, _Form]] = {}  # made when a kind is first met

    def pack(self, value: T) -> dict[str, object]:
        """A value as a JSON object that names its kind; bytes are as they are.

        Raises:
            CodecError: its kind is not in the vocabulary.
        """
        kind = type(value)
        if self._kinds.get(kind.__name__) is not kind:
            raise CodecError(f"{kind.__name__} does not travel")
        return {"kind": kind.__name__, **self._fields(kind, value)}

    def unpack(self, message: object) -> T:
        """The value that :meth:`pack` made a JSON object of.

        Raises:
            CodecError: there is no such kind, or its fields are others than declared.
        """
        octets = message.get(OCTETS) if isinstance(message, dict) else None
        room = _Room(octets if isinstance(octets, bytes) else b"")
        besides = 1 + isinstance(octets, bytes)
        value: T = self._value(message, room, self._kinds, besides)
        if room.at != len(room.octets):
            raise CodecError(f"{len(room.octets) - room.at} bytes too many")
        return value

    def _fields(self, kind: type, value: object) -> dict[str, object]:
        fields = {}
        for name, form in self._learnt(kind).items():
            field = getattr(value, name)
            fields[name] = field if form.pack is _same else form.pack(field)
        return fields

    def _value(self, message: object, room: _Room, kinds: dict[str, type], besides: int = 1) -> Any:
        name = message.get("kind") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(name, str) or name not in kinds:
            raise CodecError(f"{message!r:.80} is none of this version's messages")
        return self._made(kinds[name], message, room, besides)

    def _made(self, kind: type, fields: object, room: _Room, besides: int = 0) -> object:
        """``besides``: how many entries of ``fields`` are none: the name of the kind, bytes."""
        forms = self._learnt(kind)
        if not isinstance(fields, dict) or len(fields) != len(forms) + besides:
            raise CodecError(f"{fields!r:.80} are not the fields of {kind.__name__}")
        try:
            values = [fields[name] for name in forms]
            return kind(
                *[
                    value if type(value) is form.exact else form.unpack(value, room)
                    for value, form in zip(values, forms.values(), strict=True)
                ]
            )
        except KeyError:
            raise CodecError(f"{fields!r:.80} are not the fields of {kind.__name__}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"{kind.__name__}: {error!s:.200}") from error

    def _learnt(self, kind: type) -> dict[str, _Form]:
        forms = self._forms.get(kind)
        return self._learn(kind) if forms is None else forms

    def _learn(self, kind: type) -> dict[str, _Form]:
        hints = get_type_hints(kind)
        names = _names_of(kind)
        assert "kind" not in names
        forms = {name: self._form(hints[name]) for name in names}
        self._forms[kind] = forms
        return forms

    def _form(self, declared: Any) -> _Form:
        origin, inner = get_origin(declared), get_args(declared)
        if origin in {Union, UnionType}:
            return self._choice(inner)
        if (form := self._collection(declared, origin, inner)) is not None:
            return form
        if declared is object:
            return _Form(_same, lambda value, _: value)  # any JSON
        if declared in {int, str, bool}:
            return _Form(_same, _exactly(declared), declared)
        if declared is float:
            return _Form(_same, _unpack_float)
        if declared is bytes:
            return _Form(_same, _unpack_octets)
        if isinstance(declared, type) and issubclass(declared, Enum):
            return _Form(lambda value: value.value, lambda value, _: declared(value))
        if isinstance(declared, type) and issubclass(declared, tuple):
            return _Form(
                lambda value: self._fields(declared, value),
                lambda value, room: self._made(declared, value, room),
            )
        raise TypeError(f"{declared} cannot travel")

    def _collection(self, declared: Any, origin: Any, inner: tuple[Any, ...]) -> _Form | None:
        """Of several values of one kind; ``None``: it is none."""
        if declared in _NUMBERS:
            return _Form(
                lambda value: _pack_numbers(tuple(value)),
                lambda value, room: origin(_unpack_numbers(value, room)),
            )
        if origin is tuple and inner[1:] == (...,):
            return _sequence(self._form(inner[0]))
        if origin is list:
            form = _sequence(self._form(inner[0]))
            return _Form(form.pack, lambda value, room: list(form.unpack(value, room)))
        if origin is dict and inner[0] is str:
            return _mapping(self._form(inner[1]))
        return None

    def _choice(self, declared: tuple[Any, ...]) -> _Form:
        """One of several kinds, or something that may be missing."""
        kinds = tuple(each for each in declared if each is not NoneType)
        if len(kinds) > 1 and len(kinds) == len(declared):
            known = {kind.__name__: kind for kind in kinds}
            return _Form(
                lambda value: {"kind": type(value).__name__, **self._fields(type(value), value)},
                lambda value, room: self._value(value, room, known),
            )
        if len(kinds) != 1:
            raise TypeError(f"{declared} cannot travel")
        form = self._form(kinds[0])
        return _Form(
            lambda value: None if value is None else form.pack(value),
            lambda value, room: None if value is None else form.unpack(value, room),
        )


_NUMBERS = (tuple[int, ...], list[int])


def _names_of(kind: Any) -> Iterable[str]:
    """The fields of a named tuple or of a dataclass; looked up without importing dataclasses."""
    names: Iterable[str] = kind._fields if issubclass(kind, tuple) else kind.__dataclass_fields__
    return names


def _same(value: Any) -> Any:
    return value


def _exactly(declared: type) -> Callable[[object, _Room], object]:
    def unpack(value: object, _: _Room) -> object:
        if type(value) is not declared:
            raise TypeError(f"{value!r:.40} is no {declared.__name__}")
        return value

    return unpack


_an_int = _exactly(int)


def _unpack_float(value: object, _: _Room) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"{value!r:.40} is no float")
    number = float(value)
    if number != number:  # noqa: PLR0124  nan, which JSON can spell here, and which nobody sends
        raise ValueError("nan is no time and no size")
    return number


def _unpack_octets(value: object, room: _Room) -> bytes:
    if type(value) is bytes:  # it has not travelled
        return value
    if type(value) is not int or not 0 <= value <= len(room.octets) - room.at:
        raise TypeError(f"{value!r:.40} is not how many bytes follow")
    at, room.at = room.at, room.at + value
    return room.octets[at : room.at]


def _pack_numbers(numbers: tuple[int, ...]) -> str | list[int]:
    if not numbers:  # as most often
        return ""
    if not (numbers[0] >= 0 and numbers[-1] <= MAX_NUMBER):
        return list(numbers)
    if any(number >= after for number, after in pairwise(numbers)):
        return list(numbers)
    return format_ranges(numbers)


def _unpack_numbers(value: object, room: _Room) -> tuple[int, ...]:
    if isinstance(value, str):
        numbers = parse_increasing(value, room.numbers)
        room.numbers -= len(numbers)
        return numbers
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} are no numbers")
    for number in value:
        _an_int(number, room)
    return tuple(value)


def _sequence(form: _Form) -> _Form:
    def unpack(value: object, room: _Room) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.40} is no list")
        return tuple([form.unpack(each, room) for each in value])

    return _Form(lambda values: [form.pack(each) for each in values], unpack)


def _mapping(form: _Form) -> _Form:
    def unpack(value: object, room: _Room) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no object")
        return {_text(key): form.unpack(value[key], room) for key in value}

    return _Form(lambda values: {key: form.pack(values[key]) for key in values}, unpack)


def _text(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r:.40} is no text")
    return key
