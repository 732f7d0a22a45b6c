"""Finds links to files, anchors and names in the code that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_pages import Page

PACKAGES = "agent|msrun|worker_hooks|scripts|tests|docs"
_FILE = re.compile(rf"(?:{PACKAGES})/[\w./-]+(?:::(\w+))?")
_NAME = re.compile(r"[\w./-]*\.py::(\w+)")


def problems(page: Page, pages: Mapping[Path, Page], root: Path) -> Iterator[str]:
    """One sentence for each dead link of a page.

    Literals are looked at, too: ``agent/supervisor/run.py`` must be a file of the repository, and
    ``run.py::run`` in a link's text must be defined in the file that the link leads to.

    Args:
        page: to check.
        pages: all pages, by their resolved paths.
        root: the repository.
    """
    for link in page.links:
        parts = urlsplit(link.target)
        if parts.scheme:
            continue  # the web's, which no check may depend on
        path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        if not path.exists():
            yield f"no such file: {link.target}"
        elif parts.fragment and path in pages and parts.fragment not in pages[path].anchors:
            yield f"no such heading: {link.target}"
        elif (named := _NAME.fullmatch(link.text)) and not _defines(path, named[1]):
            yield f"{link.target} does not define {named[1]}"
    for span in page.spans:
        if not (named := _FILE.fullmatch(span)):
            continue
        path = root / span.partition("::")[0]
        if not path.exists():
            yield f"no such file: `{span}`"
        elif named[1] and not _defines(path, named[1]):
            yield f"`{span}` is not defined there"


def _defines(path: Path, name: str) -> bool:
    return re.search(rf"^\s*(?:def|class) {name}\b", path.read_text(), re.MULTILINE) is not None
