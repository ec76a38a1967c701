"""Finds a port for the frontend and queries it over HTTP.

An HTTP client library would double the start-up time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
from functools import cache

from headrace.base.errors import SettingsError
from headrace.jetstream.errors import NOT_STORING

_QUIET_PORTS = range(20_000, 32_768)
_TRIES = 20

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable_host(host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`."""
    return _ANY_HOST.get(host, host)


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the base URL for a client on this machine."""
    name = reachable_host(host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def choose_port(host: str, port: int, *, setting: str = "frontend") -> int:
    """Return `port`, or a free port for 0. Raises SettingsError when it is taken or the host is not this machine's.

    A free port is one that systems usually give to no outgoing connection, which could take it before the frontend does.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]

        def bound(number: int) -> int:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address[0], number, *address[2:]))
                return int(probe.getsockname()[1])

        for free in random.sample(_QUIET_PORTS, _TRIES) if port == 0 else ():
            with contextlib.suppress(OSError):
                return bound(free)
        return bound(port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} ({setting}.host, {setting}.port): {error.strerror}") from None


@cache
def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def get(host: str, port: int, path: str, *, tls: bool = False, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Return (status, body) of a GET; status 0 when there is no answer in time.

    With `tls` no certificate is checked: this asks the own frontend on the own machine, and sends nothing secret.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(reachable_host(host), port, ssl=_unchecked() if tls else None)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return int(head.split(b" ", 2)[1]), body
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0, b""


async def served_models(host: str, port: int, *, tls: bool = False) -> list[str]:
    """Return the names of the models that can answer, empty when the frontend does not say. No key is needed to ask."""
    status, body = await get(host, port, "/ready", tls=tls)
    try:
        return [str(name) for name in json.loads(body)["models"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


async def stores_nothing(host: str, port: int, *, tls: bool = False) -> bool:
    """Return True if the frontend says that the NATS server takes no messages; False when it says nothing."""
    _, body = await get(host, port, "/health", tls=tls)
    try:
        return NOT_STORING in json.loads(body)["broker"].get("trouble", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


async def kinds_of(host: str, port: int, model: str, *, tls: bool = False) -> list[str]:
    """Return the kinds of requests that the model takes, empty when the frontend does not say."""
    status, body = await get(host, port, "/health", tls=tls)
    try:
        return [str(kind) for kind in json.loads(body)["models"][model]["kinds"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []
