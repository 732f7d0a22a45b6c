"""A hook of mkdocs: what lies outside ``docs/`` is named in the site, not linked.

In the repository those links lead to the code; a site has no code to lead to.
"""

from __future__ import annotations

import os
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """A page's text without links that leave the folder of the manual."""
    folder = os.path.dirname(page.file.abs_src_path)

    def kept(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, link[2]))
        return link[0] if path.startswith(config.docs_dir + os.sep) else link[1]

    return _LINK.sub(kept, markdown)
