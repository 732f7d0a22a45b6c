"""Reads Markdown pages: their links, anchors and literals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

_READER = MarkdownIt("commonmark").enable("table")
_ANCHOR = re.compile(r"<a\s[^>]*(?:id|name)=\"([^\"]+)\"")
SHELL = {"", "sh", "bash", "shell", "console"}


class Link(NamedTuple):
    """A link: what it leads to, and its text."""

    target: str
    text: str


class Page(NamedTuple):
    """What the checks look at of a page."""

    path: Path
    anchors: frozenset[str]
    links: tuple[Link, ...]
    spans: tuple[str, ...]  # literals in the text
    shell: tuple[str, ...]  # lines of blocks that are not of another language


def read(path: Path) -> Page:
    """Read a page."""
    tokens = _READER.parse(path.read_text())
    inside = [child for token in tokens for child in token.children or ()]
    return Page(
        path,
        frozenset(_anchors(tokens)),
        tuple(_links(tokens)),
        tuple(child.content for child in inside if child.type == "code_inline"),
        tuple(_shell(tokens)),
    )


def _links(tokens: list[Token]) -> Iterator[Link]:
    for token in tokens:
        children = token.children or []
        for at, child in enumerate(children):
            if child.type == "link_open":
                text = []
                for inner in children[at + 1 :]:
                    if inner.type == "link_close":
                        break
                    text.append(inner.content)
                yield Link(str(child.attrs["href"]), "".join(text))
            elif child.type == "image":
                yield Link(str(child.attrs["src"]), child.content)


def _anchors(tokens: list[Token]) -> Iterator[str]:
    """Of headings as repository browsers make them, and those that are written as HTML."""
    seen: dict[str, int] = {}
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in tokens[at + 1].children or ())
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = seen[anchor] = seen.get(anchor, -1) + 1
            yield f"{anchor}-{count}" if count else anchor
        for html in (token, *(token.children or ())):
            if html.type.startswith("html"):
                yield from _ANCHOR.findall(html.content)


def _shell(tokens: list[Token]) -> Iterator[str]:
    """Whole command lines: a backslash at a line's end continues the command."""
    for token in tokens:
        is_fence = token.type == "fence" and token.info.split(" ")[0] in SHELL
        if is_fence or token.type == "code_block":
            yield from re.sub(r"\\\n\s*", " ", token.content).splitlines()
