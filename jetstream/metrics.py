"""Metrics of a NATS connection."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge

CONNECTED = Gauge("headrace_jetstream_connections", "Connections to NATS that are up")
RECONNECTS = Counter("headrace_jetstream_reconnects_total", "Times a connection to NATS came back")
NODES_LEFT = Counter(
    "headrace_jetstream_nodes_left_total", "Servers of a cluster left because they answered no pings or stored nothing"
)
DROPPED = Counter("headrace_jetstream_dropped_sends_total", "Core messages and acks not sent", ["reason"])
PUBLISHES = Counter("headrace_jetstream_publishes_total", "Stream publishes by outcome", ["outcome"])
PUBLISH_RETRIES = Counter("headrace_jetstream_publish_retries_total", "Publishes sent again under the same id")
CALLS_REPEATED = Counter(
    "headrace_jetstream_calls_repeated_total", "Calls and publishes sent again because no answer came, under the same id"
)
CALLBACK_ERRORS = Counter("headrace_jetstream_callback_errors_total", "Message callbacks that raised")
PULL_RESETS = Counter("headrace_jetstream_pull_resets_total", "Pull loops that started over", ["reason"])
FOLLOW_RESTARTS = Counter("headrace_jetstream_follow_restarts_total", "Times a follow made its consumer anew", ["reason"])
WATCH_LISTINGS = Counter("headrace_jetstream_watch_listings_total", "Listings that watches made")
OTHERS_REMOVED = Counter(
    "headrace_jetstream_others_removed_total", "Writes to a watched bucket that removed the messages of all other keys"
)
TROUBLE = Gauge("headrace_jetstream_unusable", "1 while the server is connected but lacks streams, room or JetStream")
LEASE_LAPSES = Counter("headrace_jetstream_lease_lapses_total", "Leases of this process that lapsed")
