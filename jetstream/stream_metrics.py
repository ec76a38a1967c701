"""Prometheus metrics of a deployment's streams, as one process reads them for all: sums per stream, no consumer by name."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, Gauge, generate_latest

from headrace.jetstream.provision import StreamStatus

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
    """Return the metrics of these streams as text for Prometheus, and of no others."""
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
