"""HTML, escaped in one place: whatever is no `Markup` is text, and becomes harmless here. Pure."""

from __future__ import annotations

import html

from agent.text.sanitize import encodable, sanitized

_EMPTY = frozenset({"meta", "path", "rect"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """Text as HTML; `Markup` as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(encodable(sanitized(str(text))), quote=True))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element. ``class_`` means class, and an underscore in a name a dash."""
    known = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    words = "".join(f' {key}="{escaped(value)}"' for key, value in known.items())
    if name in _EMPTY:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{joined(*content)}</{name}>")


def joined(*parts: object) -> Markup:
    """Several parts, one after the other."""
    return Markup("".join(map(escaped, parts)))


def table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> Markup:
    """A table that scrolls by itself on a narrow screen."""
    head = tag("tr", *(tag("th", column) for column in columns))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")
