"""Checks periodically that all streams are present and that the server accepts writes.

A connection that is up proves little: JetStream may be switched off, a stream deleted, the disk full.  Then no request should
be accepted.  `trouble` gives the fault in words for an operator; once that is mended it is empty again, without a restart of
any process.  Streams in memory are created again here; a stream in files had contents, so the operator decides about it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import structlog
from prometheus_client import REGISTRY, Gauge, generate_latest

from headrace.jetstream import metrics
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import (
    NOT_STORING,
    DiskFull,
    JetStreamDisabled,
    JetStreamError,
    NotConnected,
    PublishUnknown,
    QueueFull,
)
from headrace.jetstream.provision import StreamStatus, ensure_streams
from headrace.jetstream.topology import Topology

log = structlog.get_logger(__name__)

LOOK_S = 2.0
LOOK_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 6.0  # a disk that is busy is not full
STORED_S = 10.0  # a write that was confirmed so recently need not be tried
PROBE_BYTES = 8192  # more than the rest of a file's last page, which a full disk still accepts
PROBE_TTL_S = 5.0
PROBE_POOL = "_probe"
PAGE = 1024

_UNSTORED = (DiskFull, PublishUnknown)


class BrokerHealth:
    """Run `run` beside the connection's users. `on_mended(names)` gets the streams that were missing and are there again."""

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        *,
        probe: bool = False,
        look_s: float = LOOK_S,
        on_mended: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        """With `probe`, store a small message when no other write was seen for a while, to test whether writes work."""
        self.trouble = ""
        self._connection = connection
        self._specs = {spec.name: spec for spec in topology.all_streams() if not spec.on_demand}
        self._probe_subject = topology.subjects.req(PROBE_POOL, "std") if probe else ""
        self._probe_stream = topology.subjects.stream("REQ")
        self._look_s = look_s
        self._on_mended = on_mended
        self._missing: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stored_s = self._loop.time()
        self._unstored = ""

    def stored(self) -> None:
        self._stored_s = self._loop.time()
        self._unstored = ""

    def failed(self, error: JetStreamError) -> None:
        """Check at once, because a request was not stored."""
        if isinstance(error, _UNSTORED) and self._connection.connected:
            self._unstored = f"the broker {NOT_STORING}: {error}"
            self._tell(self._unstored)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if self._connection.connected:
                try:
                    await self._look()
                except JetStreamError as error:
                    log.debug("standing.not_seen", error=str(error))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        """Check streams and writes once. Raises JetStreamError if the server cannot be reached."""
        try:
            missing = frozenset(self._specs.keys() - await self._names())
        except JetStreamDisabled as error:
            self._tell(f"JetStream is not enabled: {error}")
            return
        in_memory = {name for name in missing if self._specs[name].storage == "memory"}
        if in_memory:
            await ensure_streams(self._connection, [self._specs[name] for name in sorted(in_memory)])
        lost = missing - in_memory
        back, self._missing = self._missing - lost, lost
        if lost:
            names = ", ".join(sorted(lost))
            self._tell(f"the broker has no {names}: `headrace streams apply` makes what is missing again")
        else:
            self._tell(await self._storing())
        if back and self._on_mended is not None:
            self._on_mended(back)

    async def _names(self) -> set[str]:
        found: set[str] = set()
        offset = 0
        while True:
            page = await self._connection.api.call("STREAM.NAMES", {"offset": offset}, timeout_s=LOOK_TIMEOUT_S)
            names: Iterable[str] = page.get("streams") or ()
            found.update(names)
            offset += PAGE
            if offset >= page.get("total", 0):
                return found

    async def _storing(self) -> str:
        """Return why the server cannot store messages, or an empty string."""
        if not self._probe_subject or (not self._unstored and self._loop.time() - self._stored_s < STORED_S):
            return self._unstored
        try:
            ack = await self._connection.publish(
                self._probe_subject, bytes(PROBE_BYTES), ttl_s=PROBE_TTL_S, timeout_s=PROBE_TIMEOUT_S
            )
        except (QueueFull, NotConnected):  # a cap of ours, or no information
            return ""
        except JetStreamError as error:
            self._unstored = f"the broker {NOT_STORING}: {error}"
        else:
            self.stored()
            with contextlib.suppress(JetStreamError):  # otherwise it expires
                await self._connection.delete_message(self._probe_stream, ack.seq)
        return self._unstored

    def _tell(self, trouble: str) -> None:
        if trouble and not self.trouble:
            metrics.TROUBLE.set(1)
            log.error("broker.unusable", reason=trouble)
        elif self.trouble and not trouble:
            metrics.TROUBLE.set(0)
            log.warning("broker.usable", was=self.trouble)
        self.trouble = trouble


MESSAGES = Gauge("headrace_stream_messages", "Messages in a stream or bucket", ["stream"])
BYTES = Gauge("headrace_stream_bytes", "Their size", ["stream"])
OLDEST_S = Gauge("headrace_stream_oldest_seconds", "Age of the oldest message; 0 while the stream is empty", ["stream"])
CONSUMERS = Gauge("headrace_stream_consumers", "Consumers of a stream", ["stream"])
UNDELIVERED = Gauge("headrace_stream_undelivered", "Messages that its consumers have not been given, summed", ["stream"])
UNACKNOWLEDGED = Gauge("headrace_stream_unacknowledged", "Messages given out and not acknowledged, summed", ["stream"])
REDELIVERED = Gauge("headrace_stream_redelivered", "Of those, messages given out more than once", ["stream"])
MISSING = Gauge("headrace_stream_missing", "1 for a stream that should be there and is not", ["stream"])

_ALL = (MESSAGES, BYTES, OLDEST_S, CONSUMERS, UNDELIVERED, UNACKNOWLEDGED, REDELIVERED, MISSING)


def exposition(found: Iterable[StreamStatus]) -> bytes:
    """Return the metrics of these streams as Prometheus text: sums per stream, no consumer by name."""
    for gauge in _ALL:
        gauge.clear()
    for one in found:
        MISSING.labels(one.stream).set(not one.exists)
        if not one.exists:
            continue
        MESSAGES.labels(one.stream).set(one.messages)
        BYTES.labels(one.stream).set(one.bytes)
        OLDEST_S.labels(one.stream).set(one.oldest_age_s or 0.0)
        CONSUMERS.labels(one.stream).set(len(one.consumers))
        UNDELIVERED.labels(one.stream).set(sum(consumer.waiting_messages for consumer in one.consumers))
        UNACKNOWLEDGED.labels(one.stream).set(sum(consumer.ack_pending for consumer in one.consumers))
        REDELIVERED.labels(one.stream).set(sum(consumer.redelivered for consumer in one.consumers))
    names = [metric.name for gauge in _ALL for metric in gauge.describe()]
    return generate_latest(REGISTRY.restricted_registry(names))
