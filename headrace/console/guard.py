"""Decides who may look at the console and who may act through it: Host and Origin of every request, and the admin key.

The key travels in a header of its own, which no form and no page of another site can send without being asked first; there are
no cookies. So what changes something needs no token against cross-site requests beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping

from headrace.broker.keys.key_texts import digest_of
from headrace.broker.keys.records import KeyRecord
from headrace.frontend.auth.exposure import is_loopback
from headrace.frontend.auth.page_guard import PageGuard
from headrace.frontend.errors import Forbidden, Unauthorized

KEY_HEADER = "x-console-key"


class ConsoleGuard:
    """The console's rules. `stored` returns the API keys of the deployment, of which those with the scope admin count, too."""

    def __init__(self, *, host: str, key: str, private: bool, stored: Callable[[], Awaitable[list[KeyRecord]]]) -> None:
        """`private`: looking needs the key as well. So it is, whatever is asked, where other machines reach the address."""
        self._pages = PageGuard(listens_on=host, allowed_hosts=(), origins=())
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""
        self._stored = stored
        self.private = private or not is_loopback(host)

    def check_page(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise HostRefused or OriginRefused for what a page of another site sends."""

        def raw(name: str) -> bytes | None:
            value = headers.get(name)
            return None if value is None else value.encode("latin-1")

        self._pages.check(method, raw("host"), raw("origin"), raw("sec-fetch-site"))

    async def check_reader(self, headers: Mapping[str, str]) -> None:
        """Raise Unauthorized unless the state may be shown."""
        if self.private and not await self.is_admin(headers):
            raise Unauthorized("this console shows nothing without its key", code="console_key_needed")

    async def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden unless the request has an admin key."""
        if not await self.is_admin(headers):
            raise Forbidden("without an admin key the console only shows", code="console_key_needed")

    async def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the console's own key, or an API key with the scope admin."""
        given = headers.get(KEY_HEADER, "").encode("latin-1")
        if not given:
            return False
        digest = digest_of(given)
        if self._digest and hmac.compare_digest(digest, self._digest):
            return True
        return any(_opens(record, digest, time.time()) for record in await self._stored())


def _opens(record: KeyRecord, digest: bytes, now: float) -> bool:
    if record.state(now) != "active" or "admin" not in record.scopes:
        return False
    return any(hmac.compare_digest(one.sha256, digest) and (not one.until or now < one.until) for one in record.hashes)
