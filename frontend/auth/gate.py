"""Admits or refuses every request before its body is read: one pass over its headers, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Scope

from headrace.broker.keys import Scope as KeyScope
from headrace.broker.keys import public_id
from headrace.frontend.auth.caller import LOOPBACK_NAMES, Caller, is_loopback
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.errors import (
    BadFraming,
    BadRequest,
    Forbidden,
    HostRefused,
    MediaTypeRefused,
    OriginRefused,
    Unauthorized,
)
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import DEFAULT_TENANT, tenant_token

# Says which content type the body of a request must have.
#
# A page of another site can send a form or plain text without asking the server first, and cannot send JSON. So JSON is taken
# only where it is declared.

_JSON = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})
_CURL = b"application/x-www-form-urlencoded"
_FORMS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})
_EITHER = frozenset({"/v1/videos"})  # a form or JSON
_OLLAMA = "/api/"


def check_body_type(path: str, content_type: bytes | None, *, from_page: bool) -> None:
    """Raise MediaTypeRefused for a body that its route does not take. `from_page`: the request names the page it is from.

    Ollama's own documentation posts JSON by `curl -d`, which calls it a form. Its routes take that from clients that are no
    browsers: these name the page of every such request.
    """
    if content_type in _JSON:
        if not takes_form(path):
            return
    elif path.startswith(_OLLAMA) and not from_page and content_type in (None, _CURL):
        return
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    if kind == b"multipart/form-data" and path in _EITHER:
        return
    if takes_form(path):
        if kind == b"multipart/form-data":
            return
        wanted = "multipart/form-data"
    else:
        if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
            return
        wanted = "application/json"
    given = "none" if content_type is None else repr(kind[:100].decode("latin-1"))
    raise MediaTypeRefused(f"{path} takes a body of content type {wanted}, this one has {given}", param="content-type")


def takes_form(path: str) -> bool:
    """Return True if the body of a POST is a form with a file."""
    return path in _FORMS or (path.startswith("/v1/uploads/") and path.endswith("/parts"))


# Keeps web pages of other sites away from a server that asks for no key: DNS rebinding and cross-site requests.
#
# A browser sends requests to a loopback address for any page that it shows, and a page whose name resolves to that address
# reads the answers as well. What the browser cannot hide is the name that it used (`Host`) and the page that asked
# (`Origin`). A request with a valid key needs neither check, because a foreign page has no key.

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


# Says what a key needs for each route. A route that is not listed needs a key, of whatever scope.

OPEN = "open"  # needs no key: probes
ANY = "any"  # for every key

_PROBES = frozenset({"/live", "/ready", "/health", "/ping"})

_EXACT: dict[str, KeyScope] = {
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages"),
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate", "/api/chat", "/api/generate"),
            *("/v1/images/generations", "/v1/videos"),
        ),
        "generate",
    ),
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify"),
            *("/v1/pooling", "/pooling", "/api/embed", "/api/embeddings"),
        ),
        "embed",
    ),
    **dict.fromkeys(
        (
            *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
            *("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
        ),
        "tokens",
    ),
    **dict.fromkeys(("/v1/models", "/api/tags", "/api/show", "/api/ps"), "models"),
    **dict.fromkeys(("/metrics", "/load"), "metrics"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "admin"),
    **dict.fromkeys(("/v1/conversations",), "stored"),
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/batches": "batches",
}
_LISTS = frozenset({"/v1/chat/completions", "/v1/videos"})  # what POST makes there, other methods list
_BELOW: tuple[tuple[str, KeyScope], ...] = (
    ("/v1/models/", "models"),
    ("/v1/responses/", "stored"),
    ("/v1/chat/completions/", "stored"),
    ("/v1/conversations/", "stored"),
    ("/v1/streams/", "stored"),
    ("/v1/videos/", "stored"),
    ("/v1/requests/", "generate"),
    ("/v1/files/", "files"),
    ("/v1/uploads/", "files"),
    ("/v1/batches/", "batches"),
)


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs, OPEN or ANY."""
    if path in _PROBES:
        return OPEN
    scope = _EXACT.get(path)
    if scope is not None:
        return "stored" if path in _LISTS and method != "POST" else scope
    return next((scope for base, scope in _BELOW if path.startswith(base)), ANY)


TENANT_HEADER = b"x-headrace-tenant"
REQUEST_ID = b"x-request-id"

_SINGLE = frozenset(
    {
        *(b"host", b"origin", b"content-type", b"content-length", b"transfer-encoding", b"sec-fetch-site"),
        *(b"authorization", b"x-api-key", TENANT_HEADER),
    }
)
Headers = Mapping[bytes, bytes | None]
_ABSENT: Headers = dict.fromkeys((*_SINGLE, REQUEST_ID))  # those that are read here
_EMPTY = (None, b"0")
_GOOD_ID = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}\Z")
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
        found = {**_ABSENT}
        for name, value in scope["headers"]:
            if name in found:
                if found[name] is not None and name in _SINGLE:
                    raise _doubled(name)
                found[name] = value
        client_id = found[REQUEST_ID]
        if client_id is not None and _GOOD_ID.match(client_id):
            scope["headrace.client_request_id"] = client_id.decode()
        host, origin, site, encoding = found[b"host"], found[b"origin"], found[b"sec-fetch-site"], found[b"transfer-encoding"]
        method = scope["method"]
        _check_http(scope["http_version"], host, encoding)
        if self._ring.in_force:
            self._identify(scope, found)
        else:
            self._pages.check(method, host, origin, site)
            tenant = found[TENANT_HEADER]
            scope["headrace.tenant"] = DEFAULT_TENANT if tenant is None else tenant_token(tenant.decode("latin-1"))
        if self._ring.isolates:
            scope["headrace.isolated"] = True
        if method in _WITH_BODY and (found[b"content-length"] not in _EMPTY or encoding is not None):
            check_body_type(scope["path"], found[b"content-type"], from_page=origin is not None or site is not None)

    def _identify(self, scope: Scope, found: Headers) -> None:
        """Find who asks, and for which tenant. A valid key needs no check of host and origin: no foreign page has one."""
        path = scope["path"]
        needed = scope_of(scope["method"], path)
        if needed == OPEN or path in self._open:
            scope["headrace.tenant"] = DEFAULT_TENANT
            return
        text = key_in(found)
        if text is None:
            raise Unauthorized("there is no API key: send Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key")
        caller = self._ring.find(text)
        if caller is None:
            scope["headrace.bad_key"] = public_id(text.decode("latin-1"))
            raise Unauthorized("the API key is not valid")
        scope["headrace.caller"] = caller
        if needed != ANY and needed not in caller.scopes:
            caller.need(needed, path)
        asked = found[TENANT_HEADER]
        tenant = scope["headrace.tenant"] = caller.tenant if asked is None else _tenant(caller, asked)
        hold = self._quotas.enter(caller, tenant)
        if hold is not None:
            scope["headrace.hold"] = hold


def key_in(found: Headers) -> bytes | None:
    """Return the key of a request: OpenAI's clients send a bearer token, Anthropic's the header `x-api-key`, some both."""
    bearer = found[b"authorization"]
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return found[b"x-api-key"]


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
