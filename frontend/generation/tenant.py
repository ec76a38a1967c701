"""Reads the tenant of a request, which sees only its own stored objects."""

from __future__ import annotations

from starlette.requests import Request

from headrace.frontend.auth.gate import TENANT_HEADER, tenant_of_scope
from headrace.frontend.http.http_exchange import HttpExchange


def tenant_of(exchange: HttpExchange) -> str:
    """Return the tenant of a request on the token path."""
    return exchange.tenant


def tenant_in(request: Request) -> str:
    """Return the tenant of a request that Starlette routes."""
    header = request.headers.get(TENANT_HEADER.decode(), "")
    return tenant_of_scope(request.scope, {TENANT_HEADER: header.encode("latin-1")})
