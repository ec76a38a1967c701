"""Keeps web pages of other sites away from a server that asks for no key: DNS rebinding and cross-site requests.

A browser sends requests to a loopback address for any page that it shows, and a page whose name resolves to that address reads
the answers as well. What the browser cannot hide is the name that it used (`Host`) and the page that asked (`Origin`). A
request with a valid key needs neither check, because a foreign page has no key.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.auth.exposure import LOOPBACK_NAMES, is_loopback
from headrace.frontend.errors import BadRequest, HostRefused, OriginRefused

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN = frozenset({b"cross-site", b"same-site"})
_KNOWN_HOSTS = 256  # headers that were found good and need no parsing; clients use one or two


class PageGuard:
    """Checks `Host` and `Origin` of requests that no key vouches for."""

    def __init__(self, *, listens_on: str, allowed_hosts: Sequence[str], origins: Sequence[str]) -> None:
        """`allowed_hosts` are names beside those of the loopback address; `*` is any. `origins` may call across sites.

        A server that listens on other addresses knows not by which names it is reached, and checks hosts only if it is told.
        """
        names = [name.lower() for name in allowed_hosts]
        self._any_host = "*" in names or not (names or is_loopback(listens_on))
        self._names = frozenset((*LOOPBACK_NAMES, listens_on.lower(), *names))
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        self._good_hosts: set[bytes] = set()

    def check(self, method: str, host: bytes | None, origin: bytes | None, fetch_site: bytes | None) -> None:
        """Raise HostRefused or OriginRefused. `host` is None only in HTTP/1.0, which no browser speaks."""
        if host is not None and host not in self._good_hosts:
            self._check_host(host)
        if origin is not None:
            self._check_origin(origin, host)
        elif fetch_site in _FOREIGN and method not in _SAFE:
            raise OriginRefused(f"a web page of another site may not send {method} requests here")

    def _check_host(self, host: bytes) -> None:
        name = host_name(host)
        if not self._any_host and name not in self._names and not name.endswith(".localhost"):
            names = ", ".join(LOOPBACK_NAMES)
            raise HostRefused(f"this server is not called {name[:100]!r}; frontend.allowed_hosts lists names beside {names}")
        if len(self._good_hosts) < _KNOWN_HOSTS:
            self._good_hosts.add(host)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        lowered = origin.lower()
        if lowered in self._origins:
            return
        scheme, separator, authority = lowered.partition(b"://")
        if separator and host is not None and scheme in (b"http", b"https") and authority == host.lower():
            return
        shown = origin[:100].decode("latin-1")
        raise OriginRefused(f"pages of {shown!r} may not call this server; frontend.cors_origins lists those that may")


def host_name(host: bytes) -> str:
    """Return the name in a Host header, lower-cased and without its port. Raises BadRequest if it is none."""
    text = host.decode("latin-1").lower()
    name, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    name = name if colon else text
    if not name or (colon and port and not port.isdigit()) or any(c in name for c in " /\\@?#,"):
        raise BadRequest(f"the Host header is no host: {text[:100]!r}", param="host", code="invalid_host")
    return name.rstrip(".") or name
