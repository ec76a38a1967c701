"""Declares the metrics of an elector."""

from __future__ import annotations

from headrace.loop_metrics import Counter, Gauge

ADDRESSES = Gauge("headrace_elector_addresses", "Servers that the elector was given the addresses of")
CONNECTED = Gauge("headrace_elector_connected_servers", "Servers that it is connected to")
GONE = Gauge("headrace_elector_gone_servers", "Servers that were there and answer nothing, or are cut off from most others")
LEADERLESS = Gauge("headrace_elector_leaderless_groups", "Raft groups that wait for a leader while a server is gone")
CALLED = Counter("headrace_elector_elections_called_total", "Elections that it called")
