"""Reads the tenant of a request, which sees only its own stored objects."""

from __future__ import annotations

from starlette.requests import Request

from headrace.frontend.generation.job_options import TENANT_HEADER
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.jetstream.subjects import tenant_token


def tenant_of(exchange: HttpExchange) -> str:
    """Return the tenant of a request on the token path."""
    return tenant_token(exchange.header(TENANT_HEADER) or "")


def tenant_in(request: Request) -> str:
    """Return the tenant of a request that Starlette routes."""
    return tenant_token(request.headers.get(TENANT_HEADER.decode(), ""))
