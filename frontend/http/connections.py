"""Limits on all client connections of the server: how many there may be, and for how long each may owe something.

uvicorn's protocol leaves these to a proxy in front of it: a connection that never finishes its headers stays open forever.
Without a proxy, that exhausts memory and descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import time
from collections import Counter
from pathlib import Path

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from headrace.frontend.errors import CertificateUnusable
from headrace.frontend.http.bodies import BodyBudget
from headrace.frontend.http.client_connection import ClientConnection
from headrace.frontend.http.loop import LoopBudget
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()

SWEEP_S = 0.5
SWEEP_BUDGET_S = 0.002  # per loop iteration; the connections closed cost the next iteration about twice as much again
LINGER_S = 10.0  # for a client to read the end of its last answer, or to send the rest of a body that is discarded
SPARE_FILES = 128  # descriptors kept for anything but client connections
PEER_SHARE = 0.25  # of the connections, that one address may have while all are taken
_SHED = 0.02  # share of the connections that are closed at once if there are too many


class Connections:
    """All client connections of the server, with their limits. Run `sweep` beside the server."""

    def __init__(self, settings: FrontendSettings, metrics: Metrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._state: ServerState | None = None
        self._loop_budget: LoopBudget | None = None
        self.bodies = BodyBudget(settings.body_memory_bytes, metrics.arriving_bytes.set)
        self._stream_head: tuple[list[tuple[bytes, bytes]] | None, bytes] = (None, b"")
        self.most = min(settings.max_connections, max(16, _raise_file_limit() - SPARE_FILES))
        if self.most < settings.max_connections:
            log.warning("connections.limited", wanted=settings.max_connections, most=self.most, why="open files (ulimit -n)")

    def protocol(self) -> type[ClientConnection]:
        """Return the protocol class that uvicorn instantiates per connection."""

        class Bound(ClientConnection):
            board = self

        return Bound

    def stream_head(self, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the status line and the server's own headers. uvicorn makes a new list of these every second, for the date."""
        made_for, head = self._stream_head
        if made_for is not default_headers:
            lines = b"".join(b"%b: %b\r\n" % header for header in default_headers)
            head = STATUS_LINE[200] + lines + b"transfer-encoding: chunked\r\n"
            self._stream_head = default_headers, head
        return head

    def loop_budget(self, loop: asyncio.AbstractEventLoop) -> LoopBudget:
        """Return the budget of the event loop, which is the same one for all connections."""
        if self._loop_budget is None:
            self._loop_budget = LoopBudget(loop)
        return self._loop_budget

    def refused(self, code: str) -> None:
        self._metrics.connections_refused.labels(code).inc()

    def admit(self, connection: ClientConnection) -> bool:
        """Return True if there is room for the connection, made by closing others if necessary.

        First those of addresses with more than their share, then those with half a head, then idle ones, the oldest first.
        """
        self._state = connection.server_state
        connections = connection.connections
        self._metrics.connections.set(len(connections))
        if len(connections) <= self.most:
            return True
        peers = Counter(other.peer for other in connections if isinstance(other, ClientConnection))
        share = max(1, int(self.most * PEER_SHARE))
        closable = [
            (peers[other.peer] <= share, not other.half_head, other.idle_since or other.waits_since or 0.0, id(other), other)
            for other in connections
            if isinstance(other, ClientConnection)
            and other is not connection
            and (other.half_head or other.idle_since is not None)
        ]
        closable.sort()
        closed = closable[: max(1, int(self.most * _SHED))]
        for *_, other in closed:
            connections.discard(other)
            other.transport.abort()
        self._metrics.connections_shed.inc(len(closed))
        return bool(closed)

    async def sweep(self) -> None:
        """Close connections that exceed their time limits, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._state is None:
                continue
            self._metrics.connections.set(len(self._state.connections))
            now = loop.time()
            pause = time.perf_counter() + SWEEP_BUDGET_S
            for connection in list(self._state.connections):
                if isinstance(connection, ClientConnection):
                    self._check(connection, now)
                if time.perf_counter() > pause:
                    await asyncio.sleep(0)
                    pause = time.perf_counter() + SWEEP_BUDGET_S

    def _check(self, connection: ClientConnection, now: float) -> None:
        if connection.full_since is not None and now - connection.full_since > self.settings.slow_client_s + LINGER_S:
            self._metrics.slow_clients.inc()  # of an answer that does not look at this by itself
            connection.transport.abort()
            return
        since = connection.waits_since
        if since is None:
            return
        limit = self.settings.header_timeout_s if connection.owes == "headers" else LINGER_S
        if now - since <= limit:
            return
        if connection.owes == "headers" and connection.refuse_late_headers(limit):
            return
        if connection.owes == "end":
            connection.transport.abort()
        else:
            self.refused("idle")
            connection.transport.close()
            connection.waits_since, connection.owes = now, "end"


def _raise_file_limit() -> int:
    """Raise the limit on open files as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


# TLS of the HTTP server: one context, into which a new certificate is loaded when its files have changed.

LOOK_S = 2.0


class ServerTls:
    """The certificate of a server, from PEM files. `key_file` may be the certificate's own file."""

    def __init__(self, cert_file: str, key_file: str | None = None) -> None:
        """Load the certificate. Raises CertificateUnusable naming the files."""
        self._cert = Path(cert_file).expanduser()
        self._key = Path(key_file or cert_file).expanduser()
        self.context = _new_context()
        self._seen = self._stamp()
        self._load()

    async def watch(self) -> None:
        """Load the certificate again whenever its files have changed, until cancelled.

        Connections that are open keep theirs. A certificate that cannot be loaded is logged, and the old one stays.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the certificate again if its files have changed since it was loaded or tried."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._load()
        except CertificateUnusable as error:
            log.warning("tls.not_reloaded", error=str(error))
        else:
            log.info("tls.reloaded", cert=str(self._cert))

    def _load(self) -> None:
        try:
            _new_context().load_cert_chain(self._cert, self._key)  # a pair that does not fit must not reach the one in use
            self.context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            why = str(error) if isinstance(error, ssl.SSLError) else error.strerror
            raise CertificateUnusable(f"the certificate {self._cert} with the key {self._key} cannot be used: {why}") from None

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
