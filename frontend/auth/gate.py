"""Admits or refuses every request before its body is read: one pass over its headers, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

from headrace.broker.keys.key_texts import public_id
from headrace.frontend.auth.body_types import check_body_type
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.auth.page_guard import PageGuard
from headrace.frontend.auth.route_scopes import ANY, OPEN, scope_of
from headrace.frontend.errors import BadFraming, Forbidden, Unauthorized
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import DEFAULT_TENANT, tenant_token

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
Header = Callable[[bytes], bytes | None]
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_VERSIONS = frozenset({"1.1", "1.0"})


class Gate:
    """Checks who asks. What it learns is in the scope: the tenant, and the client's own id of the request."""

    def __init__(self, settings: FrontendSettings, ring: KeyRing) -> None:
        self._ring = ring
        self._quotas = ring.quotas
        self._open = frozenset({"/metrics"}) if settings.open_metrics else frozenset()
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
        if self._ring.in_force:
            self._identify(scope, get)
        else:
            self._pages.check(method, host, origin, get(b"sec-fetch-site"))
            scope["headrace.tenant"] = tenant_token(get(TENANT_HEADER, b"").decode("latin-1"))
        if self._ring.isolates:
            scope["headrace.isolated"] = True
        if method in _WITH_BODY and (get(b"content-length", b"0") != b"0" or b"transfer-encoding" in found):
            check_body_type(scope["path"], get(b"content-type"), from_page=origin is not None or b"sec-fetch-site" in found)

    def _identify(self, scope: Scope, get: Header) -> None:
        """Find who asks, and for which tenant. A valid key needs no check of host and origin: no foreign page has one."""
        path = scope["path"]
        needed = scope_of(scope["method"], path)
        if needed == OPEN or path in self._open:
            scope["headrace.tenant"] = DEFAULT_TENANT
            return
        text = key_in(get)
        if text is None:
            raise Unauthorized("there is no API key: send Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key")
        caller = self._ring.find(text)
        if caller is None:
            scope["headrace.bad_key"] = public_id(text.decode("latin-1"))
            raise Unauthorized("the API key is not valid")
        scope["headrace.caller"] = caller
        if needed != ANY and needed not in caller.scopes:
            caller.need(needed, path)
        asked = get(TENANT_HEADER)
        tenant = scope["headrace.tenant"] = caller.tenant if asked is None else _tenant(caller, asked)
        hold = self._quotas.enter(caller, tenant)
        if hold is not None:
            scope["headrace.hold"] = hold


def key_in(get: Header) -> bytes | None:
    """Return the key of a request: OpenAI's clients send a bearer token, Anthropic's the header `x-api-key`, some both."""
    bearer = get(b"authorization")
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return get(b"x-api-key")


def _tenant(caller: Caller, asked: bytes) -> str:
    """Return the tenant that is asked for. Raises Forbidden unless it is the key's own, or the key may speak for others."""
    wanted = tenant_token(asked.decode("latin-1"))
    if wanted != caller.tenant and "act_as" not in caller.scopes:
        message = "this API key may not speak for another tenant than its own"
        raise Forbidden(message, param=TENANT_HEADER.decode(), code="tenant_not_allowed")
    return wanted


def tenant_of_scope(scope: Any, headers: Any) -> str:
    """Return the tenant that the gate found, or that of the header for what did not come through it: stored jobs."""
    tenant: str | None = scope.get("headrace.tenant")
    return tenant if tenant is not None else tenant_token(headers.get(TENANT_HEADER, b"").decode("latin-1"))


def _check_http(version: str, host: bytes | None, encoding: bytes | None) -> None:
    """Refuse what RFC 9112 tells a server to refuse and the parser lets through. Raises BadFraming."""
    if version not in _VERSIONS:
        raise BadFraming("the request line names no version of HTTP/1", code="invalid_request")
    if host is None and version == "1.1":
        raise BadFraming("the request has no Host header", param="host", code="invalid_host")
    if encoding is not None and encoding.lower() != b"chunked":
        shown = encoding[:100].decode("latin-1")
        raise BadFraming(f"bodies are taken in the transfer encoding chunked, not {shown!r}", param="transfer-encoding")


def _doubled(name: bytes) -> BadFraming:
    return BadFraming(f"the request has more than one header {name.decode()}", param=name.decode(), code="doubled_header")
