"""Prometheus metrics of transfers. `op`: read or write."""

from __future__ import annotations

from headrace.base.metrics import Counter, Gauge, Histogram

BYTES = Counter("headrace_nixl_bytes_total", "Bytes that NIXL says it moved", ["op"])
TRANSFERS = Counter("headrace_nixl_transfers_total", "Transfers that ended", ["op", "outcome"])
FAILURES = Counter("headrace_nixl_failures_total", "Transfers that failed, by reason", ["op", "reason"])
SECONDS = Histogram(
    "headrace_nixl_transfer_seconds",
    "Time from asking for a transfer to seeing its end",
    ["op"],
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
DESCRIPTORS = Histogram(
    "headrace_nixl_transfer_descriptors",
    "Ranges of memory in a transfer after adjacent blocks were merged",
    ["op"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384),
)
PEERS = Gauge("headrace_nixl_peers", "Agents whose memory can be reached")
PEERS_LOST = Counter("headrace_nixl_peers_lost_total", "Peers dropped because NIXL found them disconnected")
UNSETTLED = Gauge("headrace_nixl_unsettled_transfers", "Transfers given up that may still touch memory")
