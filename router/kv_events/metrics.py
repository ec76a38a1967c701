"""Prometheus metrics of the index and its replica: cache events, snapshots, restarts."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge, Histogram

EVENTS = Counter("headrace_router_kv_events_total", "Cache events applied to the index", ["kind"])
BLOCKS = Counter("headrace_router_kv_blocks_total", "Blocks in cache events applied", ["change"])
REFUSED = Counter("headrace_router_kv_refused_total", "Cache events that could not be used", ["reason"])
REPEATED = Counter("headrace_router_kv_repeated_total", "Cache events that were known already", ["why"])
LOST = Counter("headrace_router_kv_lost_total", "Times a worker's blocks were dropped because events are missing", ["why"])
DUMPS = Counter("headrace_router_kv_inventories_total", "Inventories of workers by what became of them", ["outcome"])
ASKS = Counter("headrace_router_kv_inventory_asks_total", "Times a worker was asked for its inventory")
INCOMPLETE = Gauge("headrace_router_kv_incomplete_workers", "Workers whose inventory is wanted", ["pool"])
STRANGERS = Gauge("headrace_router_kv_strangers", "Senders of cache events that are no members", ["pool"])
POSITION = Gauge("headrace_router_kv_position", "Sequence of the KV stream up to which the index has everything", ["pool"])
TRIMMED = Counter("headrace_router_kv_trimmed_total", "Times events were removed from the stream before they were read")

LEADER = Gauge("headrace_router_snapshot_leader", "1 while this router makes the snapshots of the pool", ["pool"])
SNAPSHOTS = Counter("headrace_router_snapshots_total", "Snapshots by what became of them", ["outcome"])
SNAPSHOT_S = Histogram(
    "headrace_router_snapshot_seconds",
    "Time to make and store a snapshot",
    buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
SLICE_S = Histogram(
    "headrace_router_snapshot_slice_seconds",
    "Time that one slice of a snapshot kept everything else waiting",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
SNAPSHOT_BYTES = Gauge("headrace_router_snapshot_bytes", "Size of the last snapshot made", ["pool"])
SNAPSHOT_SEQ = Gauge("headrace_router_snapshot_seq", "Stream sequence of the last snapshot made", ["pool"])
PURGED = Counter("headrace_router_kv_purged_total", "Cache events removed from the stream behind a snapshot")
RESTORES = Counter("headrace_router_restores_total", "Starts of the index by where it came from", ["source"])
UNUSABLE = Counter("headrace_router_snapshots_unusable_total", "Snapshots that could not be used", ["reason"])
RESTORE_S = Histogram(
    "headrace_router_restore_seconds",
    "Time until the index was ready",
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
