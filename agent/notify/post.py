"""Posts notices to an address, as JSON. In the courier."""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

POST_S = 5.0
PAUSES_S = (0.5, 2.0, 8.0)  # between the tries of a post
PASSING = frozenset({408, 425, 429})  # of the errors 4xx; others would come again


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, of whatever address the answer names."""

    def redirect_request(self, *_: object) -> None:
        return None


class WebHook:
    """Posts each notice as JSON."""

    def __init__(self, url: str, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        parts = urllib.parse.urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        self._url = parts._replace(netloc=place).geturl()
        self._headers = {"Content-Type": "application/json", "User-Agent": "msrun"}
        if parts.username is not None:
            given = (parts.username, parts.password or "")
            pair = ":".join(map(urllib.parse.unquote, given))
            token = base64.b64encode(pair.encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"
        self._pauses_s = pauses_s
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __call__(self, notice: Mapping[str, Any]) -> str:
        """Post it, again after errors that may pass; why it failed."""
        content, why = json.dumps(dict(notice)).encode(), ""
        for pause_s in (*self._pauses_s, None):
            # the scheme was checked when the option was read
            request = urllib.request.Request(self._url, content, self._headers)  # noqa: S310
            try:
                with self._opener.open(request, timeout=POST_S):
                    return ""
            except urllib.error.HTTPError as error:
                error.close()
                why = f"HTTP status {error.code}"
                if error.code < 500 and error.code not in PASSING:  # noqa: PLR2004
                    return why
            except http.client.HTTPException as error:  # what answers speaks no HTTP
                why = repr(error)[:200]
            except (OSError, ValueError) as error:
                why = str(getattr(error, "reason", error))
            if pause_s is not None:
                time.sleep(pause_s)
        return why
