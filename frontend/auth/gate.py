"""Admits or refuses every request before its body is read: one pass over its headers, no I/O."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import Scope

from headrace.frontend.auth.body_types import check_body_type
from headrace.frontend.auth.page_guard import PageGuard
from headrace.frontend.errors import BadRequest
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import tenant_token

TENANT_HEADER = b"x-headrace-tenant"
REQUEST_ID = b"x-request-id"

_SINGLE = frozenset(
    {
        *(b"host", b"origin", b"content-type", b"content-length", b"transfer-encoding", b"sec-fetch-site"),
        *(b"authorization", b"x-api-key", TENANT_HEADER),
    }
)
_READ = _SINGLE | {REQUEST_ID}
_GOOD_ID = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}\Z")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_VERSIONS = frozenset({"1.1", "1.0"})


class Gate:
    """Checks who asks. What it learns is in the scope: the tenant, and the client's own id of the request."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._pages = PageGuard(listens_on=settings.host, allowed_hosts=settings.allowed_hosts, origins=settings.cors_origins)

    def admit(self, scope: Scope) -> None:
        """Check a request. Raises a FrontendError with the reason for which it is refused."""
        found: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _READ:
                if name in found and name in _SINGLE:
                    raise _doubled(name)
                found[name] = value
        get = found.get
        client_id = get(REQUEST_ID)
        if client_id is not None and _GOOD_ID.match(client_id):
            scope["headrace.client_request_id"] = client_id.decode()
        host, origin, method = get(b"host"), get(b"origin"), scope["method"]
        _check_http(scope["http_version"], host, get(b"transfer-encoding"))
        self._pages.check(method, host, origin, get(b"sec-fetch-site"))
        if method in _WITH_BODY and (get(b"content-length", b"0") != b"0" or b"transfer-encoding" in found):
            check_body_type(scope["path"], get(b"content-type"), from_page=origin is not None or b"sec-fetch-site" in found)
        scope["headrace.tenant"] = tenant_token(get(TENANT_HEADER, b"").decode("latin-1"))


def tenant_of_scope(scope: Any, headers: Any) -> str:
    """Return the tenant that the gate found, or that of the header for what did not come through it: stored jobs."""
    tenant: str | None = scope.get("headrace.tenant")
    return tenant if tenant is not None else tenant_token(headers.get(TENANT_HEADER, b"").decode("latin-1"))


def _check_http(version: str, host: bytes | None, encoding: bytes | None) -> None:
    """Refuse what RFC 9112 tells a server to refuse and the parser lets through. Raises BadRequest."""
    if version not in _VERSIONS:
        raise BadRequest("the request line names no version of HTTP/1", code="invalid_request")
    if host is None and version == "1.1":
        raise BadRequest("the request has no Host header", param="host", code="invalid_host")
    if encoding is not None and encoding.lower() != b"chunked":
        shown = encoding[:100].decode("latin-1")
        raise BadRequest(f"bodies are taken in the transfer encoding chunked, not {shown!r}", param="transfer-encoding")


def _doubled(name: bytes) -> BadRequest:
    return BadRequest(f"the request has more than one header {name.decode()}", param=name.decode(), code="doubled_header")
