"""etcd over its JSON gateway: four calls, each bounded. TLS and users are not supported.

Keys and values travel in base64, numbers as text; what is zero is left out.
"""

from __future__ import annotations

import http.client
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from agent.seat.records import StoreError

CALL_S = 2.0  # for one call of one member of the store, at most
_MOST_BYTES = 1 << 20  # of an answer


class Etcd:
    """Members of one store; any of them is asked, the one first that has answered last."""

    def __init__(self, members: Sequence[tuple[str, int]], call_s: float = CALL_S) -> None:
        """Nothing is asked yet.

        Args:
            members: hosts and ports.
            call_s: for one call of one of them.
        """
        self._members = list(members)
        self._call_s = call_s

    def grant(self, ttl_s: int) -> str:
        """A new lease, which ends so long after it was renewed last."""
        lease = self._call("lease/grant", {"TTL": str(ttl_s)}).get("ID")
        if not isinstance(lease, str):
            raise StoreError("says what no etcd would say")
        return lease

    def renew(self, lease: str) -> bool:
        """Renew a lease; whether it was there."""
        answer = self._call("lease/keepalive", {"ID": lease}).get("result")
        return isinstance(answer, dict) and str(answer.get("TTL", "0")) != "0"

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """What these keys hold at one moment; ``None``: nothing."""
        return self._found(self._call("kv/txn", {"success": [_range(key) for key in keys]}), keys)

    def swap(
        self,
        expected: Mapping[str, str | None],
        puts: Mapping[str, tuple[str, str]],
        deletes: Sequence[str] = (),
    ) -> list[str | None] | None:
        """Put and delete if all is as expected, at one moment.

        Args:
            expected: what keys hold; ``None``: nothing.
            puts: by key, a value and the lease under which it is, which may be empty.
            deletes: keys.

        Returns:
            ``None``: it is done. Else what the keys of ``expected`` hold.
        """
        keys = list(expected)
        done = [_put(key, *each) for key, each in puts.items()]
        done += [{"request_delete_range": {"key": _b64(key)}} for key in deletes]
        compare = [_compare(key, value) for key, value in expected.items()]
        asked = {"compare": compare, "success": done, "failure": [_range(key) for key in keys]}
        answer = self._call("kv/txn", asked)
        return None if answer.get("succeeded") is True else self._found(answer, keys)

    def _found(self, answer: dict[str, Any], keys: Sequence[str]) -> list[str | None]:
        try:
            ranges = [each["response_range"].get("kvs", []) for each in answer["responses"]]
            values = [_text(kvs[0].get("value", "")) if kvs else None for kvs in ranges]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StoreError("says what no etcd would say") from error
        if len(values) != len(keys):
            raise StoreError("says what no etcd would say")
        return values

    def _call(self, name: str, asked: Mapping[str, object]) -> dict[str, Any]:
        last = StoreError("has no member")
        for member in tuple(self._members):
            try:
                answer = self._ask(*member, name, asked)
            except StoreError as error:
                last = error
                continue
            self._members.remove(member)
            self._members.insert(0, member)
            return answer
        raise last

    def _ask(self, host: str, port: int, name: str, asked: Mapping[str, object]) -> dict[str, Any]:
        connection: http.client.HTTPConnection | None = None
        try:
            connection = http.client.HTTPConnection(host, port, timeout=self._call_s)
            connection.request("POST", f"/v3/{name}", json.dumps(asked))
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES)
        except TimeoutError as error:
            raise StoreError(f"has not answered within {self._call_s:g} s") from error
        except OSError as error:
            raise StoreError(f"does not answer ({error.strerror or error})") from error
        except (UnicodeError, http.client.InvalidURL) as error:
            raise StoreError(f"cannot be found at {host!r}") from error
        except http.client.HTTPException as error:
            raise StoreError("is no etcd: it speaks no HTTP") from error
        finally:
            if connection is not None:
                connection.close()
        try:
            found = json.loads(body)
        except ValueError as error:
            raise StoreError(f"is no etcd from 3.4 on: it says {answer.status}") from error
        if not isinstance(found, dict):
            raise StoreError("says what no etcd would say")
        if answer.status != http.client.OK:
            raise StoreError(f"refuses: {found.get('message', answer.status)!s:.200}")
        return found


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()


def _text(value: str) -> str:
    return b64decode(value).decode()


def _range(key: str) -> dict[str, object]:
    return {"request_range": {"key": _b64(key)}}


def _put(key: str, value: str, lease: str) -> dict[str, object]:
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": lease or "0"}}


def _compare(key: str, value: str | None) -> dict[str, object]:
    if value is None:
        return {"key": _b64(key), "target": "VERSION", "result": "EQUAL", "version": "0"}
    return {"key": _b64(key), "target": "VALUE", "result": "EQUAL", "value": _b64(value)}
